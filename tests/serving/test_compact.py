"""The compact companion never tells more than the distance, so that searches by it are exact; its file is held to its vectors."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval.errors import StoreError
from retrieval.serving.local import compact, exact


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have companions of few vectors read."""
    monkeypatch.setattr(exact, "_COMPACT_LEAST", 0)


def flat(count: int, width: int = 24, seed: int = 0) -> Any:
    """Vectors that lie near 5 directions, as those of images lie near few."""
    rng = np.random.default_rng(seed)
    few = rng.standard_normal((count, 5)) @ np.random.default_rng(9).standard_normal((5, width))
    return (few + 0.05 * rng.standard_normal((count, width))).astype(np.float32)


def built(vectors: Any) -> compact.Compact:
    made = compact.build(vectors)
    assert made is not None
    return made


def same(queries: Any, vectors: Any, k: int, companion: compact.Compact, **options: Any) -> None:
    """Hold a search by the companion to one without."""
    for one, other in zip(
        exact.nearest(queries, vectors, k, compact=companion, **options),
        exact.nearest(queries, vectors, k, **options),
        strict=True,
    ):
        assert np.array_equal(one, other)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda x: x,
    "far from zero": lambda x: x + np.float32(1e4),
    "large": lambda x: x * np.float32(1e12),
    "small": lambda x: x * np.float32(1e-20),
    "near-duplicates": lambda x: x[:1] + x * np.float32(1e-5),
    "duplicates": lambda x: np.repeat(x[:100], 30, axis=0),
    "single rows far away": lambda x: x * np.where(np.arange(len(x)) % 501 == 100, np.float32(1e6), np.float32(1))[:, None],
    "another kind of rows, that the sample does not show": lambda x: np.concatenate(
        [x[:2000], np.random.default_rng(3).standard_normal((1000, x.shape[1])).astype(np.float32)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_searches_are_exact(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.ascontiguousarray(CHANGES[change](flat(3000)))
    monkeypatch.setattr(compact, "_WORTHWHILE", 0.0)
    companion = built(vectors)
    for pairs in (1024, 1 << 20):
        monkeypatch.setattr(exact, "_BLOCK_PAIRS", pairs)
        for count in (1, 20):
            queries = vectors[7 : 7 + 90 * count : 90] + np.float32(1e-3)
            same(queries, vectors, 10, companion)
            same(queries, vectors, 10, companion, keep=np.arange(3000) % 5 == 0, threads=2)
            same(queries, vectors, 4000, companion)


def test_no_vector_is_nearer_than_its_companion() -> None:
    vectors, queries = flat(2000), flat(50, seed=1) * np.float32(1.5)
    companion = built(vectors)
    near, lost = companion.project(queries)
    apart = queries[:, None].astype(np.float64) - vectors
    told = near[:, None].astype(np.float64) - companion.table
    gap = np.sqrt(np.square(apart).sum(2)) - np.sqrt(np.square(told).sum(2))
    assert (gap >= -(lost[:, None] + companion.error)).all()
    assert gap.mean() < 0.1 * np.sqrt(np.square(apart).sum(2)).mean() and companion.error < 1e-4
    assert 2 * companion.table.nbytes <= vectors.nbytes


def test_it_leaves_the_companion_where_that_tells_little(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.random.default_rng(0).standard_normal((5000, 24)).astype(np.float32)
    assert compact.build(vectors) is None
    monkeypatch.setattr(compact, "_WORTHWHILE", 0.0)
    companion, read = built(vectors), []
    scan = exact._Search._scan

    def scanned(self: Any, which: Any) -> None:
        read.append(which)
        scan(self, which)

    monkeypatch.setattr(exact._Search, "_scan", scanned)
    same(vectors[:9] + np.float32(0.5), vectors, 10, companion)
    assert read == [companion, None, None]


def test_it_is_left_alone_where_the_vectors_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, read = flat(3000), []
    companion, project = built(vectors), compact.Compact.project
    monkeypatch.setattr(compact.Compact, "project", lambda *given: (read.append(1), project(*given))[1])
    for least, count in ((vectors.size, 1), (vectors.size, 9), (vectors.size + 1, 1), (vectors.size + 1, 9)):
        monkeypatch.setattr(exact, "_COMPACT_LEAST", least)
        read.clear()
        same(vectors[:count] + np.float32(1e-3), vectors, 10, companion)
        assert bool(read) == (least == vectors.size)


@pytest.mark.parametrize("vectors", [np.zeros((400, 8), np.float32), flat(20), flat(400) * np.float32(1e30)])
def test_there_is_none_of_what_has_no_directions(vectors: Any) -> None:
    assert compact.build(vectors) is None


def test_queries_beyond_float32s_squares() -> None:
    vectors = flat(600)
    for count in (1, 9):
        same(np.full((count, 24), 3e38, np.float32) * np.sign(vectors[:count]), vectors, 5, built(vectors))


def test_another_matrix_is_refused() -> None:
    vectors = flat(500)
    companion = built(vectors)
    with pytest.raises(ValueError, match="companion of 500 × 24 is not of"):
        exact.nearest(vectors[:1], vectors[:400], 1, compact=companion)
    with pytest.raises(ValueError, match="within a span"):
        exact.nearest(vectors[:1], vectors, 1, compact=companion, span=(0, 5))


def test_its_file(tmp_path: Path) -> None:
    vectors = flat(700)
    companion = built(vectors)
    companion.save(tmp_path / "one")
    found = compact.Compact.load(tmp_path / "one", 700, 24)
    assert found.error == companion.error and not found.table.flags.writeable
    for name in ("mean", "basis", "table"):
        assert np.array_equal(getattr(found, name), getattr(companion, name))
    same(vectors[:9] + np.float32(0.01), vectors, 5, found)
    with pytest.raises(FileExistsError):
        companion.save(tmp_path / "one")


def written(*arrays: Any) -> bytes:
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array, allow_pickle=True)
    return file.getvalue()


MEAN, BASIS, ERROR, TABLE = np.zeros(4), np.eye(4)[:, :1], np.zeros(1), np.zeros((9, 2), np.float32)
HUGE = written(MEAN).replace(b"(4,), }" + b" " * 9, b"(1234567890,), }")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nothing of the kind",
        written(MEAN)[:100],
        HUGE,
        written(MEAN, BASIS, ERROR, TABLE)[:-1],
        written(MEAN, BASIS, ERROR, TABLE) + b"\0",
        written(MEAN, BASIS, ERROR, TABLE[:8]),
        written(MEAN, BASIS, ERROR, TABLE[:, :1]),
        written(MEAN, BASIS, ERROR, TABLE.astype(np.float64)),
        written(MEAN, BASIS, ERROR, np.asfortranarray(TABLE)),
        written(MEAN, BASIS, -1 - ERROR, TABLE),
        written(MEAN, BASIS * np.nan, ERROR, TABLE),
        written(np.array([{}] * 4), BASIS, ERROR, TABLE),
        written(MEAN[:3], BASIS, ERROR, TABLE),
        written(MEAN, np.zeros((4, 9)), ERROR, TABLE),
    ],
    ids=range(15),
)
def test_a_file_that_is_no_companion_of_these_vectors_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "sound").write_bytes(written(MEAN, BASIS, ERROR, TABLE))
    compact.Compact.load(tmp_path / "sound", 9, 4)
    (tmp_path / "one").write_bytes(content)
    with pytest.raises(StoreError):
        compact.Compact.load(tmp_path / "one", 9, 4)
