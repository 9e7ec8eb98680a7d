"""The search page in a real headless Chromium, for an index that takes texts."""

import json
from pathlib import Path

import pytest
import retrieval
from browsing import answered, first_is, fits, keys_of, results, search, shows
from makers import WORDS
from retrieval.index.index import create_index

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def words_index(makers, tmp_path_factory, photos):
    home = tmp_path_factory.mktemp("text")
    create_index(home / "digits", makers.add_text(makers.make_bundle(home / "bundle")), [photos])
    with retrieval.Index.open(home / "digits") as index:
        for digit, word in enumerate(WORDS):
            index.update(filter=f"label = '{digit}'", label=word)
        index.calibrate(progress=False)
    return home / "digits"


def ask(page, words):
    page.get_by_label("Text", exact=True).fill(words)
    page.get_by_label("Text", exact=True).press("Enter")


def test_a_text_is_a_query_like_an_image(page, served, words_index, photos):
    server = served(words_index, "--images", str(photos))
    page.goto(server.url)
    page.wait_for_selector("#words:not([hidden])")
    ask(page, "three")
    answered(page)
    assert shows(page, results(server, json={"text": "three"}))
    assert page.url.endswith("#text=three")
    assert page.locator("#identity").is_hidden()
    assert page.locator("#view").is_hidden()
    page.select_option("#k", "5")
    page.wait_for_function("() => document.querySelectorAll('.hit').length === 5")
    page.fill("#filter", "label = 'eight'")
    page.click("#apply")
    expected = results(server, json={"text": "three", "k": 5, "filter": "label = 'eight'"})
    first_is(page, expected[0]["id"])
    assert shows(page, expected)
    # The query is in the address, so it can be kept and sent to others.
    page.reload()
    first_is(page, expected[0]["id"])
    assert page.get_by_label("Text", exact=True).input_value() == "three"
    page.fill("#filter", "")
    liked = page.locator(".hit").nth(1)
    like = keys_of(page)[1]
    liked.get_by_role("button", name=f"More like {like}").click()
    body = {"text": "three", "k": 5, "filter": "label = 'eight'", "like": [like]}
    del body["filter"]
    first_is(page, results(server, json=body)[0]["id"])
    with page.expect_download() as download:
        page.click("#golden")
    saved = json.loads(Path(download.value.path()).read_text())
    assert saved == {"text": "three", "relevant": [like]}
    # An image takes the place of the text.
    search(page, photos / "3" / "0003.png")
    first_is(page, "3/0003.png")
    assert page.get_by_label("Text", exact=True).input_value() == ""
    page.go_back()
    page.wait_for_function("() => document.querySelector('#text').value === 'three'")
    page.set_viewport_size({"width": 390, "height": 800})
    assert fits(page) and page.faults == []
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    assert axe.run(page).violations_count == 0


def test_an_empty_text_and_one_that_the_server_refuses_are_sentences(page, served, words_index):
    page.goto(served(words_index).url)
    page.wait_for_selector("#words:not([hidden])")
    page.get_by_role("button", name="Search", exact=True).click()
    page.wait_for_selector("text=Write what to search for, such as: a red mug.")
    ask(page, "\u200b\x01")
    page.wait_for_selector("#answers:not(.wall)")


def test_an_index_that_keeps_words_takes_texts_without_a_model_of_texts(page, served, living):
    with retrieval.Index.open(living) as index:
        for digit, word in enumerate(WORDS):
            index.update(filter=f"label = '{digit}'", label=f"a hand-written {word}")
        index.keep_words()
    server = served(living)
    page.goto(server.url)
    page.wait_for_selector("#words:not([hidden])")
    ask(page, "three")
    answered(page)
    assert shows(page, results(server, json={"text": "three"}))
    assert set(page.locator(".hit .label").all_inner_texts()) == {"a hand-written three"}
    assert page.locator(".hit .score").count() == 0
    assert page.faults == []


def test_a_model_without_texts_shows_no_field(page, served, index_path):
    page.goto(served(index_path).url)
    page.wait_for_selector("text=200 items")
    assert page.locator("#words").is_hidden()


def test_a_text_finds_items_by_their_words_alone(page, served, living):
    with retrieval.Index.open(living) as index:
        index.keep_words(progress=False)
    server = served(living)
    page.goto(server.url)
    page.wait_for_selector("#words:not([hidden])")
    ask(page, "3 nothing")
    answered(page)
    found = results(server, json={"text": "3 nothing"})
    assert shows(page, found) and {hit["label"] for hit in found} == {"3"}
    # Neither a distance nor a share of strangers is known.
    assert page.locator(".hit .measures").first.inner_text() == ""
    assert page.locator(".hit .distance, .hit .score").count() == 0 and page.faults == []
