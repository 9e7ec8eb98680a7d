"""The page's wall of items, marks, groups, counts and identification, in a headless Chromium."""

import json
import shutil
from urllib.parse import urlencode

import pytest
from browsing import answered, count_is, fits, keys_of, listed, loaded, results, search, shows
from retrieval.feedback.feedback_record import FEEDBACK_FILE, LIKED, FeedbackRecord
from retrieval.index.index import Index, create_index

from retrieval_server.keys import add_key, new_key

pytestmark = pytest.mark.browser

FOCUS = "() => document.activeElement.dataset.key ?? document.activeElement.id"


@pytest.fixture(scope="module")
def calibrated(index_path, tmp_path_factory):
    """A calibrated copy of the index of digits, with a price and tags. Not to be changed."""
    path = shutil.copytree(index_path, tmp_path_factory.mktemp("calibrated") / "digits.index")
    with Index.open(path) as index:
        for number, item in enumerate(index.scan(limit=200)):
            index.update(item.id, metadata={"price": number % 3, "made by": f"maker {number % 2}"})
        index.calibrate(progress=False)
    return path


@pytest.fixture(scope="module")
def others(bundle_path, photos, tmp_path_factory):
    """An index of a few digits. Not to be changed."""
    path = tmp_path_factory.mktemp("others") / "others.index"
    create_index(path, bundle_path, [photos / "1", photos / "2"], progress=False)
    return path


@pytest.fixture
def digits(shared, calibrated, photos):
    return shared(calibrated, "--images", str(photos))


def status_is(page, text: str) -> None:
    page.wait_for_function(
        "text => document.querySelector('#status').textContent.startsWith(text)", arg=text
    )


def scroll(page) -> None:
    page.evaluate("() => window.scrollTo(0, document.documentElement.scrollHeight)")


def test_the_page_opens_on_the_newest_items_and_goes_on_at_the_end(page, digits):
    page.goto(digits.url)
    status_is(page, "60 items, the newest first")
    newest = listed(digits, order="newest", limit=200)
    assert shows(page, newest[:60])
    scroll(page)
    count_is(page, 120)
    for count in (180, 200):
        page.wait_for_function("() => !isLoading")
        page.locator("#more").focus()
        page.keyboard.press("Enter")
        count_is(page, count)
    assert shows(page, newest) and page.locator("#more").is_hidden()
    page.fill("#filter", "price = 1")
    page.press("#filter", "Enter")
    status_is(page, "60 items")
    assert shows(page, listed(digits, order="newest", limit=60, filter="price = 1"))
    page.locator(".hit .frame").nth(3).click()
    answered(page)
    found = results(digits, json={"id": listed(digits, order="newest")[9]["id"]})
    assert len(found) == 10
    page.click("#clear")
    status_is(page, "60 items")
    assert page.faults == []


def test_a_store_without_an_order_of_time_lists_all_items(page, digits):
    page.route(
        "**/items?*order=newest*", lambda route: route.fulfill(status=422, json={"detail": "No."})
    )
    page.goto(digits.url)
    status_is(page, "60 items")
    assert page.locator("#status").inner_text() == "60 items"
    assert shows(page, listed(digits, limit=60))


def test_a_search_goes_on_with_the_hits_that_follow(page, digits, photos):
    query = photos / "3" / "0003.png"
    page.set_viewport_size({"width": 1180, "height": 500})
    page.goto(digits.url)
    search(page, query)
    count_is(page, 10)
    scroll(page)
    count_is(page, 20)
    page.locator("#more").focus()
    page.keyboard.press("Enter")
    count_is(page, 30)
    files = {"image": query.read_bytes()}
    assert shows(page, results(digits, files=files, data={"k": "30"}))
    assert page.evaluate(FOCUS) == "more"


def test_marks_search_for_more_like_this_and_less_like_that(page, digits, photos):
    page.goto(digits.url)
    query = photos / "3" / "0003.png"
    search(page, query)
    marks = {}
    for sign, words in (("like", "More like"), ("dislike", "Less like")):
        files = {"image": query.read_bytes()}
        id = results(digits, files=files, data=marks)[1]["id"]
        marks[sign] = id
        page.get_by_label(f"{words} {id}", exact=True).click()
        page.wait_for_selector(f"#marks .{sign}")
        assert shows(page, results(digits, files=files, data=marks))
    assert page.url.endswith(urlencode(marks))
    page.get_by_label(f"Less like {marks['dislike']}: remove this mark").click()
    page.wait_for_selector("#marks .dislike", state="detached")
    page.click("#clear")  # marks alone are a query, too
    count_is(page, 60)
    assert page.locator("#marks button").count() == 0
    page.goto(f"{digits.url}/#like=3%2F0003.png")
    answered(page)
    assert shows(page, results(digits, json={"like": ["3/0003.png"]}))
    page.locator("#marks button").click()
    count_is(page, 60)
    assert page.faults == []


def test_liked_hits_are_saved_as_a_golden_query(page, digits, calibrated, photos, tmp_path):
    golden = tmp_path / "golden.jsonl"
    shutil.copy(photos / "3" / "0003.png", tmp_path)
    page.goto(digits.url)
    search(page, tmp_path / "0003.png")
    queries = [{"query": "0003.png"}]
    for turn in range(2):
        assert page.locator("#golden").is_hidden()
        page.locator("#results .hit .mark .like").nth(1).click()
        page.wait_for_selector("#marks .like")
        with page.expect_download() as download:
            page.click("#golden")
        assert download.value.suggested_filename == "golden.jsonl"
        queries[turn]["relevant"] = [page.locator("#marks .chip span").first.inner_text()]
        if turn == 0:
            queries.append({"id": keys_of(page)[3]})
            page.locator(".hit .frame").nth(3).click()
            answered(page)
    download.value.save_as(golden)
    assert [json.loads(line) for line in golden.read_text().splitlines()] == queries
    with Index.open(calibrated) as index:
        report = index.evaluate(golden, ["recall@200"])
    assert report.values == {"recall@200": 1.0}


def test_hits_are_grouped_by_a_field(page, digits, photos):
    page.goto(digits.url)
    query = photos / "3" / "0003.png"
    search(page, query)
    page.select_option("#group", "made by")
    count_is(page, 2)
    page.select_option("#size", "3")
    count_is(page, 6)
    options = {"group_by": '"made by"', "group_size": "3"}
    expected = results(digits, files={"image": query.read_bytes()}, data=options)
    assert shows(page, expected)
    titles = [hit["metadata"]["made by"] for hit in expected[::3]]
    assert page.locator(".group .title").all_inner_texts() == titles
    assert page.locator("#more").is_hidden()  # there are two groups
    assert page.url.endswith("#group=made+by&size=3")
    page.reload()
    page.wait_for_selector("#sizes")
    assert page.input_value("#group") == "made by" and page.input_value("#size") == "3"


def test_counts_of_values_narrow_the_filter_and_widen_it(page, digits, photos):
    page.goto(digits.url)
    query = photos / "3" / "0003.png"
    search(page, query)
    page.click("#conditions summary")
    page.get_by_label("label", exact=True).uncheck()
    page.get_by_label("price", exact=True).check()
    options = {"facets": "price"}
    answer = digits.client.post(
        "/v1/search", files={"image": query.read_bytes()}, data=options
    ).json()
    expected = {str(entry["value"]): entry["count"] for entry in answer["facets"]["price"]}
    chips = [chip.split() for chip in page.locator("#counts .chip").all_inner_texts()]
    assert {value: int(count) for value, count in chips} == expected
    chip = page.locator("#counts .chip").first
    value = chips[0][0]
    chip.click()
    page.wait_for_selector("#counts .chip[aria-pressed=true]")
    assert page.input_value("#filter") == f"price = {value}"
    assert page.evaluate(FOCUS) == f"count price = {value}"  # the focus stays
    files = {"image": query.read_bytes()}
    assert shows(page, results(digits, files=files, data={"filter": f"price = {value}"}))
    page.keyboard.press("Enter")
    page.wait_for_selector("#counts .chip[aria-pressed=false]")
    assert page.input_value("#filter") == ""
    assert page.url.endswith("#count=price")


def test_the_query_is_identified_where_the_index_is_calibrated(
    page, digits, shared, index_path, photos
):
    page.goto(digits.url)
    page.wait_for_selector(".hit")
    assert page.locator("#who").is_hidden()  # there is no query
    least = digits.client.get("/v1/index").json()["calibration"]["least_rate"]
    verdicts = {}
    for query in sorted(photos.rglob("*.png"))[::7]:
        files = {"image": query.read_bytes()}
        answer = digits.client.post("/v1/identify", files=files, data={"far": str(least)}).json()
        verdicts.setdefault(answer["label"] is None, (query, answer))
    for query, verdict in verdicts.values():
        search(page, query)
        page.click("#who")
        page.wait_for_selector(".evidence")
        assert page.locator("#verdict .name").inner_text() == (verdict["label"] or "Unknown")
        known = f"about 1 in {round(1 / verdict['rate'])} comes as near"
        unknown = f"about {round(100 * verdict['rate'])} in 100 come as near"
        assert (unknown if verdict["label"] is None else known) in page.inner_text("#verdict")
        captions = page.locator(".evidence li").all_inner_texts()
        hits = verdict["results"][:5]
        assert captions == [f"{hit['label']} {hit['distance']:.4f}" for hit in hits]
    assert len(verdicts) == 2
    files = {"image": query.read_bytes()}
    scores = [hit["score"] for hit in results(digits, files=files, data={"scores": "true"})]
    shown = page.locator(".hit .score").all_inner_texts()
    assert shown == [f"{100 * score:.1f} %" for score in scores]
    page.goto(shared(index_path).url)
    search(page, query)
    assert page.locator("#who").is_hidden() and page.locator(".score").count() == 0


DROP = """files => {
  const transfer = new DataTransfer();
  for (const [name, bytes] of files) {
    transfer.items.add(new File([new Uint8Array(bytes)], name, { type: "image/png" }));
  }
  const options = { dataTransfer: transfer, bubbles: true, cancelable: true };
  document.querySelector("#drop").dispatchEvent(new DragEvent("drop", options));
}"""


def identified(page, server, photos, least):
    """Ask "Who is it?" and compare the verdict with that of a request; return its label."""
    files = [("image", photo.read_bytes()) for photo in photos]
    answer = server.client.post("/v1/identify", files=files, data={"far": str(least)}).json()
    page.locator("#who").press("Enter")
    page.wait_for_selector(".evidence")
    assert page.locator("#verdict .name").inner_text() == (answer["label"] or "Unknown")
    captions = page.locator(".evidence li").all_inner_texts()
    assert captions == [f"{hit['label']} {hit['distance']:.4f}" for hit in answer["results"][:5]]
    return answer["rate"]


def test_several_photos_of_one_thing_get_one_verdict(page, digits, shared, index_path, photos, axe):
    least = digits.client.get("/v1/index").json()["calibration"]["least_rate"]
    threes = sorted((photos / "3").glob("*.png"))
    page.goto(digits.url)
    search(page, threes[0])
    chips = page.locator("#photos .chip")
    assert chips.count() == 0
    alone = identified(page, digits, threes[:1], least)
    page.set_input_files("#file", list(map(str, threes[:3])))
    page.wait_for_selector("#photos .chip")
    names = [f"{photo.name}: remove this photo" for photo in threes[:3]]
    assert [chip.get_attribute("aria-label") for chip in chips.all()] == names
    page.wait_for_function(
        "() => [...document.querySelectorAll('#photos img')].every(image => image.naturalWidth)"
    )
    answered(page)
    assert shows(page, results(digits, files={"image": threes[0].read_bytes()}))
    assert identified(page, digits, threes[:3], least) != alone
    for scheme, width in (("light", 1280), ("dark", 360)):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size({"width": width, "height": 900})
        report = axe.run(page)
        assert report.violations_count == 0, report.generate_report()
        assert fits(page)
    chips.first.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('#photos .chip').length === 2")
    answered(page)
    assert shows(page, results(digits, files={"image": threes[1].read_bytes()}))
    identified(page, digits, threes[1:3], least)
    chips.first.press("Enter")
    page.wait_for_function("() => !document.querySelector('#photos .chip')")
    dropped = [threes[4], threes[3]]
    page.evaluate(DROP, [[photo.name, list(photo.read_bytes())] for photo in dropped])
    page.wait_for_selector("#photos .chip")
    answered(page)
    identified(page, digits, dropped, least)
    page.set_input_files("#file", list(map(str, sorted(photos.rglob("*.png"))[:17])))
    page.wait_for_selector("text=These are 17 files. Choose at most 16 photos, all of one thing.")
    assert page.faults == []
    # An index that is not calibrated searches with one.
    page.goto(shared(index_path).url)
    search(page, threes[0])
    assert not page.evaluate("() => document.querySelector('#file').multiple")
    page.evaluate(DROP, [[photo.name, list(photo.read_bytes())] for photo in threes[1:3]])
    page.wait_for_function(
        "name => document.querySelector('#preview').alt.includes(name)", arg=threes[1].name
    )
    assert page.locator("#several").is_hidden() and page.locator("#identity").is_hidden()


def test_a_label_is_edited_in_place(page, served, living, photos, tmp_path):
    keys = tmp_path / "keys.jsonl"
    word, kept = new_key("editor", "write")
    add_key(keys, kept)
    server = served(living, "--keys", str(keys), "--images", str(photos))
    page.goto(server.url)
    page.fill("#key", word)
    page.press("#key", "Enter")
    page.wait_for_selector(".hit button.label")
    label = page.locator(".hit").first.locator("button.label")
    before = label.inner_text()
    id = keys_of(page)[0]
    label.press("Enter")
    page.locator("input.label").fill("lost")
    page.keyboard.press("Escape")
    assert label.inner_text() == before
    assert page.evaluate(FOCUS) == f"label {id}"
    page.keyboard.press("Enter")
    page.locator("input.label").fill("<b>new")
    page.keyboard.press("Enter")
    status_is(page, f"The label of {id} is now: <b>new")
    assert label.inner_text() == "<b>new" and page.evaluate(FOCUS) == f"label {id}"
    headers = {"Authorization": f"Bearer {word}"}
    item = server.client.get("/v1/item", params={"id": id}, headers=headers).json()
    assert item["label"] == "<b>new"


def test_the_keyboard_moves_among_the_pictures_and_marks_them(page, digits):
    page.goto(digits.url)
    status_is(page, "60 items")
    frames = page.locator(".frame")
    frames.first.focus()
    tops = [frames.nth(n).bounding_box()["y"] for n in range(60)]
    columns = tops.count(tops[0])
    focused = "() => [...document.querySelectorAll('.frame')].indexOf(document.activeElement)"
    for key, place in (
        ("ArrowRight", 1),
        ("ArrowDown", columns + 1),
        ("ArrowLeft", columns),
        ("ArrowUp", 0),
        ("ArrowUp", 0),
        ("End", 59),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        assert page.evaluate(focused) == place
    ids = keys_of(page)
    page.keyboard.press("+")
    answered(page)
    assert shows(page, results(digits, json={"like": ids[:1]}))
    page.keyboard.press("-")
    page.wait_for_selector("#marks .dislike")
    page.keyboard.press("/")
    assert page.evaluate(FOCUS) == "filter"
    page.keyboard.press("/")
    assert page.input_value("#filter") == "/"
    page.set_viewport_size({"width": 360, "height": 800})
    assert fits(page) and page.faults == []


def test_marks_work_in_a_second_index_that_lacks_the_items(
    page, shared, calibrated, others, photos
):
    server = shared(calibrated, f"others={others}", "--images", str(photos))
    page.goto(f"{server.url}/#beside=others")
    page.wait_for_selector("#others .hit")
    like = keys_of(page, "#results .hit")[0]
    page.get_by_label(f"More like {like}", exact=True).click()
    answered(page)
    assert shows(page, results(server, "/indexes/digits", json={"like": [like]}), "#results .hit")
    picture = {"like": (photos / like).read_bytes()}
    assert shows(page, results(server, "/indexes/others", files=picture), "#others .hit")


def test_axe_finds_nothing_in_a_marked_and_identified_query(page, digits, photos, axe):
    page.goto(digits.url)
    search(page, photos / "3" / "0003.png")
    page.locator("#results .like").nth(1).click()
    page.wait_for_selector("#marks .like")
    page.select_option("#group", "price")
    page.select_option("#size", "2")
    page.wait_for_selector(".group .hit")
    page.click("#who")
    page.wait_for_selector(".evidence")
    for scheme, width in (("light", 1280), ("dark", 360)):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.set_viewport_size({"width": width, "height": 900})
        report = axe.run(page)
        assert report.violations_count == 0, report.generate_report()
        assert fits(page)


def test_hits_are_marked_right_or_wrong_where_the_server_takes_feedback(
    page, served, digits, living, photos, axe
):
    page.goto(digits.url)
    search(page, photos / "3" / "0003.png")
    assert page.locator(".judge").count() == 0
    server = served(living, "--feedback", "--images", str(photos))
    page.goto(server.url)
    page.wait_for_selector(".hit")
    assert page.locator(".judge").count() == 0  # nothing was searched for
    search(page, photos / "3" / "0003.png")
    loaded(page)
    first, second = keys_of(page)[:2]
    right = page.get_by_label(f"{first} is right")
    wrong = page.get_by_label(f"{second} is wrong")
    right.click()
    page.wait_for_selector(f"text=Marked: {first} is right.")
    wrong.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(f"text=Marked: {second} is wrong.")
    page.get_by_label(f"{second} is right").click()  # a later mark replaces the earlier
    page.wait_for_selector(f"text=Marked: {second} is right.")
    pressed = page.locator(".judge [aria-pressed=true]")
    assert pressed.count() == 2 and wrong.get_attribute("aria-pressed") == "false"
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        report = axe.run(page)
        assert report.violations_count == 0, report.generate_report()
    page.set_viewport_size({"width": 390, "height": 800})
    assert fits(page)
    with FeedbackRecord.open(living / FEEDBACK_FILE) as record:
        (entry,) = record.judged()
    assert entry.marks == {"": {first: LIKED, second: LIKED}} and entry.search.hits[0] == first
