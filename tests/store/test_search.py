"""Exact search equals float64 brute force for any vectors; equal distances are ordered by row."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from retrieval.errors import StoreError
from retrieval.store import exact_search
from retrieval.store.exact_search import Companion, nearest

Array = Any


def brute(
    queries: Array, vectors: Array, k: int, *, keep: Array = None, span: Array = None, **_: Any
) -> Any:
    """Return the nearest by Σ (q − x)² in float64; equal distances are ordered by row."""
    columns = slice(None) if span is None else slice(*span)
    squared = np.full((len(queries), k), np.inf)
    rows = np.full((len(queries), k), -1, np.int64)
    kept = np.arange(len(vectors)) if keep is None else np.flatnonzero(keep)
    for number, query in enumerate(queries):
        apart = query[columns].astype(np.float64) - vectors[kept, columns].astype(np.float64)
        every = np.einsum("ij,ij->i", apart, apart)
        order = np.argsort(every, kind="stable")[:k]
        squared[number, : len(order)], rows[number, : len(order)] = every[order], kept[order]
    return squared, rows


def agree(queries: Array, vectors: Array, k: int, **options: Any) -> None:
    """Require that `nearest` equals `brute`, including ties."""
    squared, rows = nearest(queries, vectors, k, **options)
    true, choice = brute(queries, vectors, k, **options)
    assert squared.dtype == np.float64 and rows.dtype == np.int64
    np.testing.assert_array_equal(squared, true)
    np.testing.assert_array_equal(rows, choice)


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def low_rank(count: int, width: int = 24, seed: int = 0) -> Any:
    """Return vectors that vary mostly in 5 directions, as features of images vary in few."""
    random = np.random.default_rng(seed)
    directions = np.random.default_rng(9).standard_normal((5, width))
    noise = 0.05 * random.standard_normal((count, width))
    return (random.standard_normal((count, 5)) @ directions + noise).astype(np.float32)


def scaled(x: Array, factors: Array) -> Any:
    return x * np.asarray(factors, np.float32)[:, None]


KINDS: dict[str, Callable[[Array], Array]] = {
    "plain": lambda x: x,
    "a common offset": lambda x: x + np.float32(1e4),
    "an offset beyond float32": lambda x: x * np.float32(1e-4) + np.float32(1e4),
    "some rows far away": lambda x: x + 1e5 * (np.arange(len(x)) % 7 == 3)[:, None].astype("f4"),
    "duplicates": lambda x: np.repeat(x[:7], -(-len(x) // 7), axis=0)[: len(x)],
    "tiled": lambda x: np.tile(x[:40], (-(-len(x) // 40), 1))[: len(x)],
    "all equal": np.ones_like,
    "zeros": np.zeros_like,
    "near-duplicates": lambda x: (x[:1] + x * np.float32(1e-6)).astype(np.float32),
    "one rounding apart": lambda x: (1 + np.round(x) * np.float32(2.0**-23)).astype(np.float32),
    "float16's numbers": lambda x: (100 * x).astype(np.float16).astype(np.float32),
    "whole numbers": lambda x: np.round(x),
    "subnormal": lambda x: (np.round(x * 3) * np.float32(1e-45)).astype(np.float32),
    "small": lambda x: x * np.float32(1e-30),
    "huge": lambda x: x * np.float32(1e37),
    "of all sizes": lambda x: scaled(x, 10.0 ** np.linspace(-18, 18, len(x))),
    "some huge": lambda x: scaled(x, np.where(np.arange(len(x)) % 11 == 5, 1e37, 1)),
    "farthest first": lambda x: scaled(x, np.linspace(9, 0.1, len(x))),
    "nearest first": lambda x: scaled(x, np.linspace(0.1, 9, len(x))),
    "unit length": lambda x: x / np.linalg.norm(x, axis=1, keepdims=True),
}


@pytest.fixture
def small_blocks(monkeypatch):
    """Make blocks, groups and parts small, so that a search has many."""
    for name, value in {
        "_FEW": 1,
        "_GROUP": 5,
        "_BLOCK_PAIRS": 800,
        "_BLOCK_NUMBERS": 900,
        "_PART_NUMBERS": 150,
        "_PAIR_NUMBERS": 700,
        "_PAIRS": 500,
        "_QUERIES": 5,
        "_MIN_DOUBT": 0,
    }.items():
        monkeypatch.setattr(exact_search, name, value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3, 20])
def test_as_in_float64(kind, count):
    vectors = np.ascontiguousarray(KINDS[kind](low_rank(2400)), np.float32)
    noise = np.ascontiguousarray(KINDS[kind](normal(count, 24, seed=1)), np.float32)
    queries = vectors[5 : 5 + 100 * count : 100] + noise * np.float32(1e-3)
    options: list[dict[str, Any]] = [
        {},
        {"keep": np.arange(2400) % 3 > 0},
        {"keep": np.arange(2400) % 50 == 0},
        {"span": (3, 19)},
        {"span": (3, 19), "keep": np.arange(2400) % 50 != 7, "threads": 2},
        {"threads": 3},
    ]
    if (companion := Companion.build(vectors)) is not None:
        options += [{"companion": companion}, {"companion": companion, "threads": 2}]
        options += [{"companion": companion, "keep": np.arange(2400) % 3 > 0}]
        options += [{"companion": companion, "keep": np.arange(2400) % 50 == 0}]
    for some in options:
        agree(queries, vectors, 10, **some)


@pytest.mark.parametrize("count", [1, 3, 20])
def test_as_in_float64_with_a_companion_of_several_parts(count):
    vectors = normal(3000, 20) @ normal(20, 80, seed=2)
    companion = Companion.build(vectors)
    assert companion is not None and len(companion.table) > 1
    for keep in (None, np.arange(3000) % 3 > 0, np.arange(3000) % 50 == 0):
        agree(vectors[:count] + np.float32(1e-3), vectors, 10, companion=companion, keep=keep)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_blocks")
def test_as_in_float64_block_by_block(kind):
    vectors = np.ascontiguousarray(KINDS[kind](normal(500, 12)), np.float32)
    keep = np.arange(500) % 4 != 1
    companion = Companion.build(vectors)
    for queries in (vectors[[3]], vectors[::60] + np.float32(1e-4)):
        for k in (1, 7, 500, 600):
            agree(queries, vectors, k)
            agree(queries, vectors, k, companion=companion)
        agree(queries, vectors, 9, keep=keep, threads=2)
        agree(queries, vectors, 9, keep=keep, companion=companion)
        agree(queries, vectors, 9, keep=~keep, span=(0, 5))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_the_numbers(data):
    draw = data.draw
    width, count = draw(st.integers(1, 6)), draw(st.integers(0, 60))
    number = st.one_of(
        st.floats(-(2.0**127), 2.0**127, width=32),
        st.floats(-2, 2, width=16),
        st.sampled_from([0.0, -0.0, 1.0, 1e-45, 1e4, 1e4 + 2.0**-10]),
    )
    pool = draw(st.lists(st.lists(number, min_size=width, max_size=width), min_size=1, max_size=8))
    table = np.array(pool, np.float32)
    pick = st.integers(0, len(pool) - 1)
    vectors = table[draw(st.lists(pick, min_size=count, max_size=count))].reshape(count, width)
    queries = table[draw(st.lists(pick, max_size=80))].reshape(-1, width)
    masks = st.lists(st.booleans(), min_size=count, max_size=count)
    keep = draw(st.none() | masks.map(lambda x: np.array(x, bool)))
    first = draw(st.integers(0, width - 1))
    span = draw(st.none() | st.integers(first + 1, width).map(lambda last: (first, last)))
    k, threads = draw(st.integers(1, 70)), draw(st.sampled_from([1, 2, 5]))
    agree(queries, vectors, k, keep=keep, span=span, threads=threads)


def test_none_to_find():
    vectors, queries = normal(20, 4), normal(2, 4)
    for squared, rows in (
        nearest(queries, vectors[:0], 3),
        nearest(queries, vectors, 3, keep=np.zeros(20, bool)),
    ):
        assert np.isposinf(squared).all() and (rows == -1).all() and rows.shape == (2, 3)
    assert nearest(queries[:0], vectors, 3)[1].shape == (0, 3)


def test_more_rows_as_near_as_the_last_than_faiss_keeps():
    random = np.random.default_rng(0)
    vectors = normal(6000, 32)
    vectors[random.permutation(6000)[:100]] = vectors[17]
    for count in (1, 3, 9):
        agree(vectors[[17, *range(1, count)]] + np.float32(0.01), vectors, 10)


@pytest.mark.parametrize("count", [1, 300])
def test_memory_is_bounded(count):
    vectors = normal(200_000, 32)
    queries, keep = vectors[:count] + np.float32(0.1), np.arange(200_000) % 5 > 0
    assert _peak(lambda: nearest(queries, vectors, 10)) < 24_000_000 < vectors.nbytes
    assert _peak(lambda: nearest(queries, vectors, 10, keep=keep)) < 24_000_000


@pytest.mark.parametrize(("count", "rows"), [(1, 400_000), (40, 10_000), (256, 4_000)])
def test_memory_is_bounded_where_all_rows_are_equal(count, rows):
    vectors = np.ones((rows, 32), np.float32)
    assert _peak(lambda: nearest(vectors[:count], vectors, 10)) < 100_000_000


def _peak(work: Callable[[], Any]) -> int:
    """Return the peak of allocated bytes."""
    work()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "options",
    [
        {"k": 0},
        {"queries": np.zeros((2, 5), np.float32)},
        {"vectors": np.zeros((9, 4))},
        {"vectors": np.zeros((4, 9), np.float32).T},
        {"keep": np.ones(8, bool)},
        {"companion": Companion.build(low_rank(100))},
    ],
)
def test_arguments_that_do_not_fit_are_refused(options):
    fitting: dict[str, Any] = {
        "queries": np.zeros((2, 4), np.float32),
        "vectors": np.zeros((9, 4), np.float32),
        "k": 3,
    }
    with pytest.raises(ValueError, match=r"Arguments do not fit|must be C-contiguous float32"):
        nearest(**fitting | options)


def test_a_companion_is_read_in_place_of_the_vectors(monkeypatch):
    vectors, queries = low_rank(3000), low_rank(4, seed=1)
    companion = Companion.build(vectors)
    assert companion is not None and companion.table.shape == (1, 3000, 8)
    monkeypatch.setattr(exact_search, "_Scan", None)
    monkeypatch.setattr(exact_search, "_nearest_by_faiss", None)
    for count in (1, 4):
        agree(queries[:count], vectors, 10, companion=companion)


def test_vectors_that_fill_all_directions_have_no_companion():
    assert Companion.build(normal(3000, 24)) is None
    assert Companion.build(low_rank(30)) is None  # too few to tell
    assert Companion.build(low_rank(3000) * np.float32(1e37)) is None


def test_a_companion_s_file(tmp_path):
    vectors = low_rank(3000)
    companion = Companion.build(vectors)
    assert companion is not None
    path = tmp_path / "companion"
    companion.save(path)
    loaded = Companion.load(path, 3000, 24)
    assert np.shares_memory(loaded.table, np.frombuffer(loaded.mapped, np.uint8))
    assert np.array_equal(loaded.table, companion.table)
    agree(low_rank(5, seed=2), vectors, 10, companion=loaded)
    with pytest.raises(StoreError, match="belongs to other vectors"):
        Companion.load(path, 2999, 24)
