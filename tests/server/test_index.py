"""Indexes are created and searched; hits are compared with plain loops in float64."""

import math
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError, PluginError, StoreError
from retrieval.index.index import create_index, open_index
from retrieval.store import search_structure
from retrieval.store.backends import FLAT_NUMBERS, HNSW_VECTORS, choose, make_backend
from retrieval.store.index_backend import recall_at_10


def plain_nearest(query, vectors, distance, k):
    """Return rows and distances of the k nearest vectors, by a plain loop; ties by row."""
    apart = sorted((distance(query, vector), row) for row, vector in enumerate(vectors.tolist()))
    return [row for _, row in apart[:k]], [value for value, _ in apart[:k]]


def euclidean(a, b):
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def manhattan(a, b):
    return sum(abs(x - y) for x, y in zip(a, b, strict=True))


def smaller_of_two(a, b):
    return min(euclidean(a[:6], b[:6]), euclidean(a[6:], b[6:]))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Build search structures for indexes as small as these."""
    monkeypatch.setattr(search_structure, "MIN_ROWS", 100)


@pytest.fixture(scope="module")
def pixels(makers):
    return makers.digits()[0][:, None]


@pytest.fixture
def build(makers, photos, tmp_path):
    def make(backend="flat", options=None, **kind):
        bundle = makers.make_bundle(tmp_path / "bundle", **kind)
        create_index(
            tmp_path / "index", bundle, [photos], backend=backend, options=options, progress=False
        )
        return open_index(tmp_path / "index", threads=1)

    return make


@pytest.mark.parametrize(
    ("backend", "kind", "distance", "output"),
    [
        ("flat", {}, euclidean, "query"),
        ("hnsw", {"query_vectors": True}, euclidean, "query"),
        ("ivf", {"normalized": False}, euclidean, "query"),
        ("flat", {"subspaces": True}, smaller_of_two, "query"),
        ("hnsw", {"subspaces": True}, smaller_of_two, "query"),
        ("ivf", {"rescorer": True}, manhattan, "code"),
        ("flat", {"rescorer": True, "subspaces": True}, manhattan, "code"),
    ],
)
def test_hits_are_those_of_a_plain_loop(backend, kind, distance, output, build, pixels):
    options = {"probes": 1000} if backend == "ivf" else None
    with build(f"core.{backend}", options, **kind) as index:
        assert index.store.settings()["structure"]["backend"] == backend
        items = index.scan()
        order = [int(item.path.stem) for item in items]
        gallery = index.bundle.encode(pixels[order])
        against = gallery.code if output == "code" else gallery.vector
        queries = index.bundle.encode(pixels[200:212])
        answers = index.search(queries, 7, candidates=200)
        for number, hits in enumerate(answers):
            rows, distances = plain_nearest(
                getattr(queries, output)[number].tolist(), against, distance, 7
            )
            assert [hit.id for hit in hits] == [items[row].id for row in rows]
            assert [hit.distance for hit in hits] == pytest.approx(distances, rel=1e-4, abs=1e-6)


def test_bad_queries_are_sentences(index_path, build):
    with open_index(index_path, threads=1) as index:
        for bad, k, says in (
            (np.zeros(5), 10, "has 16 numbers, not 5"),
            (np.full(16, np.nan), 10, "NaN"),
            (np.full(16, 1e300), 10, "beyond float32"),
            (np.array(["a"] * 16), 10, "real numbers"),
            (np.zeros(16), 0, "k must be at least 1, not 0"),
        ):
            with pytest.raises(DataError, match=says):
                index.search(bad, k)
    says = "needs the code of each query"
    with build(rescorer=True) as index, pytest.raises(DataError, match=says):
        index.search(np.zeros(16))


def test_searching_from_many_threads_gives_the_same_answers(build, pixels):
    index = build("hnsw", rescorer=True)
    queries = [index.bundle.encode(pixels[number : number + 1]) for number in range(40)]
    alone = [index.search(query, 5) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(lambda query: index.search(query, 5), queries)) == alone


def test_a_variant_encodes_items_and_queries(bundle_path, photos, tmp_path):
    create_index(tmp_path / "i", bundle_path, [photos / "3"], variant="fp16", progress=False)
    with open_index(tmp_path / "i", threads=1) as index:
        assert index.bundle.variant == "fp16"
        path = next((photos / "3").glob("*.png"))
        vector = Bundle.open(bundle_path, variant="fp16", threads=1).encode_image(path).vector[0]
        hit = index.search(index.bundle.encode_image(path), 1)[0][0]
        assert np.array_equal(index.vector(hit.id), vector)
        assert hit.label == "3"


def test_auto_is_exact_while_small():
    assert choose(FLAT_NUMBERS // 128, 128) == "flat"
    assert choose(FLAT_NUMBERS // 128 + 1, 128) == "hnsw"
    assert choose(HNSW_VECTORS, 512) == "hnsw"
    assert choose(HNSW_VECTORS + 1, 512) == "ivf"


def test_recall_is_measured_honestly():
    vectors = np.random.default_rng(0).normal(size=(3000, 24)).astype(np.float32)
    poor, exact = make_backend("ivf", {"lists": 60, "probes": 2}), make_backend("flat", {})
    poor.build(vectors, int)
    exact.build(vectors, int)
    found = 0
    for row in np.random.default_rng(0).choice(3000, 200, replace=False):
        squared = ((vectors.astype(np.float64) - vectors[row]) ** 2).sum(axis=1)
        squared[row] = np.inf
        nearest = set(np.argsort(squared)[:10].tolist())
        found += len(nearest & set(poor.search(vectors[row : row + 1], 11)[1][0].tolist()))
    measured = recall_at_10(poor, "ivf", vectors)
    assert measured == pytest.approx(found / 2000, abs=0.003) and measured < 0.8
    assert recall_at_10(exact, "flat", vectors) == 1.0
    assert recall_at_10(exact, "flat", vectors[:1]) == 1.0


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("hnws", {}, "no index back end 'hnws'.*Did you mean 'hnsw'"),
        ("hnsw", {"mm": 3}, "no such parameter.*Did you mean 'm'"),
        ("hnsw", {"m": 1}, "m: should be .*4.*not 1"),
        ("auto", {"m": 16}, "need its name"),
        ("nobody.index", {}, "No plugin 'nobody'"),
    ],
)
def test_a_wrong_back_end_is_refused_before_anything_is_encoded(
    name, options, says, bundle_path, photos, tmp_path
):
    with pytest.raises((PluginError, DataError), match=says):
        create_index(
            tmp_path / "i", bundle_path, [photos], backend=name, options=options, progress=False
        )
    assert not list(tmp_path.iterdir())


PLUGIN = '''
import numpy as np
from retrieval.plugin import IndexBackend, hookimpl

class Brute(IndexBackend):
    """Compare with everything, in NumPy.

    Args:
        block: queries at a time.
    """

    def __init__(self, block: int = 2) -> None:
        self.block = block

    def build(self, vectors, report):
        self.vectors = np.array(vectors)

    def search(self, queries, k):
        BREAK
        distances = np.sqrt(((queries[:, None] - self.vectors[None]) ** 2).sum(axis=2))
        rows = np.argsort(distances, axis=1)[:, :k]
        return np.take_along_axis(distances, rows, axis=1), rows

    def save(self, path):
        path.touch()

    def load(self, path, vectors):
        self.vectors = vectors

@hookimpl
def retrieval_indexes():
    return {"brute": Brute}
'''


def test_a_back_end_from_a_plugin(bundle_path, index_path, photos, tmp_path):
    def create(name: str, instead: str, parameters=None):
        plugin = tmp_path / f"{name}.py"
        plugin.write_text(PLUGIN.replace("BREAK", instead))
        options = {"backend": f"{name}.brute", "options": parameters, "plugins": [str(plugin)]}
        return create_index(
            tmp_path / f"{name}.i", bundle_path, [photos], progress=False, **options
        )

    summary = create("mine", "pass", {"block": 3})
    assert summary.backend == "mine.brute"
    assert summary.recall_at_10 == 1.0  # measured, since only `flat` is known to be exact
    with (
        open_index(tmp_path / "mine.i", threads=1, plugins=[str(tmp_path / "mine.py")]) as index,
        open_index(index_path, threads=1) as flat,
    ):
        query = flat.vector("1/0001.png")
        assert index.search(query, 9) == flat.search(query, 9)
    with pytest.raises(StoreError, match=r"'broken\.brute' returned"):
        create("broken", "return np.zeros((1, 1)), np.full((1, 1), 999)")
    assert not (tmp_path / "broken.i").exists() and not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("build", "self.vectors = np.array(vectors)"),
        ("search", "BREAK"),
        ("save", "path.touch()"),
        ("load", "self.vectors = vectors"),
    ],
)
def test_a_back_end_that_raises_is_named(method, given, bundle_path, photos, tmp_path, caplog):
    text = PLUGIN.replace(given, "raise KeyError('no such key')").replace("BREAK", "pass")
    line = next(n for n, line in enumerate(text.splitlines(), 1) if "no such key" in line)
    (tmp_path / "mine.py").write_text(text)
    options = {"backend": "mine.brute", "plugins": [str(tmp_path / "mine.py")], "progress": False}
    named = (
        rf"he index back end mine\.brute, asked to {method}, failed: KeyError: 'no such key'"
        rf" \(.*mine\.py, line {line}\)\."
    )
    if method == "load":  # a log line; the index is searched exactly
        create_index(tmp_path / "i", bundle_path, [photos], **options)
        assert re.search(named, caplog.text)
    else:
        with pytest.raises(PluginError, match=named):
            create_index(tmp_path / "i", bundle_path, [photos], **options)
        assert not list(tmp_path.glob("i*"))
