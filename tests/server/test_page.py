"""The search page in a real headless Chromium."""

import csv
import re
import shutil
from urllib.parse import unquote

import numpy as np
import pytest
from browsing import (
    MARKUP,
    count_is,
    first_is,
    fits,
    keys_of,
    loaded,
    results,
    search,
    shows,
)
from PIL import Image
from retrieval.index.index import create_index

from retrieval_server.keys import add_key, new_key

pytestmark = pytest.mark.browser

DROP = """async ([name, bytes]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([new Uint8Array(bytes)], name));
  for (const kind of ["dragenter", "dragover", "drop"]) {
    document.querySelector("#drop").dispatchEvent(
      new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true }));
  }
}"""


@pytest.fixture
def digits(shared, index_path, photos):
    return shared(index_path, "--images", str(photos))


def test_a_chosen_image_shows_its_nearest_items(page, digits, photos):
    page.goto(digits.url)
    page.wait_for_selector("text=digits: 200 items, euclidean distance")
    query = photos / "3" / "0003.png"
    search(page, query)
    loaded(page)
    assert page.locator(".hit").count() == 10
    first = page.locator(".hit").first
    for part, text in (("label", "3"), ("distance", "0.0000"), ("key", "3/0003.png")):
        assert first.locator(f".{part}").inner_text() == text
    status = page.locator("#status").inner_text()
    assert re.fullmatch(r"10 nearest items, found in \d+\.\d ms", status)
    expected = results(digits, files={"image": query.read_bytes()})
    assert shows(page, expected)
    page.select_option("#k", "5")
    count_is(page, 5)
    page.locator(".hit button.frame").nth(2).click()  # a result as the next query
    neighbours = results(digits, json={"id": expected[2]["id"], "k": 5})
    first_is(page, neighbours[0]["key"])
    assert shows(page, neighbours)
    page.locator("#stages summary").click()
    rows = page.locator("#stages tbody tr").all_inner_texts()
    assert any(re.fullmatch(r"search\s+\d+\.\d\d", row) for row in rows), rows
    page.emulate_media(color_scheme="dark")
    loaded(page)
    page.set_viewport_size({"width": 390, "height": 800})
    assert fits(page) and page.faults == []
    assert all(url.startswith((digits.url, "blob:", "data:")) for url in page.asked)


def test_a_dropped_image_and_a_bad_one(page, served, index_path, photos):
    server = served(index_path, "--max-bytes", "5000", "--images", str(photos))
    page.goto(server.url)
    page.wait_for_selector("text=200 items")
    query = photos / "5" / "0005.png"
    sound = [query.name, list(query.read_bytes())]
    page.evaluate(DROP, sound)
    first_is(page, "5/0005.png")
    assert page.locator("#preview").is_visible()
    page.evaluate(DROP, ["notes.txt", list(b"no image at all")])
    page.wait_for_selector("#error:not([hidden])")
    assert "is not an image in a known format" in page.locator("#error").inner_text()
    assert page.locator(".hit").count() == 0
    page.evaluate(DROP, ["large.png", [0] * 6000])
    page.wait_for_selector("text=The image has 6,000 bytes; the limit is 5,000.")
    page.evaluate(DROP, sound)
    page.wait_for_selector(".hit")
    assert page.locator("#error").is_hidden()
    assert [fault for fault in page.faults if "422" not in fault] == []
    server.process.terminate()
    server.process.wait(15)
    page.evaluate(DROP, sound)
    page.wait_for_selector("text=The server cannot be reached. Is it still running?")


PASTE = """async ([name, bytes, type]) => {
  const transfer = new DataTransfer();
  if (name) transfer.items.add(new File([new Uint8Array(bytes)], name, { type }));
  else transfer.setData("text/plain", "words");
  const options = { clipboardData: transfer, bubbles: true, cancelable: true };
  const event = new ClipboardEvent("paste", options);
  document.body.dispatchEvent(event);
  return event.defaultPrevented;
}"""


@pytest.mark.parametrize("touch", [False, True])
def test_a_pasted_image_and_a_photo(touch, browser, digits, photos):
    """Only a phone shows the button that takes a photo."""
    five, three = (photos / name for name in ("5/0005.png", "3/0003.png"))
    size = {"width": 390, "height": 800}
    context = browser.new_context(viewport=size, has_touch=touch, is_mobile=touch)
    page = context.new_page()
    page.set_default_timeout(10_000)
    page.goto(digits.url)
    page.wait_for_selector("text=200 items")
    assert not page.evaluate(PASTE, ["", [], ""])  # text is pasted as usual
    assert page.evaluate(PASTE, [five.name, list(five.read_bytes()), "image/png"])
    first_is(page, "5/0005.png")
    photo = page.locator("label[for=photo]")
    assert photo.is_visible() == touch
    if touch:
        assert photo.inner_text() == "Take a photo"
        assert page.locator("#photo").get_attribute("capture") == "environment"
        with page.expect_file_chooser() as chooser:
            photo.tap()
        chooser.value.set_files(str(three))
        first_is(page, "3/0003.png")
        assert fits(page)
    context.close()


def test_the_page_works_by_keyboard_and_names_its_parts(page, digits, photos):
    page.goto(digits.url)
    search(page, photos / "3" / "0003.png")
    tree = page.locator("body").aria_snapshot()
    results_list = 'list "Nearest items, nearest first"'
    for name in ('button "Choose an image"', 'combobox "Results"', "status", results_list):
        assert name in tree, tree
    assert page.locator("html").get_attribute("lang") == "en"
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.matches('.hit:nth-child(2) button')"):
            break
    image = page.locator(".hit img").nth(1).get_attribute("src")
    assert image.endswith("/thumbnail")  # the original may have 20 MB
    id = unquote(image.split("/")[-2])
    page.keyboard.press("Enter")
    first_is(page, results(digits, json={"id": id, "k": 10})[0]["key"])


def test_an_index_of_features_is_searched_with_typed_numbers(page, served, makers, tmp_path):
    bundle = makers.make_bundle(tmp_path / "b", kind="features", normalized=False)
    features = np.random.default_rng(0).normal(size=(30, 64)).round(3)
    np.savez(tmp_path / "f.npz", features=features)
    create_index(tmp_path / "i", bundle, [tmp_path / "f.npz"], progress=False)
    page.goto(served(tmp_path / "i").url)
    page.wait_for_selector("#vector")
    page.fill("#vector", str(features[11].tolist()))
    page.click("#numbers button")
    first_is(page, "f/11")
    page.fill("#vector", "1, two")
    page.click("#numbers button")
    page.wait_for_selector("text=Write the vector as numbers")
    assert page.faults == []


SPY = """const real = window.fetch;
window.fetch = (address, request) => {
  if (request?.body instanceof FormData) window.sent = request.body.get("image").type;
  return real(address, request);
}"""
BOX = ("x", "y", "width", "height")


@pytest.fixture(scope="module")
def described(bundle_path, photos, tmp_path_factory):
    """A living index of 40 digits with metadata, some of which is markup. Not to be changed."""
    tmp_path = tmp_path_factory.mktemp("described")
    with (tmp_path / "list.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "price", "made by"])
        for number, path in enumerate(sorted(photos.rglob("*.png"))[::5]):
            copy = tmp_path / f"<b>{number}.png"
            shutil.copy(path, copy)
            rows.writerow([copy, MARKUP if number % 2 else "it's", number, MARKUP])
    create_index(tmp_path / "i", bundle_path, [tmp_path / "list.csv"], progress=False)
    return tmp_path / "i"


def test_filters_are_built_from_the_metadata_and_markup_stays_text(page, shared, described):
    server, image = shared(described), described.parent / "<b>3.png"
    page.goto(server.url)
    page.wait_for_function("() => document.querySelectorAll('#field option').length === 4")
    assert page.locator("#field option").all_text_contents() == ["label", "id", "made by", "price"]
    search(page, image)
    page.click("#conditions summary")
    for condition in (("label", "=", "it's"), ("made by", "!=", "us"), ("price", ">=", "0")):
        for selector, word in zip(("#field", "#relation"), condition, strict=False):
            page.select_option(selector, word)
        page.fill("#value", condition[2])
        page.click("#add-condition")
    text = page.input_value("#filter")
    assert text.startswith("label = 'it''s' and \"made by\" != 'us' and price >= ")
    form = {"files": {"image": image.read_bytes()}, "data": {"k": "10", "filter": text}}
    expected = results(server, **form)
    first_is(page, expected[0]["key"])
    assert shows(page, expected)
    assert f"made by: {MARKUP}" in page.locator(".hit").first.locator("li").all_inner_texts()
    page.fill("#filter", "price < < 3")
    page.press("#filter", "Enter")
    page.wait_for_selector("#error:not([hidden])")
    wrong = {"id": expected[0]["id"], "filter": "price < < 3"}
    sentence = server.client.post("/v1/search", json=wrong).json()["detail"]
    assert page.locator("#error").text_content() == sentence
    page.fill("#filter", f"label = '{MARKUP}'")
    page.click("#apply")
    page.wait_for_selector(".hit")
    assert set(page.locator(".hit .label").all_inner_texts()) == {MARKUP}
    assert [fault for fault in page.faults if "400" not in fault] == []


def test_a_part_is_searched_for_by_pointer_and_by_keyboard(page, digits, tmp_path, photos):
    both = Image.new("L", (16, 8))
    for left, name in ((0, "3/0003.png"), (8, "5/0005.png")):
        both.paste(Image.open(photos / name), (left, 0))
    both.save(tmp_path / "both.bmp")
    page.add_init_script(SPY)
    page.goto(digits.url)
    search(page, tmp_path / "both.bmp")
    loaded(page)
    x, y, width, height = (page.locator("#view").bounding_box()[n] for n in BOX)
    page.mouse.move(x + width / 2, y + 0.1)
    page.mouse.down()
    page.mouse.move(x + width - 0.1, y + height - 0.1, steps=4)
    page.mouse.up()
    edges = [page.input_value(f"#{edge}") for edge in ("left", "top", "right", "bottom")]
    assert edges == ["50", "0", "100", "100"]
    page.click("#cut")
    first_is(page, "5/0005.png")
    assert page.evaluate("() => window.sent") == "image/png"
    assert page.locator(".hit .distance").first.inner_text() == "0.0000"
    for edge in ("#left", "#right"):
        page.focus(edge)
        page.keyboard.press("Home")  # the right edge stops at one percent
    assert page.input_value("#right") == "1"
    for _ in range(49):
        page.keyboard.press("ArrowRight")
    page.focus("#cut")
    page.keyboard.press("Enter")
    first_is(page, "3/0003.png")
    page.click("#whole")
    assert page.locator("#box").is_hidden()
    assert page.faults == []


def test_the_address_contains_the_search_but_no_image(page, shared, described):
    url = shared(described).url
    page.goto(url)
    search(page, described.parent / "<b>3.png")
    assert page.url == f"{url}/"
    page.fill("#filter", "price > 5")
    page.select_option("#k", "5")
    count_is(page, 5)
    assert page.url == f"{url}/#filter=price+%3E+5&k=5"
    name = keys_of(page)[1]
    with page.expect_response("**/v1/search"):
        page.locator(".hit button.frame").nth(1).click()
    address = page.url
    page.wait_for_function(
        "() => document.querySelector('#status').textContent.startsWith('5 nearest')"
    )
    keys = keys_of(page)
    assert name not in keys
    page.go_back()
    page.goto("about:blank")
    page.goto(address)
    count_is(page, 5)
    assert keys_of(page) == keys
    assert page.input_value("#filter") == "price > 5" and page.input_value("#k") == "5"
    sent = [url for url in page.asked if url != address and "/items?" not in url]
    assert all("#" not in url and "price" not in url for url in sent)
    page.goto("about:blank")
    page.goto(f"{url}/#id=nobody%3Cb%3E&k=7")
    page.wait_for_selector("text=There is no such item.")
    assert page.input_value("#k") == "7"


def test_two_indexes_side_by_side(page, shared, index_path, described, photos):
    folders = ("--images", str(photos), "--images", str(described.parent))
    server, image = shared(index_path, f"priced={described}", *folders), photos / "3" / "0003.png"
    page.goto(server.url)
    page.wait_for_selector("#beside")
    page.select_option("#beside", "priced")
    search(page, image)
    for name, place in (("digits", "#results"), ("priced", "#others")):
        hits = results(server, f"/indexes/{name}", files={"image": image.read_bytes()})
        assert shows(page, hits, place)
    assert page.locator("section h2").all_inner_texts() == ["digits", "priced"]
    assert page.url.endswith("#index=digits&beside=priced")
    # The first index lacks this item, so the page searches it with the item's image.
    page.locator("#others .hit button").first.click()
    page.wait_for_function(
        "() => document.querySelector('#results .hit .distance').textContent === '0.0000'"
    )
    page.set_viewport_size({"width": 390, "height": 800})
    assert fits(page)


def test_axe_finds_nothing(page, shared, described, index_path, axe):
    server = shared(described, index_path)
    page.goto(f"{server.url}/#beside=digits")
    page.wait_for_selector("#others .hit")
    assert axe.run(page).violations_count == 0  # of the wall
    search(page, described.parent / "<b>3.png")
    loaded(page)
    for entry in page.locator("summary").all():
        entry.click()
    for scheme, width, filter in (
        ("light", 1180, ""),
        ("dark", 390, ""),
        ("light", 390, "price <"),
    ):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size({"width": width, "height": 900})
        page.fill("#filter", filter)
        page.click("#apply")
        page.wait_for_selector("#error:not([hidden])" if filter else "#results .hit")
        page.wait_for_selector("#answers:not(.stale)")
        hits = axe.run(page)
        assert hits.violations_count == 0, hits.generate_report()
    page.evaluate("() => document.querySelector('label[for=k]').remove()")
    assert axe.run(page).violations_count > 0  # axe works


def test_the_picture_of_the_page_in_the_docs_is_current(page, digits, photos, shown, tmp_path):
    page.set_viewport_size({"width": 900, "height": 860})
    page.goto(digits.url)
    page.wait_for_selector("text=200 items")
    search(page, photos / "3" / "0003.png")
    loaded(page)
    page.screenshot(path=str(tmp_path / "page.png"))
    shown(tmp_path / "page.png", "page.png")


def test_with_a_key_items_are_added_changed_and_deleted(
    page, served, bundle_path, photos, axe, tmp_path
):
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
    search(page, photos / "7" / "0007.png")
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
    for metadata, shown in (('{"price": 3, "size": 2}', "price: 3"), ('{"size": 2}', "size: 2")):
        page.locator(".hit").first.get_by_text("Change").click()
        page.fill("#item-metadata", metadata)
        page.click("#item-form .main")
        page.wait_for_selector("#item", state="hidden")
        page.wait_for_function(
            "text => document.querySelector('.hit .metadata').innerText.startsWith(text)", arg=shown
        )
    assert page.locator(".hit .metadata").first.inner_text() == "size: 2"  # `price` was removed
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
