"""Thresholds of exact search and of structures, each where the product has it."""

import numpy as np
import pytest
from retrieval import Index
from retrieval.store.exact_search import Companion, nearest
from retrieval.store.search_structure import build_structure, load_structure

pytestmark = pytest.mark.scale


def exact(queries, vectors, k, keep=None):
    """Return what `nearest` should, for whole numbers, whose products float64 holds exactly."""
    queries, vectors = queries.astype(float), vectors.astype(float)
    lengths = np.einsum("ij,ij->i", vectors, vectors)
    squared = np.einsum("ij,ij->i", queries, queries)[:, None] + lengths - 2 * queries @ vectors.T
    if keep is not None:
        squared[:, ~keep] = np.inf
    # Distances are below 2³⁶ and rows below 2¹⁷, so one number orders pairs of both
    keys = squared * 2**17 + np.arange(len(vectors))
    keys = np.sort(np.partition(keys, k - 1, axis=1)[:, :k], axis=1)
    return np.floor(keys / 2**17), keys % 2**17


@pytest.fixture(scope="module")
def vectors():
    """70,000 vectors that a companion of one block does not hold; 6,000 of them are equal."""
    random = np.random.default_rng(0)
    rows = random.integers(-50, 51, (70_000, 12)) @ random.integers(-9, 10, (12, 48))
    rows[5000:11_000] = rows[5000]
    return rows.astype(np.float32)


@pytest.mark.parametrize("with_companion", [False, True])
def test_exact_search_in_blocks_groups_and_parts(vectors, with_companion):
    companion = Companion.build(vectors) if with_companion else None
    assert (companion is not None) == with_companion
    far = np.arange(len(vectors)) % 10 != 0
    few = np.arange(len(vectors)) % 50 == 0
    for count, k, keep in ((1, 10, None), (3, 10, far), (5, 10, few), (260, 10, None)):
        queries = vectors[20_000 : 20_000 + count] + np.float32(1)
        squared, rows = nearest(queries, vectors, k, keep=keep, companion=companion)
        expected = exact(queries, vectors, k, keep)
        assert (squared == expected[0]).all() and (rows == expected[1]).all()
    squared, rows = nearest(vectors[5000:5100], vectors, 10, companion=companion)
    assert not squared.any() and (rows == np.arange(5000, 5010)).all()  # 600,000 pairs in doubt
    if with_companion:
        queries = vectors[20_000:20_220]  # more than 2²¹ hits, so two groups of queries
        squared, rows = nearest(queries, vectors, 10_000, companion=companion)
        expected = exact(queries[::40], vectors, 10_000)
        assert (squared[::40] == expected[0]).all() and (rows[::40] == expected[1]).all()
    else:
        squared, rows = nearest(vectors[7:9], vectors, 10, span=(3, 40))
        expected = exact(vectors[7:9, 3:40], vectors[:, 3:40], 10)
        assert (squared == expected[0]).all() and (rows == expected[1]).all()


def test_filters_in_a_structure_of_more_rows_than_its_candidates_allow(tmp_path):
    # 2 % of these rows are more than 4,096, the candidates of a search
    count = 210_000
    vectors = np.random.default_rng(0).normal(size=(count, 8)).astype(np.float32)
    (tmp_path / "arrays").mkdir()
    structure = build_structure(
        tmp_path, "a", vectors, [(0, 8)], "ivf", {"lists": 64, "probes": 16}, (), lambda n: None
    )
    loaded = load_structure(tmp_path, structure, vectors, [(0, 8)], ())
    for matching, answered in ((4150, False), (4250, True)):
        keep = np.arange(count) < matching
        rows = loaded.propose(0, vectors[:3], 10, keep, filtered=True)
        assert (rows is not None) == answered
        assert rows is None or (keep[rows].all() and rows[:, 0].tolist() == [0, 1, 2])


def test_originals_are_written_before_they_fill_the_memory(makers, tmp_path):
    # The pictures are small, but each file has 2 MB after its end: 80 MB in all
    paths = makers.write_digits(tmp_path / "photos", 40)
    for path in paths:
        path.write_bytes(path.read_bytes() + bytes(2_000_000))
    bundle = makers.make_bundle(tmp_path / "bundle")
    with Index.create(tmp_path / "i", tmp_path / "photos", model=bundle, keep="copy") as index:
        items = index.scan()
        assert len(items) == 40 and all(item.bytes > 2_000_000 for item in items)
        for item in items[::13]:
            assert index.store.original(item.id) == item.path.read_bytes()
        # After the first batch of 32 files 64 MB wait and are written
        assert index.stats().details["transactions"] >= 4
