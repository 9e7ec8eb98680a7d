"""Searches by text: from Python and on the command line, with all options of other searches."""

import json

import numpy as np
import pytest
import retrieval
from retrieval.errors import DataError
from retrieval.index.adapter_bundles import make_adapter_bundle
from retrieval.index.index import create_index

from retrieval_engines.testing.small_bundles import linear_head


@pytest.fixture(scope="module")
def folder(makers, tmp_path_factory):
    """An index of digits, with their names as labels, by a bundle that takes texts."""
    return makers.make_text_index(tmp_path_factory.mktemp("text") / "digits.index").parent


@pytest.fixture
def index(folder):
    with retrieval.Index.open(folder / "digits.index", threads=1) as opened:
        yield opened


def shown(hits):
    return [(hit.id, round(hit.distance, 5)) for hit in hits]


def test_a_text_finds_what_its_vector_finds(index):
    hits = index.search(text="three", k=20)
    assert [hit.label for hit in hits].count("three") > 15
    vector = index.bundle.encode_text("three").vector[0]
    assert shown(hits) == shown(index.search(vector, k=20))
    several = index.search(text=["three", "eight"], k=5)
    assert shown(several[0]) == shown(hits[:5])
    assert len(several) == 2 and several[1][0].label == "eight"
    encoded = index.bundle.encode_text(["three", "eight"])
    assert index.search(encoded, text=["three", "eight"], k=5) == several
    assert index.search(text=["three"], k=5) == several[:1]
    assert index.search(text=[]) == []


@pytest.mark.parametrize(
    "options",
    [
        {"filter": "row < 200"},
        {"group_by": "label", "group_size": 2},
        {"max_distance": 0.5},
        {"offset": 3},
        {"diversity": 0.5},
        {"facets": ["label"]},
        {"order_by": "-row"},
        {"like": ["000"]},
        {"like": ["000"], "dislike": ["001"], "filter": "odd = true"},
        {"candidates": 50},
    ],
)
def test_options_are_those_of_a_search_by_the_vector(index, options):
    vector = index.bundle.encode_text("seven").vector[0]
    hits = index.search(text="seven", k=6, **options)
    expected = index.search(vector, k=6, **options)
    assert shown(hits) == shown(expected) and len(hits)
    assert hits.facets == expected.facets


def test_what_cannot_be_asked_is_a_sentence(index, bundle_path, tmp_path):
    with pytest.raises(DataError, match="or with a text, not with both"):
        index.search(np.zeros(16), text="one")
    with pytest.raises(DataError, match=r"^The text is empty\.$"):
        index.search(text=" ")
    with pytest.raises(DataError, match=r"^text\[1\]: The text is empty\.$"):
        index.search(text=["one", " "])
    with pytest.raises(DataError, match="calibrated for queries like its items, not for texts"):
        index.search(text="one", scores=True)
    create_index(tmp_path / "i", bundle_path)
    with (
        retrieval.Index.open(tmp_path / "i", threads=1) as other,
        pytest.raises(DataError, match="takes no texts: its model has no text encoder"),
    ):
        other.search(text="one")


def test_a_text_finds_by_the_adapter_and_after_a_migration_to_it(folder, tmp_path, makers):
    with retrieval.Index.open(folder / "digits.index", threads=1) as opened:
        opened.snapshot(tmp_path / "copy")
        base = opened.bundle
    adapter = make_adapter_bundle(base, linear_head(makers.WIDTH, 5), tmp_path / "adapter")
    with (
        retrieval.Index.open(tmp_path / "copy", threads=1) as index,
        retrieval.Index.open(tmp_path / "copy", threads=1) as other,
    ):
        before = other.search(text="two", k=5)
        index.migrate(adapter, progress=False)
        vector = index.bundle.encode_text("two").vector[0]
        assert shown(index.search(text="two", k=5)) == shown(index.search(vector, k=5))
        # The other process learns of the migration by its next search.
        after = other.search(text="two", k=5)
        assert shown(after) == shown(index.search(text="two", k=5))
        assert shown(after) != shown(before)


def test_the_command_searches_by_text(folder, cli):
    place = folder / "digits.index"
    done = cli("search", place, "--text", "three", "--text", "Nine", "-k", "3", "--json")
    assert done.code == 0, done.err
    answers = json.loads(done.out)
    assert [answer["query"] for answer in answers] == ["three", "Nine"]
    assert [answer["results"][0]["label"] for answer in answers] == ["three", "nine"]
    done = cli("search", place, "--text", "three", "--group-by", "label", "-k", "2")
    assert done.code == 0 and "Nearest to three:" in done.out
    done = cli("search", place, "query.png", "--text", "three")
    assert done.code == 2 and "not for both at once" in done.err
    done = cli("search", place, "--text", "")
    assert done.code == 2 and "The text is empty" in done.err
    done = cli("search", place)
    assert done.code == 2 and "a text with --text" in done.err


def test_the_command_says_that_a_model_takes_no_texts(bundle_path, tmp_path, cli):
    create_index(tmp_path / "i", bundle_path)
    done = cli("search", tmp_path / "i", "--text", "one")
    assert done.code == 2 and "takes no texts: its model has no text encoder" in done.err
    assert "Traceback" not in done.err
