"""The page that reviews duplicates, in a real headless Chromium."""

import json
import shutil
from pathlib import Path

import makers
import pytest
from browsing import MARKUP, fits
from retrieval.index.index import create_index, open_index

from retrieval_server.keys import add_key, new_key

pytestmark = pytest.mark.browser


@pytest.fixture
def copied(tmp_path, bundle_path, cli):
    """An index `i` of digits, 30 of which have two copies, and its file of groups."""
    makers.write_digits(tmp_path / "photos", 40)
    originals = sorted((tmp_path / "photos").rglob("*.png"))
    for path in originals[:30]:
        for word in ("a", MARKUP.replace("/", "")):
            shutil.copy(path, path.with_name(f"{path.stem} {word}.png"))
    create_index(tmp_path / "i", bundle_path, [tmp_path / "photos"], progress=False)
    return written(tmp_path, cli)


def written(folder: Path, cli, *words: object) -> Path:
    target = folder / "groups.json"
    done = cli("index", "duplicates", folder / "i", "--within", "0", "--output", target, *words)
    assert done.code == 0, done.err
    return target


def groups_of(file: Path) -> list[list[str]]:
    return [group["ids"] for group in json.loads(file.read_text())["groups"]]


def opened(page, url: str, file: Path, groups: int) -> None:
    page.goto(f"{url}/duplicates")
    page.set_input_files("#file", str(file))
    page.wait_for_selector(f"text={groups} groups of i.")


def loaded(page, group: int = 1) -> None:
    """Wait until the pictures of a group are there; the page asks for those near the window."""
    page.locator(".group").nth(group - 1).scroll_into_view_if_needed()
    page.wait_for_function(
        "group => [...document.querySelectorAll(`.group:nth-child(${group}) .item`)].every("
        "card => card.querySelector('img')?.naturalWidth > 0)",
        arg=group,
    )


def test_groups_are_reviewed_and_copies_deleted(page, served, copied, cli, tmp_path):
    server = served(tmp_path / "i", "--images", str(tmp_path / "photos"), "--open", "write")
    groups = groups_of(copied)
    opened(page, server.url, copied, 30)
    loaded(page)
    assert page.locator(".group").count() == 20
    first = page.locator(".group").first
    assert first.locator(".key").all_inner_texts() == groups[0]
    assert first.locator("p").all_inner_texts() == [
        f"{about}, {groups[0][0][0]}"
        for about in ("representative", "distance 0.0000", "distance 0.0000")
    ]
    assert first.locator("h2").inner_text() == "Group 1: 3 items, diameter 0.0000"
    assert page.locator("#delete").is_disabled()

    # By keyboard: keep the first two, delete the third.
    first.locator("input[value=keep]").first.focus()
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("() => document.activeElement.value") == "delete"
    page.locator(".group").nth(1).get_by_label("Not the same").check()
    page.locator(".group").nth(2).get_by_text("Keep only the first").click()
    assert page.locator("#delete").inner_text() == "Delete 3 items"
    page.get_by_text("Next").click()
    assert page.evaluate("() => document.activeElement.textContent").startswith("Group 21:")
    assert page.locator("#range").inner_text() == "21 to 30 of 30 groups"
    page.get_by_text("Previous").click()
    assert page.locator("input:checked").count() == 7

    # Nothing is written before the deletion is confirmed.
    said = []
    page.once("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.click("#delete")
    assert said == ["Delete 3 items from i? This cannot be undone."]
    with open_index(tmp_path / "i") as index:
        assert len(index) == 100
        for group in (1, 3):  # else the page would ask for a picture that is gone
            loaded(page, group)
        index.delete([groups[2][1]])
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#delete")
    page.wait_for_selector("text=2 items deleted. 1 item had been gone already.")
    assert page.evaluate("() => document.activeElement.id") == "status"
    with open_index(tmp_path / "i") as index:
        gone = {groups[0][2], *groups[2][1:]}
        assert (
            index.get([*groups[0], *groups[1], *groups[2]]).keys()
            == {
                *groups[0],
                *groups[1],
                *groups[2],
            }
            - gone
        )
    assert page.locator("#range").inner_text() == "1 to 20 of 29 groups"
    assert page.locator(".group").first.locator(".key").all_inner_texts() == groups[0][:2]

    with page.expect_download() as download:
        page.click("#download")
    assert download.value.suggested_filename == "reviewed.json"
    reviewed = tmp_path / "reviewed.json"
    download.value.save_as(reviewed)
    with open_index(tmp_path / "i") as index:
        assert json.loads(reviewed.read_text()) == {
            "identity": index.identity,
            "reviewed": [groups[0][:2], groups[1]],
        }
    assert groups_of(written(tmp_path, cli, "--reviewed", reviewed)) == groups[3:]
    assert page.faults == []
    assert all(url.startswith((server.url, "blob:", "data:")) for url in page.asked)


def test_the_page_of_duplicates_fits_and_axe_finds_nothing(page, served, copied, tmp_path):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    server = served(tmp_path / "i", "--images", str(tmp_path / "photos"))
    page.emulate_media(reduced_motion="reduce")
    opened(page, server.url, copied, 30)
    loaded(page)
    assert page.locator("text=Deleting needs a key with the role write.").is_visible()
    page.locator(".group").nth(0).get_by_text("Keep only the first").click()
    assert page.locator("#delete").is_disabled()
    page.locator("summary").click()
    for scheme, width in (("light", 1280), ("dark", 1280), ("light", 360), ("dark", 360)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        loaded(page)
        assert fits(page)
        report = axe.run(page)
        assert report.violations_count == 0, report.generate_report()


def test_files_that_cannot_be_reviewed_are_a_sentence_each(page, served, copied, tmp_path):
    server = served(tmp_path / "i", "--images", str(tmp_path / "photos"))
    page.goto(f"{server.url}/duplicates")
    content = json.loads(copied.read_text())
    damaged = "The file is damaged, or retrieval index duplicates --output has not written it."
    empty = json.dumps({**content, "groups": []})
    for number, (text, says) in enumerate(
        (
            (copied.read_text()[:100], damaged),
            (empty, "The file has no groups."),
            ("null", damaged),
            (
                json.dumps({**content, "identity": "another"}),
                "The file is of another index than i.",
            ),
            (json.dumps({**content, "groups": [{"ids": ["a", 3]}]}), damaged),
            (" " * 100_000_001, "The file has 100,000,001 bytes; the limit is 100,000,000 bytes."),
        )
    ):
        # The browser tells the page of another path only.
        file = tmp_path / f"{number}.json"
        file.write_text(text)
        page.set_input_files("#file", str(file))
        page.wait_for_selector(f"text={says}")
        assert page.locator(".group").count() == 0
    other = tmp_path / "other.json"
    lost = {"ids": ["lost", "gone"], "distances": [0, 0.5], "diameter": 0.5}
    other.write_text(json.dumps({**content, "groups": [lost]}))
    page.set_input_files("#file", str(other))
    page.wait_for_selector("text=1 group of i.")
    page.wait_for_selector("text=There is no such item.")
    assert page.locator(".item p").all_inner_texts() == ["representative", "distance 0.5000"]


def test_a_key_is_needed_and_what_was_decided_stays(page, served, copied, tmp_path):
    keys = tmp_path / "keys.jsonl"
    words = {}
    for role in ("read", "write"):
        words[role], kept = new_key(role, role)
        add_key(keys, kept)
    server = served(tmp_path / "i", "--images", str(tmp_path / "photos"), "--keys", str(keys))
    page.goto(f"{server.url}/duplicates")
    page.set_input_files("#file", str(copied))
    page.wait_for_selector("text=A key is needed for searching and looking.")
    page.fill("#key", words["read"])
    page.press("#key", "Enter")
    page.wait_for_selector("text=30 groups of i.")
    loaded(page)
    page.locator(".group").first.get_by_label("Delete").last.check()
    assert page.locator("#delete").is_disabled()
    page.fill("#key", words["write"])
    page.press("#key", "Enter")
    page.wait_for_selector("#delete:not([disabled])")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#delete")
    page.wait_for_selector("text=1 item deleted.")
    with open_index(tmp_path / "i") as index:
        assert groups_of(copied)[0][2] not in index.get(groups_of(copied)[0])
