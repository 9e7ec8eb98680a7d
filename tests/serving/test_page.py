"""The page in a real headless Chromium."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from retrieval.serving.index.build import write_index

pytestmark = pytest.mark.browser

QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

DROP = """async ([name, bytes]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([new Uint8Array(bytes)], name));
  for (const kind of ["dragenter", "dragover", "drop"]) {
    document.querySelector("#drop").dispatchEvent(
      new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true }));
  }
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture
def page(browser) -> Iterator[object]:
    context = browser.new_context(viewport={"width": 1180, "height": 900}, offline=False)
    page = context.new_page()
    page.set_default_timeout(10_000)
    page.faults, page.asked = [], []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.on("console", lambda message: message.type == "error" and page.faults.append(message.text))
    page.on("request", lambda request: page.asked.append(request.url))
    yield page
    context.close()


def shot(page, name: str) -> None:
    """Keep a picture for people, where the variable says."""
    if folder := os.environ.get("RETRIEVAL_SCREENSHOTS"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def loaded(page) -> None:
    page.wait_for_function(
        "() => [...document.querySelectorAll('.hit img')].every(image => image.complete && image.naturalWidth > 0)"
    )


def test_a_chosen_image_shows_its_neighbours(page, served, index_path, photos):
    server = served(index_path)
    page.goto(server.url)
    page.wait_for_selector("text=digits: 200 items, euclidean distance")
    shot(page, "empty")
    query = photos / "3" / "0003.png"
    page.set_input_files("#file", str(query))
    page.wait_for_selector(".hit")
    loaded(page)
    shot(page, "light")
    assert page.locator(".hit").count() == 10
    first = page.locator(".hit").first
    assert first.locator(".label").inner_text() == "3"
    assert first.locator(".distance").inner_text() == "0.0000"
    assert first.locator(".key").inner_text() == "3/0003.png"
    assert re.fullmatch(r"10 nearest items, found in \d+\.\d ms", page.locator("#status").inner_text())
    expected = server.client.post("/v1/search", files={"image": query.read_bytes()}).json()["results"]
    assert page.locator(".hit .key").all_inner_texts() == [hit["key"] for hit in expected]
    page.select_option("#k", "5")
    page.wait_for_function("() => document.querySelectorAll('.hit').length === 5")
    page.locator(".hit button").nth(2).click()  # a result as the next query
    page.wait_for_function(
        f"() => document.querySelector('.hit .key').textContent === {expected[2]['key']!r}"
    )
    page.emulate_media(color_scheme="dark")
    loaded(page)
    shot(page, "dark")
    page.set_viewport_size({"width": 390, "height": 800})
    shot(page, "narrow")
    assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
    assert page.faults == []
    assert all(url.startswith((server.url, "blob:", "data:")) for url in page.asked)


def test_a_dropped_image_and_a_bad_one(page, served, index_path, photos):
    server = served(index_path, "--max-bytes", "5000")
    page.goto(server.url)
    page.wait_for_selector("text=200 items")
    query = photos / "5" / "0005.png"
    page.evaluate(DROP, [query.name, list(query.read_bytes())])
    page.wait_for_selector(".hit")
    assert page.locator(".hit .key").first.inner_text() == "5/0005.png"
    assert page.locator("#preview").is_visible()
    page.evaluate(DROP, ["notes.txt", list(b"no image at all")])
    page.wait_for_selector("#error:not([hidden])")
    assert "is not an image in a known format" in page.locator("#error").inner_text()
    assert page.locator(".hit").count() == 0
    shot(page, "error")
    page.evaluate(DROP, ["large.png", [0] * 6000])
    page.wait_for_selector("text=The image has 6,000 bytes; the limit is 5,000.")
    page.evaluate(DROP, [query.name, list(query.read_bytes())])
    page.wait_for_selector(".hit")
    assert page.locator("#error").is_hidden()
    assert [fault for fault in page.faults if "422" not in fault] == []
    server.process.terminate()
    server.process.wait(15)
    page.evaluate(DROP, [query.name, list(query.read_bytes())])
    page.wait_for_selector("text=The server cannot be reached. Is it still running?")


def test_the_keyboard_and_the_names_of_things(page, served, index_path, photos):
    server = served(index_path)
    page.goto(server.url)
    page.set_input_files("#file", str(photos / "3" / "0003.png"))
    page.wait_for_selector(".hit")
    tree = page.locator("body").aria_snapshot()
    for name in (
        'button "Choose an image"',
        'combobox "Results"',
        "status",
        'list "Nearest items, nearest first"',
    ):
        assert name in tree, tree
    assert page.locator("html").get_attribute("lang") == "en"
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.matches('.hit:nth-child(2) button')"):
            break
    key = page.locator(".hit .key").nth(1).inner_text()
    page.keyboard.press("Enter")
    page.wait_for_function(f"() => document.querySelector('.hit .key').textContent === {key!r}")


def test_names_from_files_are_text_and_never_markup(page, served, makers, bundle_path, tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    path = makers.write_digits(tmp_path / "d", 1)[0]
    shutil.copy(path, folder / "<b>bold.png")
    write_index(bundle_path, [folder], tmp_path / "i", progress=False)
    server = served(tmp_path / "i")
    page.goto(server.url)
    page.set_input_files("#file", str(path))
    page.wait_for_selector(".hit")
    assert page.locator(".hit .key").inner_text() == "<b>bold.png"
    assert page.locator(".hit .label").inner_text() == "<img src=x onerror=alert(1)>"
    assert page.faults == []


def test_features_are_asked_for_as_numbers(page, served, makers, tmp_path):
    bundle = makers.make_bundle(tmp_path / "b", kind="features", normalized=False)
    features = np.random.default_rng(0).normal(size=(30, 64)).round(3)
    np.savez(tmp_path / "f.npz", features=features)
    write_index(bundle, [tmp_path / "f.npz"], tmp_path / "i", progress=False)
    server = served(tmp_path / "i")
    page.goto(server.url)
    page.wait_for_selector("#vector")
    page.fill("#vector", str(features[11].tolist()))
    page.click("text=Search >> nth=-1")
    page.wait_for_selector(".hit")
    assert page.locator(".hit .key").first.inner_text() == "f/11"
    shot(page, "vector")
    page.fill("#vector", "1, two")
    page.click("#numbers button")
    page.wait_for_selector("text=Write the vector as numbers")
    assert page.faults == []
