"""Exact search by 16 bits on a device, its graph run by ONNX Runtime on the CPU: plain arithmetic in double precision, to the last tie."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval.errors import BundleError, StoreError
from retrieval.serving.graphs import check_graph
from retrieval.serving.local import on_device, placing
from retrieval.serving.local.exact import nearest
from retrieval.serving.local.on_device import OnDevice, bytes_on_device, rounded
from retrieval.serving.local.placing import Placing
from retrieval.serving.local.segment import Segment, write_segment
from retrieval.serving.small_graphs import BFLOAT16, FLOAT, Node, Value, small_graph

Array = Any
SIXTEEN = ("float16", "bfloat16")


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def brute(queries: Array, vectors: Array, k: int, keep: Array = None) -> tuple[Array, Array]:
    """The nearest by Σ (q − x)² in double precision, equal distances by row."""
    squared, rows = np.full((len(queries), k), np.inf), np.full((len(queries), k), -1)
    kept = np.arange(len(vectors)) if keep is None else np.flatnonzero(keep)
    for number, query in enumerate(queries):
        apart = vectors[kept] - query.astype(np.float64)
        every = np.einsum("ij,ij->i", apart, apart)
        order = np.argsort(every, kind="stable")[:k]
        squared[number, : len(order)], rows[number, : len(order)] = every[order], kept[order]
    return squared, rows


def agree(on: OnDevice, queries: Array, k: int, keep: Array = None) -> None:
    found, wanted = on.nearest(queries, k, keep), brute(queries, on.vectors, k, keep)
    assert np.array_equal(found[0], wanted[0]) and np.array_equal(found[1], wanted[1])
    by_cpu = nearest(queries, on.vectors, k, keep=keep)
    assert np.array_equal(found[0], by_cpu[0]) and np.array_equal(found[1], by_cpu[1])


KINDS: dict[str, Callable[[Array], Array]] = {
    "plain": lambda x: x,
    "of length 1, for inner products": lambda x: x / np.linalg.norm(x, axis=1, keepdims=True),
    "far from zero": lambda x: x + np.float32(1e3),
    "duplicates": lambda x: np.repeat(x[:7], -(-len(x) // 7), axis=0)[: len(x)],
    "zeros": np.zeros_like,
    "near-duplicates": lambda x: x[:1] + x * np.float32(1e-5),
    "huge": lambda x: x * np.float32(1e30),
    "small": lambda x: x * np.float32(1e-30),
    "one far away": lambda x: np.vstack([x[1:], 3e4 * x[:1]]),
}


@pytest.fixture
def in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks of 100 rows, and few queries at a time."""
    monkeypatch.setattr(on_device, "_BLOCK_NUMBERS", 1600)
    monkeypatch.setattr(on_device, "_SCORES", 500)
    monkeypatch.setattr(on_device, "_STEP", 300)


@pytest.mark.parametrize(
    ("what", "kind", "blocks"),
    [*((what, kind, True) for what in KINDS for kind in SIXTEEN), ("plain", "float16", False)],
)
def test_as_in_double_precision(what: str, kind: Any, blocks: bool, request: Any) -> None:
    if blocks:
        request.getfixturevalue("in_blocks")
    vectors = np.ascontiguousarray(KINDS[what](normal(750, 16)), np.float32)
    on = OnDevice(vectors, "cpu", kind)
    assert len(on.blocks) == (8 if blocks else 1)
    queries = np.vstack([vectors[::90], KINDS[what](normal(3, 16, seed=1)), np.zeros((1, 16), np.float32)])
    queries = np.ascontiguousarray(queries, np.float32)
    for k in (1, 10):
        agree(on, queries, k)
    agree(on, queries[:3], 800)
    agree(on, queries, 5, np.arange(750) % 3 > 0)
    agree(on, queries, 5, np.isin(np.arange(750), [7, 8, 700]))
    agree(on, queries[:2], 5, np.zeros(750, bool))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_the_numbers(data: st.DataObject) -> None:
    draw = data.draw
    width, count = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    number = st.one_of(
        st.floats(-(2.0**120), 2.0**120, width=32),
        st.floats(-2, 2, width=32),
        st.sampled_from([0.0, -0.0, 1.0, 1 + 2.0**-11, 1e-45, 1e4, 1e4 + 2.0**-10]),
    )
    pool = draw(st.lists(st.lists(number, min_size=width, max_size=width), min_size=1, max_size=8))
    pick, table = st.integers(0, len(pool) - 1), np.array(pool, np.float32)
    vectors = table[draw(st.lists(pick, min_size=count, max_size=count))]
    queries = table[draw(st.lists(pick, min_size=1, max_size=6))]
    keep = draw(st.none() | st.lists(st.booleans(), min_size=count, max_size=count).map(lambda x: np.array(x, bool)))  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_device, "_BLOCK_NUMBERS", draw(st.sampled_from([1, 30, 1000])))
        on = OnDevice(vectors, "cpu", draw(st.sampled_from(SIXTEEN)))
        agree(on, queries, draw(st.integers(1, 50)), keep)


@pytest.mark.parametrize("kind", SIXTEEN)
def test_no_value_is_above_what_the_bound_says(kind: Any) -> None:
    """Of what the graph gives, in exact arithmetic: v ≤ |r̂ − ŷ|² − (1 − γ) |r̂|², and |r̂ − ŷ| ≤ s |q − x| + |r − r̂| + E."""
    vectors = normal(40, 12) * np.float32(10) ** np.linspace(-3, 0, 40, dtype=np.float32)[:, None]
    queries = np.vstack([vectors[:5], normal(5, 12, seed=1) * 30]).astype(np.float32)
    on = OnDevice(vectors, "cpu", kind)
    near, lost = on.moved(queries)
    there, _ = on.moved(vectors)
    values, rows = on._smallest(on.blocks[0], near, 40, on.blocks[0].bias)
    for at, query in enumerate(near):
        own = sum(Fraction(float(each)) ** 2 for each in query)
        for value, row in zip(values[at], rows[at], strict=True):
            apart = sum(
                (Fraction(float(a)) - Fraction(float(b))) ** 2 for a, b in zip(query, there[row], strict=True)
            )
            assert Fraction(float(value)) <= apart - (1 - Fraction(on.gamma)) * own
            true = float(np.linalg.norm(queries[at].astype(np.float64) - vectors[row]))
            assert float(apart) ** 0.5 <= (on.scale * true + lost[at] + on.error) * (1 + 1e-12)


def test_without_the_bound_it_would_be_wrong(monkeypatch: Any) -> None:
    """Among near-duplicates 16 bits put others first: what the margin is for."""
    vectors = np.float32(0.02) * normal(2000, 16)
    vectors[::2] += 5
    vectors[1::2] -= 5
    queries = vectors[10:30]
    on = OnDevice(vectors, "cpu")
    agree(on, queries, 5)
    monkeypatch.setattr(on_device._Search, "_limits", lambda self: np.full(len(self.queries), -np.inf))
    assert not np.array_equal(on.nearest(queries, 5)[1], brute(queries, vectors, 5)[1])


def test_more_rows_are_asked_for_and_then_the_cpu(monkeypatch: Any) -> None:
    asked: list[int] = []
    by_cpu: list[int] = []
    real, cpu = OnDevice._smallest, on_device._Search._by_cpu
    monkeypatch.setattr(OnDevice, "_smallest", lambda self, block, near, count, bias: asked.append(count) or real(self, block, near, count, bias))  # fmt: skip
    monkeypatch.setattr(on_device._Search, "_by_cpu", lambda self, rows, some: by_cpu.append(len(some)) or cpu(self, rows, some))  # fmt: skip
    for copies, wanted, alone in ((10, [32], []), (100, [32, 512], []), (1000, [32, 512], [1])):
        vectors = np.vstack([np.repeat(normal(1, 8), copies, axis=0), 9 + normal(2000, 8, seed=1)])
        on = OnDevice(vectors, "cpu")
        asked.clear()
        agree(on, vectors[:1], 1)
        assert (asked, by_cpu) == (wanted, alone)


def test_a_device_that_computes_less_exactly_is_refused(monkeypatch: Any) -> None:
    """As if it rounded products to 16 bits."""
    real = OnDevice._smallest

    def coarse(self: OnDevice, *given: Any) -> Any:
        values, rows = real(self, *given)
        return values.astype(np.float16).astype(np.float32), rows

    monkeypatch.setattr(OnDevice, "_smallest", coarse)
    with pytest.raises(StoreError, match="computes less exactly than float32"):
        OnDevice(normal(500, 16), "cpu")


def test_numbers_of_16_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes, whose bfloat16 is compared, is not there")
    numbers = np.concatenate(
        [normal(20_000), normal(2000) * np.float32(1e-40), normal(2000) * np.float32(5e37)]
    )
    wanted = numbers.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(rounded(numbers.astype(np.float64), "bfloat16"), wanted)
    assert rounded(np.array([1e9]), "float16") == np.inf


def test_a_graph_written_without_onnx_is_one() -> None:
    onnx = pytest.importorskip("onnx", reason="the package onnx, which checks it, is not there")
    nodes = [Node("Cast", ["x"], ["y"], {"to": FLOAT}), Node("LeakyRelu", ["y"], ["z"], {"alpha": 0.25})]
    written = small_graph(nodes, [Value("x", BFLOAT16, ("N", "P"))], [Value("z", FLOAT, ("N", "P"))])
    onnx.checker.check_model(onnx.load_from_string(written), full_check=True)
    check_graph(written)


class TestPlacing:
    """When vectors go to a device; the device is the CPU here."""

    vectors = normal(600, 16)

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(placing, "LEAST", 1)

    def placed(self, place: Any = lambda vectors: OnDevice(vectors, "cpu")) -> Placing:
        made = Placing(self.vectors, place)
        while made.thread is None:
            assert made.nearest(self.vectors[:10], 3) is None
        made.thread.join(60)
        return made

    def test_after_some_searches_and_from_many_threads(self) -> None:
        made = self.placed()
        wanted, wrong = brute(self.vectors[:80], self.vectors, 4)[1], []
        keep = np.arange(600) % 2 == 0

        def ask(first: int) -> None:
            for at in range(first, first + 20):
                found = made.nearest(self.vectors[at : at + 1], 4)
                kept = made.nearest(self.vectors[at : at + 1], 1, keep)
                if found is None or kept is None or (found[1] != wanted[at]).any() or not keep[kept[1]].all():
                    wrong.append(at)

        threads = [threading.Thread(target=ask, args=(20 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong

    def test_a_device_that_fails_later_leaves_it_to_the_cpu_and_says_so_once(
        self, monkeypatch: Any, caplog: Any
    ) -> None:
        made = self.placed()

        def full(*_: Any) -> Any:
            raise BundleError("ONNX Runtime cannot run it: Failed to allocate memory for requested buffer.")

        monkeypatch.setattr(OnDevice, "_smallest", full)
        for _ in range(3):
            assert made.nearest(self.vectors[:1], 1) is None
            assert made.nearest(self.vectors[:1], 1, np.ones(600, bool)) is None
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1 and "too little memory for 600 vectors of 16 numbers" in said[0]

    def test_one_that_cannot_take_them_is_not_asked_again(self) -> None:
        made = self.placed(lambda vectors: None)
        thread = made.thread
        for _ in range(50):
            assert made.nearest(self.vectors[:10], 1) is None
        assert made.thread is thread

    @pytest.mark.parametrize(
        ("free", "said"),
        [
            (1 << 20, "need .* GB there, and of 0.0 GB that are free no more than 50% are taken"),
            (1 << 40, "ONNX Runtime does not start there"),
        ],
    )
    def test_too_little_memory_or_no_device_is_a_sentence(
        self, monkeypatch: Any, caplog: Any, free: int, said: str
    ) -> None:
        monkeypatch.setattr(placing, "free_memory", lambda: free)
        if placing.offered():
            pytest.skip("there is a GPU: tests/gpu has the rest")
        monkeypatch.setattr(placing, "load_libraries", lambda runtime: "")
        with caplog.at_level(logging.WARNING):
            assert placing.placed(self.vectors) is None
        (record,) = caplog.records
        assert record.getMessage().startswith("Exact search stays on the CPU")
        assert re.search(said, record.getMessage())

    def test_where_the_driver_says_nothing_nothing_is_said(self, monkeypatch: Any, caplog: Any) -> None:
        monkeypatch.setattr(placing, "free_memory", lambda: None)
        assert placing.placed(self.vectors) is None and not caplog.records

    def test_what_is_free_is_read_of_the_first_visible_device(self, monkeypatch: Any) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(placing, "nvidia_smi", lambda *given: asked.append(given) or "512\n")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
        assert placing.free_memory() == 512 << 20 and asked[0][-2:] == ("-i", "3")
        monkeypatch.setattr(placing, "nvidia_smi", lambda *given: "")
        assert placing.free_memory() is None

    def test_a_runtime_without_cuda_is_asked_once(self, monkeypatch: Any) -> None:
        monkeypatch.setattr(placing, "offered", lambda: False)
        made = Placing(self.vectors)
        for _ in range(10):
            assert made.nearest(self.vectors[:30], 1) is None
        assert made.thread is None and not made._wanted


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    vectors = normal(300, 16)
    head = write_segment(tmp_path / "s", np.arange(300) + 5, {"vector": [vectors]})
    return Segment(tmp_path / "s", head)


def test_a_segment_is_searched_where_its_vectors_lie(segment: Segment) -> None:
    from retrieval.serving.local.piece import Piece, search_piece

    vectors = segment.arrays["vector"]
    piece, asked = Piece(1, segment, None, None), []
    plain = search_piece(piece, 0, vectors[:4], (0, 16), 3, None, filtered=False)
    on = OnDevice(vectors, "cpu")
    segment.placing = SimpleNamespace(nearest=lambda *given: asked.append(1) or on.nearest(*given))  # type: ignore[assignment]
    found = search_piece(piece, 0, vectors[:4], (0, 16), 3, None, filtered=False)
    assert asked and np.array_equal(found[0], plain[0]) and np.array_equal(found[1], plain[1])
    search_piece(piece, 0, vectors[:4], (0, 8), 3, None, filtered=False)  # a sub-space: the CPU's
    assert len(asked) == 1


def test_what_it_takes() -> None:
    assert bytes_on_device(10**7, 128) == 10**7 * 260 + 4 * 2**25 + 12 * 2**26
