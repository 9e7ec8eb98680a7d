"""Searches for a text by the words of items and their vectors, against plain arithmetic."""

import json
import math

import makers
import numpy as np
import pytest
import retrieval
from makers import WORDS
from retrieval.bundle.bundle import Bundle
from retrieval.client import Client
from retrieval.errors import DataError
from retrieval.index import answering
from retrieval.index.index import create_index
from retrieval.store.contract import Item
from retrieval.store.words import _READ_AT_ONCE

COLOURS = ("red", "blue", "dark green", "red and blue")
COUNT = 300
SEARCH, BATCH = "/v1/search", "/v1/search/batch"


def fill(index):
    """Add digits, of which every third has a label, with few different texts."""
    pixels, labels = makers.digits()
    index.add(
        images=list(pixels[:COUNT]),
        ids=[f"{number:03}" for number in range(COUNT)],
        labels=[None if n % 3 else WORDS[label] for n, label in enumerate(labels[:COUNT])],
        metadata=[{"colour": COLOURS[n % 7 % 4], "row": n} for n in range(COUNT)],
        progress=False,
    )


@pytest.fixture(scope="module")
def folder(makers, tmp_path_factory):
    """Two indexes that keep words: `both` takes texts by its bundle, too, and `words` does not."""
    home = tmp_path_factory.mktemp("words")
    create_index(home / "words", makers.make_bundle(home / "bundle"))
    create_index(home / "both", makers.add_text(home / "bundle"))
    for name in ("words", "both"):
        with retrieval.Index.open(home / name) as index:
            fill(index)
            index.keep_words(progress=False)
    return home


@pytest.fixture(scope="module")
def both(folder):
    with retrieval.Index.open(folder / "both", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(folder):
    with retrieval.Index.open(folder / "words", threads=1) as opened:
        yield opened


def scored(hits):
    return [(hit.id, hit.score) for hit in hits]


def places(costs):
    """Return the place of each id, from 1; equal costs share the first of their places."""
    ascending = sorted(costs.values())
    first = {cost: place for place, cost in reversed(list(enumerate(ascending, 1)))}
    return {id: first[cost] for id, cost in costs.items()}


def fused(index, text, weight, filter=None, depth=answering.FUSED):
    """Return ids with scores, as the definition has them, of all items."""
    count = len(index)
    vectors = {hit.id: hit.distance for hit in index.search(text=text, words=0, k=count)}
    words = {id: -score for id, score in index.store.search_words(text, count)}
    if filter is not None:
        allowed = {item.id for item in index.scan(filter, limit=count)}
        vectors = {id: cost for id, cost in vectors.items() if id in allowed}
        words = {id: cost for id, cost in words.items() if id in allowed}
    scores = dict.fromkeys(vectors, 0.0)
    for costs, share in ((vectors, 1 - weight), (words, weight)):
        for id, place in places(costs).items():
            scores[id] += share / (60 + place) if place <= depth else 0
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0])), vectors


@pytest.mark.parametrize("weight", [0.5, 0.2, 0.9])
@pytest.mark.parametrize("filter", [None, "row < 100", "colour = 'red'"])
@pytest.mark.parametrize("text", ["three", "red three", "green 42", "nothing known"])
def test_scores_join_the_two_rankings(both, text, weight, filter):
    hits = both.search(text=text, words=weight, k=COUNT, filter=filter)
    expected, vectors = fused(both, text, weight, filter)
    assert [hit.id for hit in hits] == [id for id, _ in expected]
    np.testing.assert_allclose([hit.score for hit in hits], [score for _, score in expected])
    assert {hit.id: hit.distance for hit in hits} == vectors
    pages = [
        both.search(text=text, words=weight, k=7, offset=7 * page, filter=filter)
        for page in range(3)
    ]
    assert [hit for page in pages for hit in page] == hits[:21]


@pytest.mark.parametrize("text", ["three", "red three", "green 42"])
def test_places_beyond_the_depth_add_nothing(both, monkeypatch, text):
    monkeypatch.setattr(answering, "FUSED", 20)
    hits = both.search(text=text, k=20)
    expected, vectors = fused(both, text, 0.5, depth=20)
    scores = dict(expected)
    assert {hit.id: hit.score for hit in hits} == pytest.approx(
        {hit.id: scores[hit.id] for hit in hits}
    )
    np.testing.assert_allclose([hit.score for hit in hits], [score for _, score in expected[:20]])
    assert all(vectors[hit.id] == hit.distance for hit in hits)
    with pytest.raises(DataError, match="ends at the 20th hit"):
        both.search(text=text, k=20, offset=1)
    assert len(both.search(text=text, words=0, k=20, offset=1)) == 20


def test_an_index_with_more_items_than_places(tmp_path, makers):
    count = 12_000
    create_index(tmp_path / "i", makers.add_text(makers.make_bundle(tmp_path / "bundle")))
    vectors = np.random.default_rng(3).normal(size=(count, makers.WIDTH)).astype(np.float32)
    colours = np.random.default_rng(4).permutation(np.arange(count) % 4)
    # Four texts for all items, so thousands share a place by their words.
    items = [
        Item(f"{n:05}", f"mug {COLOURS[colour]}", arrays={"vector": vectors[n]})
        for n, colour in enumerate(colours.tolist())
    ]
    with retrieval.Index.open(tmp_path / "i", threads=1) as index:
        index.upsert(items)
        blocks = []
        index.store.keep_words(blocks.append)
        assert blocks == [_READ_AT_ONCE, _READ_AT_ONCE, 2000]
        for text in ("green three", "red nine", "mug four"):
            hits = index.search(text=text, k=1000)
            expected, _ = fused(index, text, 0.5)
            np.testing.assert_allclose(
                [hit.score for hit in hits], [score for _, score in expected[:1000]]
            )
            scores = dict(expected)
            assert {hit.id: hit.score for hit in hits} == pytest.approx(
                {hit.id: scores[hit.id] for hit in hits}
            )


def test_defaults_take_what_there_is(both, alone, tmp_path, folder):
    assert both.search(text="red three") == both.search(text="red three", words=0.5)
    assert both.search(text="red three", words=0)[0].score is None
    words = alone.search(text="red three")
    assert scored(words) == scored(alone.search(text="red three", words=1)) and len(words) == 10
    assert all(math.isnan(hit.distance) for hit in words)
    assert [hit.score for hit in words] == sorted((hit.score for hit in words), reverse=True)
    assert words[0].label == "three" and "red" in words[0].metadata["colour"]
    several = both.search(text=["red", "three"], words=1)
    expected = [both.search(text=text, words=1) for text in ("red", "three")]
    assert list(map(scored, several)) == list(map(scored, expected))
    create_index(tmp_path / "i", folder / "bundle")
    with retrieval.Index.open(tmp_path / "i", threads=1) as index:
        fill(index)
        assert index.search(text="red three")[0].score is None
        with pytest.raises(DataError, match="'retrieval index words'"):
            index.search(text="red three", words=0.5)


def test_options_choose_among_the_hits(both, alone):
    for words, index in ((0.5, both), (1, both), (1, alone)):
        every = index.search(text="red three", k=COUNT, words=words)
        groups = {}
        for hit in every:
            groups.setdefault(hit.metadata["colour"], []).append(hit)
        hits = index.search(text="red three", k=3, group_by="colour", group_size=4, words=words)
        expected = [hit for group in list(groups.values())[:3] for hit in group[:4]]
        assert [hit.id for hit in hits] == [hit.id for hit in expected]
        hits = index.search(text="red three", k=9, facets="colour", order_by="-row", words=words)
        assert {hit.id for hit in hits} == {hit.id for hit in every[:9]}
        assert [hit.metadata["row"] for hit in hits] == sorted(
            (hit.metadata["row"] for hit in hits), reverse=True
        )
        assert sum(count for _, count in hits.facets["colour"]) == 9
    every = both.search(text="red three", k=COUNT)
    limit = float(np.median([hit.distance for hit in every]))
    near = [hit for hit in every if hit.distance <= limit]
    assert both.search(text="red three", k=COUNT, max_distance=limit) == near
    different = both.search(text="red three", k=5, diversity=0.5)
    assert different[0] == every[0] and {hit.id for hit in different} <= {
        hit.id for hit in every[:100]
    }
    liked = both.search(text="red three", k=COUNT, like="001", dislike=["002"])
    assert {hit.id for hit in liked} == {f"{n:03}" for n in range(COUNT)} - {"001", "002"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"words": 1.5}, "words must be a number from 0 to 1, not 1.5"),
        ({"words": float("nan")}, "words must be a number from 0 to 1"),
        ({"words": "1"}, "words must be a number from 0 to 1"),
        ({"scores": True}, "Leave scores out"),
        ({"k": 1001}, "ends at the 1,000th hit"),
        ({"words": 1, "like": "001"}, "For likes, vectors are compared"),
        ({"words": 1, "dislike": "001"}, "For dislikes, vectors are compared"),
        ({"words": 1, "max_distance": 2}, "For max_distance, vectors are compared"),
        ({"words": 1, "diversity": 0.1}, "For diversity, vectors are compared"),
        ({"words": 1, "candidates": 9}, "For candidates, vectors are compared"),
        ({"words": 1, "queries": np.zeros(16)}, "not with both"),
        ({"words": 0.5, "text": None, "queries": np.zeros(16)}, "words weighs the words"),
        ({"filter": "colours = 'red'"}, "has a field 'colours'"),
        ({"text": "unknown", "words": 1, "filter": "colour = 3"}, "can never match"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(both, options, says):
    with pytest.raises(DataError, match=says):
        both.search(**{"text": "red three", **options})


def test_hits_without_a_vector_and_deleted_items(folder, tmp_path, makers):
    with retrieval.Index.open(folder / "both", threads=1) as opened:
        opened.snapshot(tmp_path / "copy")
    other = makers.add_text(makers.make_bundle(tmp_path / "other", seed=1))
    with retrieval.Index.open(tmp_path / "copy", threads=1) as index:
        index.upsert([Item("lamp", "lamp", arrays={"vector": index.vector("000")})])
        bundle = Bundle.open(other, threads=1)
        generation = index.store.begin(bundle, {"vector": makers.WIDTH})
        pending = index.store.pending(generation, 1000)
        index.store.embed(generation, [], [item.id for item in pending])
        assert index.store.switch(generation)
        # No item has a vector by the new bundle, and their words are found all the same.
        (hit,) = index.search(text="lamp")
        assert hit.id == "lamp" and math.isnan(hit.distance) and hit.score == 0.5 / 61
        assert index.search(text="lamp", max_distance=9) == []
        index.delete("lamp")
        assert index.search(text="lamp") == []


@pytest.fixture(scope="module")
def server(shared, folder):
    return shared(folder / "both")


@pytest.fixture(scope="module")
def bare(shared, folder):
    return shared(folder / "words")


def test_http_answers_as_python_does(server, bare, both, alone):
    assert server.client.get("/v1/index").json()["words"] is True
    for one, index, options in (
        (server, both, {}),
        (server, both, {"words": 0.3, "k": 5, "offset": 2, "filter": "row < 200"}),
        (server, both, {"words": 1, "group_by": "colour"}),
        (server, both, {"words": 0}),
        (bare, alone, {}),
        (bare, alone, {"words": 1, "facets": ["colour"], "filter": {"row": {"<": 50}}}),
    ):
        hits = index.search(text="red three", **options)
        answer = one.client.post(SEARCH, json={"text": "red three", **options}).json()
        for shown, hit in zip(answer["results"], hits, strict=True):
            assert (shown["id"], shown["score"]) == (hit.id, hit.score)
            assert shown["distance"] == (None if math.isnan(hit.distance) else hit.distance)
        if "k" not in options:
            batch = {"queries": [{"text": "red three"}, {"text": "blue"}], **options}
            answers = one.client.post(BATCH, json=batch).json()["answers"]
            assert answers[0]["results"] == answer["results"] and len(answers) == 2
        with Client(one.url) as client:
            found = client.search(text="red three", **options).results
        assert [hit.id for hit in found] == [hit.id for hit in hits]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"text": "red", "words": 1.1}, 400, "a number from 0 to 1"),
        ({"text": "red", "words": "1"}, 400, "a number from 0 to 1"),
        ({"vector": [0.5] * 16, "words": 0.5}, 400, "words weighs the words"),
        ({"text": "red", "words": 1, "max_distance": 1}, 422, "vectors are compared"),
        ({"text": "red", "k": 1000, "offset": 1}, 422, "ends at the 1,000th hit"),
    ],
)
def test_http_refuses_in_a_sentence(server, body, status, says):
    answer = server.client.post(SEARCH, json=body)
    assert answer.status_code == status and says in answer.json()["detail"], answer.text


def test_the_command(folder, cli):
    done = cli("search", folder / "words", "--text", "red three", "-k", "2", "--json")
    assert done.code == 0, done.err
    (answer,) = json.loads(done.out)
    assert [hit["distance"] for hit in answer["results"]] == [None, None]
    done = cli("search", folder / "both", "--text", "three", "--words", "0.2", "-k", "2")
    assert done.code == 0 and "score" in done.out and "nan" not in done.out
    done = cli("search", folder / "words", "--text", "three", "-k", "2")
    assert done.code == 0 and "nan" not in done.out
    done = cli("search", folder / "both", "--text", "three", "--words", "2")
    assert done.code == 2
