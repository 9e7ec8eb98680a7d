"""Exact search answers as plain arithmetic in double precision does, ties by row, for whatever vectors."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval.serving.local import distances, exact, few, frame, lows

Array = Any


def brute(
    queries: Array,
    vectors: Array,
    k: int,
    keep: Array = None,
    span: Array = None,
    norms: Array = None,
    threads: int = 1,
) -> Any:
    """The nearest by Σ (q − x)² in double precision, equal distances by row."""
    part = slice(None) if span is None else slice(*span)
    squared = np.full((len(queries), k), np.inf)
    rows = np.full((len(queries), k), -1, np.int64)
    kept = np.arange(len(vectors)) if keep is None else np.flatnonzero(keep)
    for number, query in enumerate(queries):
        apart = vectors[kept, part].astype(np.float64) - query[part].astype(np.float64)
        every = np.einsum("ij,ij->i", apart, apart)
        order = np.argsort(every, kind="stable")[:k]
        squared[number, : len(order)], rows[number, : len(order)] = every[order], kept[order]
    return squared, rows


def agree(queries: Array, vectors: Array, k: int, **options: Any) -> None:
    """Hold `nearest` to the plain search: the same distances, and the same rows wherever they are not ties."""
    true, wanted = brute(queries, vectors, k, **options)
    ways = ({}, {"_NUMBERS": 0, "_SAMPLE": 40}, {"_NUMBERS": 0, "_ROWS": -1})  # small, one query, in blocks
    for way in ways:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in way.items():
                patch.setattr(few, name, value)
            found, rows = exact.nearest(queries, vectors, k, **options)
        assert (
            found.dtype == np.float64 and rows.dtype == np.int64 and found.shape == rows.shape == true.shape
        )
        np.testing.assert_allclose(found, true, rtol=1e-13, atol=0)
        differ = rows != wanted
        np.testing.assert_allclose(found[differ], true[differ], rtol=1e-13)  # last bits of a sum: a tie
        assert differ.sum() <= (0 if np.array_equal(found, true) else 2)
        for one in rows:
            assert len(set(one[one >= 0])) == (one >= 0).sum()


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tiny(vectors: Array) -> Any:
    """Denormal numbers of float32 beside each other and beside zeros."""
    return (np.round(vectors * 3) * np.float32(1e-45)).astype(np.float32)


def mixed(vectors: Array) -> Any:
    """Rows from 1e-18 to 1e18."""
    return vectors * np.float32(10) ** np.linspace(-18, 18, len(vectors), dtype=np.float32)[:, None]


KINDS: dict[str, Callable[[Array], Array]] = {
    "plain": lambda x: x,
    "far from zero": lambda x: x + np.float32(1e4),
    "farther than float32 can tell": lambda x: x * np.float32(1e-4) + np.float32(1e4),
    "far, after a sample that is not": lambda x: (
        x + np.where(np.arange(len(x)) % 7 == 3, np.float32(1e5), np.float32(0))[:, None]
    ),
    "duplicates": lambda x: np.repeat(x[:7], -(-len(x) // 7), axis=0)[: len(x)],
    "all one": lambda x: np.ones_like(x),
    "zeros": np.zeros_like,
    "near-duplicates": lambda x: (x[:1] + x * np.float32(1e-6)).astype(np.float32),
    "small differences": lambda x: (np.float32(1) + np.round(x) * np.float32(2.0**-23)).astype(np.float32),
    "denormals": tiny,
    "huge": lambda x: x * np.float32(1e37),
    "small": lambda x: x * np.float32(1e-30),
    "of all sizes": mixed,
    "some huge": lambda x: x * np.where(np.arange(len(x)) % 11 == 5, np.float32(3e37), np.float32(1))[:, None],
    "sorted by distance, farthest first": lambda x: x * np.linspace(9, 0.1, len(x), dtype=np.float32)[:, None],
}  # fmt: skip


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks and windows of few rows."""
    for name, value in {
        "_PART_NUMBERS": 150,
        "_BLOCK_PAIRS": 400,
        "_WINDOW": 50,
        "_SMALL_PRODUCT": 900,
        "_FEWEST_ROWS": 3,
    }.items():
        monkeypatch.setattr(exact, name, value)
    monkeypatch.setattr(distances, "_PAIR_NUMBERS", 100)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3, 20])
def test_as_in_double_precision(kind: str, count: int) -> None:
    vectors = np.ascontiguousarray(KINDS[kind](normal(3000, 24)))
    queries = vectors[5 : 5 + 100 * count : 100] + KINDS[kind](normal(count, 24, seed=1)) * np.float32(1e-3)
    for options in ({}, {"keep": np.arange(3000) % 3 > 0}, {"span": (3, 19)}, {"threads": 3}):
        agree(queries, vectors, 10, **options)
    agree(vectors[:count], vectors, 10, keep=np.arange(3000) % 50 == 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_blocks")
def test_as_in_double_precision_block_by_block(kind: str) -> None:
    vectors = np.ascontiguousarray(KINDS[kind](normal(500, 12)))
    keep = np.arange(500) % 4 != 1
    for queries in (vectors[[3]], vectors[::60] + np.float32(1e-4)):
        for k in (1, 7, 499, 500, 600):
            agree(queries, vectors, k)
        agree(queries, vectors, 9, keep=keep, norms=distances.squared_norms(vectors), threads=2)
        agree(queries, vectors, 9, keep=~keep, span=(0, 5))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_the_numbers(data: st.DataObject) -> None:
    draw = data.draw
    width, count = draw(st.integers(1, 6)), draw(st.integers(0, 40))
    number = st.one_of(
        st.floats(-(2.0**127), 2.0**127, width=32),
        st.floats(-2, 2, width=32),
        st.sampled_from([0.0, -0.0, 1.0, 1e-45, 1e4, 1e4 + 2.0**-10]),
    )
    pool = draw(st.lists(st.lists(number, min_size=width, max_size=width), min_size=1, max_size=8))
    pick = st.integers(0, len(pool) - 1)
    table = np.array(pool, np.float32)
    vectors = table[draw(st.lists(pick, min_size=count, max_size=count))].reshape(count, width)
    queries = table[draw(st.lists(pick, max_size=6))].reshape(-1, width)
    keep = draw(st.none() | st.lists(st.booleans(), min_size=count, max_size=count).map(lambda x: np.array(x, bool)))  # fmt: skip
    first = draw(st.integers(0, width - 1))
    span = draw(st.none() | st.integers(first + 1, width).map(lambda last: (first, last)))
    k, threads = draw(st.integers(1, 50)), draw(st.sampled_from([1, 2, 5]))
    agree(queries, vectors, k, keep=keep, span=span, threads=threads)


def test_equal_distances_come_by_row() -> None:
    vectors = np.tile(normal(10, 8), (50, 1))
    for count in (1, 9):
        _, rows = exact.nearest(vectors[:count], vectors, 50, threads=2)
        assert rows.tolist() == [list(range(first, 500, 10)) for first in range(count)]


def test_kept_norms_change_nothing() -> None:
    vectors, queries = normal(4000, 32), normal(40, 32, seed=2)
    with_norms = exact.nearest(queries, vectors, 5, norms=distances.squared_norms(vectors))
    for one, other in zip(with_norms, exact.nearest(queries, vectors, 5), strict=True):
        assert np.array_equal(one, other)


def test_none_to_find() -> None:
    vectors, queries = normal(20, 4), normal(2, 4)
    for squared, rows in (
        exact.nearest(queries, vectors[:0], 3),
        exact.nearest(queries, vectors, 3, keep=np.zeros(20, bool)),
    ):
        assert np.isposinf(squared).all() and (rows == -1).all() and rows.shape == (2, 3)
    assert exact.nearest(queries[:0], vectors, 3)[1].shape == (0, 3)


def test_vectors_mapped_from_a_file_and_not_to_be_written(tmp_path: Path) -> None:
    vectors, queries = normal(700, 16), normal(6, 16, seed=3)
    (tmp_path / "vectors").write_bytes(bytes(4096) + vectors.tobytes())
    mapped = np.memmap(tmp_path / "vectors", np.float32, "r", 4096, (700, 16))
    agree(queries, mapped, 10)
    agree(queries[:1], mapped, 10)


@pytest.mark.parametrize("count", [1, 300])
def test_memory_is_bounded(count: int) -> None:
    vectors = normal(200_000, 32)
    queries, keep = vectors[:count] + np.float32(0.1), np.arange(200_000) % 5 > 0
    exact.nearest(queries, vectors, 10)
    tracemalloc.start()
    try:
        exact.nearest(queries, vectors, 10, keep=keep)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 20_000_000 < vectors.nbytes  # (300, N) would be 240 MB


@pytest.mark.parametrize(("count", "rows"), [(1, 400_000), (40, 10_000), (256, 16_000)])
def test_even_where_all_are_equal_memory_is_bounded(count: int, rows: int) -> None:
    vectors = np.ones((rows, 32), np.float32)
    tracemalloc.start()
    try:
        found = exact.nearest(vectors[:count], vectors, 10)[1]
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found == np.arange(10)).all() and most < 100_000_000


def test_from_many_threads_at_a_time() -> None:
    vectors, queries = normal(20_000, 16), normal(64, 16, seed=4)
    true = brute(queries, vectors, 5)[1]
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(lambda n: exact.nearest(queries[n : n + n % 9 + 1], vectors, 5)[1], range(50))
        for first, rows in enumerate(parts):
            assert np.array_equal(rows, true[first : first + first % 9 + 1])


def test_it_leaves_settings_of_faiss_alone() -> None:
    from retrieval.serving.runtime import load_faiss

    names = ["distance_compute_blas_threshold", "distance_compute_blas_query_bs", "distance_compute_blas_database_bs"]  # fmt: skip
    before = [getattr(load_faiss().cvar, name) for name in names]
    exact.nearest(normal(50, 8), normal(100, 8), 3)
    assert before == [getattr(load_faiss().cvar, name) for name in names]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": 0}, "at least 1"),
        ({"threads": 0}, "at least 1"),
        ({"queries": np.zeros((2, 5), np.float32)}, "do not fit"),
        ({"vectors": np.zeros((9, 4))}, "float32"),
        ({"vectors": np.zeros((4, 9), np.float32).T}, "C-contiguous"),
        ({"keep": np.ones(9, np.uint8)}, "keep"),
        ({"keep": np.ones(8, bool)}, "keep"),
        ({"norms": np.ones(8, np.float32)}, "norms"),
        ({"span": (2, 2)}, "span"),
        ({"span": (0, 5)}, "span"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"queries": np.zeros((2, 4), np.float32), "vectors": np.zeros((9, 4), np.float32), "k": 3}  # fmt: skip
    with pytest.raises(ValueError, match=said):
        exact.nearest(**given | options)


def test_what_is_known_of_an_array_never_decides_and_goes_with_it() -> None:
    vectors, queries = normal(300, 200), normal(2, 200, seed=1)
    before = len(frame._KNOWN)
    for scale in (1.0, 2.0**70, 2.0**-140):  # what was found out about the first is wrong of the others
        vectors *= np.float32(scale)
        agree(queries, vectors, 10)
        assert len(frame._KNOWN) == before + 1
    del vectors
    assert len(frame._KNOWN) == before


@pytest.mark.parametrize("count", [1, 3, 9])
def test_more_rows_than_are_kept_may_be_as_near_as_the_last(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, passed = np.random.default_rng(0), []
    vectors = random.normal(size=(6000, 32)).astype(np.float32)
    vectors[random.permutation(6000)[:100]] = vectors[17]  # far more than are kept beyond k
    queries = vectors[[17, *range(1, count)]] + np.float32(0.01)
    sums = few._sums
    monkeypatch.setattr(few, "_sums", lambda *given: (passed.append(len(given)), sums(*given))[1])
    wanted = brute(queries, vectors, 10)
    found = exact.nearest(queries, vectors, 10)
    np.testing.assert_array_equal(found[1], wanted[1])
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-13)
    assert len(passed) == (count == 1)  # what is kept of one query's sums was not enough, and that is seen


def test_the_bound_that_saves_measuring_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no room for float32's errors the first rows that are measured may not be the nearest; the others are then measured too."""
    vectors = normal(5000, 24) * np.float32(1e-2) + np.float32(
        1
    )  # distances of which float32's products tell few digits
    queries, reached = vectors[::500] + np.float32(1e-3), []
    within = lows.Lows.within
    monkeypatch.setattr(lows.Lows, "kth", lambda self, real=lows.Lows.kth: real(self) - np.float32(1e-3))
    monkeypatch.setattr(
        lows.Lows, "within", lambda self, *given: (reached.append(1), within(self, *given))[1]
    )
    agree(queries, vectors, 10)
    assert len(reached) > 3  # a second time in each of the ways


def test_of_vectors_of_one_length_the_norms_are_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_BLOCK_PAIRS", 12_000)  # later blocks are held to what the first ones had
    plain = normal(4000, 24)
    unit = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    queries = unit[5:4000:400] + np.float32(1e-4)
    for scale in (1.0, 3e-5, 2e7):  # rounded, they differ in their last digits
        vectors = (unit * np.float32(scale)).astype(np.float32)
        norms = distances.squared_norms(vectors)
        search = exact._Search(
            exact._Task(vectors, slice(None), 9, None, norms, None, None), queries, 0, len(vectors)
        )
        assert search.flat and np.ptp(norms) > 0
        agree(queries * np.float32(scale), vectors, 300, norms=norms)
        agree(queries * np.float32(scale), vectors, 300, norms=norms, keep=np.arange(4000) % 3 > 0, threads=3)
    norms = distances.squared_norms(plain)
    assert not exact._Search(exact._Task(plain, slice(None), 9, None, norms, None, None), queries, 0, 9).flat


def test_a_table_beyond_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norms are computed on the way, whether they are kept or not; and blocks end within groups."""
    monkeypatch.setattr(exact, "_CACHED", 0)
    monkeypatch.setattr(exact, "_BLOCK_PAIRS", 7000)
    vectors, queries = normal(4321, 24), normal(40, 24, seed=1)
    for count in (2, 5, 40):
        agree(queries[:count], vectors, 10, norms=distances.squared_norms(vectors))
        agree(queries[:count], vectors, 10, keep=np.arange(4321) % 7 == 0)


@pytest.mark.parametrize("rows", [*range(1, 150, 7), *range(120, 140), 200, 1023])
@pytest.mark.parametrize("queries", [1, 2, 7])
def test_low_values_are_all_found(rows: int, queries: int) -> None:
    random = np.random.default_rng(rows)
    for values in (
        random.normal(size=(rows, queries)).astype(np.float32),
        random.integers(0, 4, (rows, queries)).astype(np.float32),  # ties
        np.where(random.random((rows, queries)) < 0.1, -np.inf, np.inf).astype(np.float32),
    ):
        kept = values.copy()
        for count in (1, 3, 20):
            low = lows.Lows(values, count)
            kth = low.kth()
            if rows >= count:
                assert (kth >= np.partition(values, count - 1, axis=0)[count - 1]).all()
            else:
                assert np.isposinf(kth).all()
            for limits in (kth, kth - np.float32(1), np.full(queries, np.inf, np.float32)):
                found = low.within(low.near(limits), limits)
                assert set(zip(*map(np.ndarray.tolist, found), strict=True)) == set(
                    zip(*map(np.ndarray.tolist, np.nonzero(values <= limits)), strict=True)
                )
                assert len(found[0]) == np.count_nonzero(values <= limits)
        assert np.array_equal(values, kept)


def test_one_query_where_somebody_has_faiss_take_products_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products lose digits that its sums keep, and the bound speaks of sums."""
    from retrieval.serving.runtime import load_faiss

    variables = load_faiss().cvar
    monkeypatch.setattr(variables, "distance_compute_blas_threshold", 1)
    near = (np.float32(1) + np.round(normal(3000, 24)) * np.float32(2.0**-23)).astype(np.float32)
    for vectors in (near, normal(3000, 24)):
        true = brute(vectors[:1], vectors, 10)
        found = exact.nearest(vectors[:1], vectors, 10)
        np.testing.assert_array_equal(found[1], true[1])
