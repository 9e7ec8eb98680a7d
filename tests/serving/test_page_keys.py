"""The page where the operator gives keys, in a real headless Chromium."""

import pytest
from browsing import MARKUP, first_is, loaded
from retrieval.serving.index.index import create_index

pytestmark = pytest.mark.browser


def test_with_a_key_items_are_added_changed_and_deleted(
    page, served, makers, bundle_path, photos, tmp_path, process
):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed"
    ).Axe()
    create_index(tmp_path / "i", bundle_path, [photos / "1"], progress=False)
    keys = tmp_path / "keys.jsonl"
    texts = {
        role: process(
            "-m", "retrieval.cli", "keys", "add", role, "--role", role, "--output", keys
        ).out
        for role in ("read", "write")
    }
    words = {role: max(text.split(), key=len) for role, text in texts.items()}
    server = served(tmp_path / "i", "--keys", str(keys))
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(server.url)
    page.wait_for_selector("text=A key is needed for searching and looking.")
    page.fill("#key", words["read"])
    page.press("#key", "Enter")
    page.wait_for_selector("text=euclidean distance")
    page.set_input_files("#file", str(photos / "7" / "0007.png"))
    page.wait_for_selector(".hit")
    loaded(page)  # the images too, which an <img> could not ask for
    assert page.locator(".edit >> visible=true").count() == 0
    page.fill("#key", words["write"])
    page.press("#key", "Enter")
    page.click("#add")
    page.fill("#item-id", f"a/b {MARKUP}")
    page.fill("#item-label", MARKUP)
    page.fill("#item-metadata", "{price: 3}")
    page.click("#item-form .main")
    page.wait_for_selector("text=The metadata must be a JSON object")
    for scheme in ("light", "dark"):  # with the form, its error, the key and what changes an item
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        report = axe.run(page)
        assert report.violations_count == 0, report.generate_report()
    page.fill("#item-metadata", '{"price": 3}')
    page.click("#item-form .main")
    first_is(page, f"a/b {MARKUP}")
    assert page.locator(".hit .label").first.inner_text() == MARKUP
    page.click("#add")  # its id is not given to another
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
