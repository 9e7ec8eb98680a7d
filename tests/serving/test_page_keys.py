"""The search page of a server with keys, in a real headless Chromium."""

import pytest
from browsing import MARKUP, first_is, loaded
from retrieval.serving.http.keys import add_key, new_key
from retrieval.serving.index.index import create_index

pytestmark = pytest.mark.browser


def test_with_a_key_items_are_added_changed_and_deleted(
    page, served, bundle_path, photos, tmp_path
):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed"
    ).Axe()
    create_index(tmp_path / "i", bundle_path, [photos / "1"], progress=False)
    keys = tmp_path / "keys.jsonl"
    words = {}
    for role in ("read", "write"):
        words[role], kept = new_key(role, role)
        add_key(keys, kept)
    server = served(tmp_path / "i", "--keys", str(keys))
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(server.url)
    page.wait_for_selector("text=A key is needed for searching and looking.")
    page.fill("#key", words["read"])
    page.press("#key", "Enter")
    page.wait_for_selector("text=euclidean distance")
    page.set_input_files("#file", str(photos / "7" / "0007.png"))
    page.wait_for_selector(".hit")
    loaded(page)  # an <img> cannot send a key, so the page fetches the images
    assert page.locator(".edit >> visible=true").count() == 0
    page.fill("#key", words["write"])
    page.press("#key", "Enter")
    page.click("#add")
    page.fill("#item-id", f"a/b {MARKUP}")
    page.fill("#item-label", MARKUP)
    page.fill("#item-metadata", "{price: 3}")
    page.click("#item-form .main")
    page.wait_for_selector("text=The metadata must be a JSON object")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        report = axe.run(page)
        assert report.violations_count == 0, report.generate_report()
    page.fill("#item-metadata", '{"price": 3}')
    page.click("#item-form .main")
    first_is(page, f"a/b {MARKUP}")
    assert page.locator(".hit .label").first.inner_text() == MARKUP
    page.click("#add")  # a new item cannot take this id
    page.fill("#item-id", f"a/b {MARKUP}")
    page.click("#item-form .main")
    page.wait_for_selector("text=An item has this id already.")
    page.click("#cancel")
    page.locator(".hit").first.get_by_text("Change").click()
    page.fill("#item-label", "seven")
    page.click("#item-form .main")
    page.wait_for_function("() => document.querySelector('.hit .label').textContent === 'seven'")
    assert page.locator(".hit .metadata").first.inner_text() == "price: 3"
    page.locator(".hit").first.get_by_text("Delete").click()
    page.wait_for_function("() => document.querySelector('.hit .label')?.textContent === '1'")
    assert page.evaluate("() => [Object.values(sessionStorage), localStorage.length]") == [
        [words["write"]],
        0,
    ]
    assert all(words["write"] not in url for url in [*page.asked, page.url])
    page.click("#forget")
    page.wait_for_selector("text=A key is needed for searching and looking.")
    assert [fault for fault in page.faults if "401" not in fault and "404" not in fault] == []
