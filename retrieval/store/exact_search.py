"""Exact nearest neighbours among the rows of a float32 matrix, in memory or mapped from a file.

A float32 matrix product compares every row with every query, block by block. A bound of its
rounding error rules out rows that cannot be among the nearest. The distances of the other rows,
those in doubt, are measured in float64. The result therefore equals that of a float64 search, for
any offset, scale or number of duplicates of the vectors.

**The bound.** Let u = 2⁻²⁴ and γ = nu / (1 − nu), with n a little above the width P. A sum of P
products has an error of at most γ Σ |terms|, in any order of summation (N. Higham, Accuracy and
Stability of Numerical Algorithms, 2002, §3.1). Let a row x lie within r of the query q:

- Σ (q − x)² in float32 is at most r² (1 + γ).
- |q|² + |x|² − 2 q·x in float32 is at most r² + γ (|q| + |x|)². Since |x| ≤ |q| + r, that is at
  most r² + γ (2 |q| + r)².

Let r be the distance of the k-th nearest row so far. A row whose value exceeds that limit is
farther than r and is ruled out. The second formula (products) serves several queries at once. If it
leaves too many rows in doubt, as for vectors with a common offset or of very different lengths, the
search falls back to the first (sums), one query at a time.

**The companion.** Embeddings often vary in few directions. Let V (P, D − 1) have the principal
components of the vectors as orthonormal columns, and let m be their mean. The companion stores
z(x) = (Vᵀ (x − m), s) for each row, where s is the length of the part of x − m outside the span of
V. Then |z(q) − z(x)| ≤ |q − x|, so sums over this narrow table rule out most rows in the same way.
Sums over the vectors themselves then rule out nearly all others. The table is stored in parts of 8
columns, because FAISS's kernel for width 8 is several times as fast per number as those for others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from retrieval.base.arrays import Bools, Floats32, Floats64, Ints
from retrieval.base.memory_map import FileMap
from retrieval.base.runtime import load_faiss
from retrieval.errors import DataError, StoreError

if TYPE_CHECKING:
    from retrieval.store.items import Generation

NearestRows = tuple[Floats64, Ints]

# FAISS returns this many rows and k / 16 more than k; beyond the last of them, the bound rules out
# all others.
_MARGIN = 8
_QUERIES = 256  # maximum number of queries in a group
_FEW = 4
"""Up to this many queries are searched one by one without a companion; more are faster as a group.
"""
_NARROW = 6
"""A companion serves more than `_FEW` queries if its table is this many times narrower than the
vectors: matrix products over all columns take about a sixth of the time of sums per number."""
# Queries × k in a group are limited, which bounds the group's memory.
_ANSWERS = 1 << 21
_BLOCK_PAIRS = 1 << 21  # pairs of a query and a row in a block: 8 MB of float32 values
# A block of a companion's table has 2 MB, and 256 KB of sums per query, which a core's cache holds.
_TABLE_ROWS = 1 << 16
_GROUP = 64  # maximum number of rows that one comparison rules out
# A companion proposes this many times k rows; their distances give the first r.
_CANDIDATES = 4
_BLOCK_NUMBERS = 1 << 20  # numbers in a block whose rows or columns are copied: 4 MB
_PART_NUMBERS = 1 << 17
"""Numbers of the vectors in one matrix product: 512 KB, which fits into a core's cache."""
_PAIR_NUMBERS = 1 << 16
"""Numbers of the vectors that are measured in float64 at a time: 512 KB."""
_PAIRS = 1 << 19
"""Pairs in doubt that are measured and merged at a time, which bounds memory."""
_SPARSE_ONE = 0.13
_SPARSE = 0.7
"""The rows to search are copied together if their share is at most min(0.7, 0.13 √queries)."""
# If a larger share of the pairs is in doubt, sums over the vectors are faster.
_DOUBT = 1 / 16
# This many times k × queries pairs in doubt are always allowed.
_MIN_DOUBT = 64
# Squares above this may overflow float32, so that no bound holds.
_LARGEST = 2.0**120
# This bounds the error of one product by underflow.
_TINY = 2.0**-100


def nearest(
    queries: Floats32,
    vectors: Floats32,
    k: int,
    *,
    keep: Bools | None = None,
    span: tuple[int, int] | None = None,
    companion: Companion | None = None,
    threads: int = 1,
) -> tuple[Floats64, Ints]:
    """Return the exact k nearest rows of each query by Euclidean distance.

    Equal distances are ordered by row. The function is thread-safe. It needs memory for a few
    blocks of rows and the result (Q, k), and does not copy the matrix.

    Args:
        queries: (Q, P), finite.
        vectors: (N, P), finite and C-contiguous; may be a read-only memory map.
        k: number of rows per query, at least 1.
        keep: boolean mask (N,) of the rows to search; `None` searches all.
        span: half-open column range to compare; `None` compares all columns.
        companion: companion of `vectors` from `Companion.build`; not allowed with `span`.
        threads: number of threads that share the work.

    Returns:
        Squared distances (Q, k) and rows (Q, k), nearest first, padded with infinity and −1 if
        fewer than k rows are searched.

    Raises:
        ValueError: the arguments do not fit each other.
    """
    if vectors.ndim != 2 or vectors.dtype != np.float32 or not vectors.flags.c_contiguous:
        raise ValueError(
            f"Vectors must be C-contiguous float32 (N, P), not {vectors.dtype} {vectors.shape}."
        )
    count, width = vectors.shape
    fits = queries.ndim == 2 and queries.shape[1] == width and k >= 1
    fits = fits and (keep is None or (keep.shape == (count,) and keep.dtype == np.bool_))
    fits = fits and (companion is None or (companion.shape == (count, width) and span is None))
    if not fits:
        raise ValueError(f"Arguments do not fit vectors {vectors.shape}: see `nearest`.")
    if span is None:
        columns = slice(0, width)
    else:
        columns = slice(*span)
    parts = np.ascontiguousarray(queries[:, columns], np.float32)
    # Slicing an array is faster than a memmap.
    rows = np.asarray(vectors)
    is_many = len(parts) > _FEW
    if companion is not None and is_many and companion.basis.shape[1] * _NARROW >= width:
        companion = None
    task = _Task(rows, columns, k, keep, threads)
    if companion is None and not is_many:
        step = 1
    else:
        step = max(1, min(_QUERIES, _ANSWERS // k))
    if not len(vectors) or not len(parts):
        return _no_rows(len(parts), k)
    starts = range(0, len(parts), step)
    answers = [_search(task, parts[start : start + step], companion) for start in starts]
    if len(answers) == 1:
        return answers[0]
    squared, numbers = zip(*answers, strict=True)
    return np.concatenate(squared), np.concatenate(numbers)


def check_queries(queries: Floats32, generation: Generation) -> None:
    """Raise a `DataError` unless queries (Q, P) are finite and P is the generation's width."""
    width = generation.widths["vector"]
    if queries.ndim != 2 or queries.shape[1] != width:
        raise DataError(
            f"The queries have the shape {queries.shape}; this index needs one row of {width}"
            " numbers per query."
        )
    if not np.isfinite(queries).all():
        raise DataError("A query vector holds NaN, infinity or a number beyond float32.")


@dataclass(frozen=True)
class Companion:
    """A narrow table that rules out rows in place of the vectors; see the module's docstring.

    Attributes:
        mean: (P,) float64.
        basis: (P, D − 1) float64, with orthonormal columns.
        error: largest distance by which rounding can have moved a row of `table`.
        table: (D / 8, N, 8) float32, the columns in parts of 8.
        mapped: the file that `table` lies in, or None.
    """

    mean: Floats64
    basis: Floats64
    error: float
    table: Floats32
    mapped: FileMap | None = None

    PART = 8
    """Number of columns in a part."""
    ENERGY = 0.8
    """Share of the variance that the basis explains; if that needs D > P / 2, none is built."""
    SAMPLE_ROWS = 16_384
    """Largest number of rows from which the principal components are computed."""

    @classmethod
    def build(cls, vectors: Floats32) -> Companion | None:
        """Return the companion of vectors (N, P), or `None` if it would not be narrow enough."""
        count, width = vectors.shape
        sample = vectors[:: max(1, -(-count // cls.SAMPLE_ROWS))].astype(np.float64)
        if len(sample) < 2 * width or not np.isfinite(np.square(sample).sum()):
            return None
        mean = sample.mean(0)
        energy, basis = np.linalg.eigh(np.cov(sample.T))
        shares = np.cumsum(energy[::-1]) / max(energy.sum(), np.finfo(float).tiny)
        parts = -(-(int(np.searchsorted(shares, cls.ENERGY)) + 2) // cls.PART)
        if 2 * parts * cls.PART > width:
            return None
        companion = cls(
            mean,
            np.ascontiguousarray(basis[:, ::-1][:, : parts * cls.PART - 1]),
            0.0,
            np.empty((parts, count, cls.PART), np.float32),
        )
        step = max(1, _BLOCK_NUMBERS // width)
        error = 0.0
        for start in range(0, count, step):
            rows = slice(start, start + step)
            block, errors = companion.project(vectors[rows])
            error = max(error, float(errors.max()))
            # Squares of coordinates may overflow float32.
            if not error < 2.0**30:
                return None
            companion.table[:, rows] = block
        return replace(companion, error=error)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (N, P) of the vectors."""
        return self.table.shape[1], len(self.mean)

    def project(self, vectors: Floats32) -> tuple[Floats32, Floats64]:
        """Return z (D / 8, M, 8) of vectors (M, P) and bounds (M,) of their rounding errors.

        The last coordinate s is the root of |x − m|² − |Vᵀ (x − m)|². The P + 8 float64 roundings
        change that difference by at most (P + 8) 2⁻⁵⁰ |x − m|², and s by at most the root of this
        bound. Each coordinate is then rounded to float32.
        """
        centred = vectors - self.mean
        along = centred @ self.basis
        whole = np.einsum("ij,ij->i", centred, centred)
        rest = np.sqrt(np.maximum(whole - np.einsum("ij,ij->i", along, along), 0))
        relative = 2.0**-23 + math.sqrt((len(self.mean) + 8) * 2.0**-50)
        errors = relative * np.sqrt(whole) + 2.0**-120
        table = np.column_stack([along, rest]).reshape(len(vectors), -1, self.PART)
        # A huge query has no bound and is searched in full.
        with np.errstate(over="ignore"):
            return table.swapaxes(0, 1).astype(np.float32, order="C"), errors

    def save(self, path: Path) -> None:
        """Write the arrays to a new file in NumPy's format, the table last."""
        with path.open("xb") as file:
            for array in (self.mean, self.basis, np.array([self.error]), self.table):
                np.save(file, array, allow_pickle=False)

    @classmethod
    def load(cls, path: Path, count: int, width: int) -> Companion:
        """Map a companion of vectors (count, width); the caller verifies the file's checksum.

        Raises:
            StoreError: the companion belongs to other vectors.
            OSError: the file cannot be read.
        """
        with path.open("rb") as file:
            mean, basis, error = (np.load(file, allow_pickle=False) for _ in range(3))
            np.lib.format.read_magic(file)
            shape, _, kind = np.lib.format.read_array_header_1_0(file)
            offset = file.tell()
            mapped = FileMap(file)
        if shape[1:] != (count, cls.PART) or kind != np.float32 or len(mean) != width:
            raise StoreError(f"{path.name} belongs to other vectors.")
        return cls(mean, basis, float(error[0]), mapped.floats(shape, offset), mapped)

    def intact(self) -> bool:
        """Return whether the file has kept its content since it was mapped."""
        return self.mapped is None or self.mapped.intact()


@dataclass(slots=True)
class _Task:
    """Arguments of `nearest` that all groups of queries share."""

    vectors: Floats32
    columns: slice
    k: int
    keep: Bools | None
    threads: int


def _search(task: _Task, queries: Floats32, companion: Companion | None) -> NearestRows:
    """Return squared distances and rows (Q, k) of a group of queries."""
    many = len(queries) > 1
    whole = task.columns == slice(0, task.vectors.shape[1])
    if companion is not None and (answer := _by_companion(task, queries, companion)):
        return answer
    proposal = None
    # FAISS compares a mask row by row, without matrix products.
    if whole and task.threads == 1 and (task.keep is None or not many):
        proposal = _nearest_by_faiss(queries, task.vectors, task.k, task.keep)
    if proposal is None:
        squared, rows = _no_rows(len(queries), task.k)
        rest = np.arange(len(queries))
    else:
        squared, rows, decided = proposal
        if all(decided):
            return squared, rows
        rest = np.flatnonzero(~np.array(decided))
    # One by one, 256 queries among 60,000 vectors of 128 numbers are 8.7 times as dear.
    if len(rest) > 1 and (answer := _Scan(task, queries[rest], products=True).run()):
        squared[rest], rows[rest] = answer
        return squared, rows
    for number in rest.tolist():
        query = slice(number, number + 1)
        answer = _Scan(task, queries[query], products=False).run()
        assert answer is not None
        squared[query], rows[query] = answer
    return squared, rows


def _blocks(
    keep: Bools | None, count: int, start: int, stop: int, max_rows: int, max_copied: int
) -> Iterator[tuple[slice | Ints, Bools | None]]:
    """Yield blocks of row numbers with their part of the mask, or `None` to search all of them.

    If the mask keeps few rows, the blocks hold only those rows.

    Args:
        keep: boolean mask (N,) of the rows to search, or `None`.
        count: number of queries.
        start: first row.
        stop: row after the last.
        max_rows: maximum number of rows in a block.
        max_copied: maximum number of rows in a block of kept rows only, which are copied.
    """
    chosen: Ints | None = None
    if keep is not None:
        # If a mask keeps a fifth of 60,000 rows, comparing all rows with 256 queries is 3.7 times
        # as dear, and 27 times if it keeps a hundredth.
        kept_count = int(np.count_nonzero(keep[start:stop]))
        if kept_count <= min(_SPARSE, count**0.5 * _SPARSE_ONE) * (stop - start):
            chosen = np.flatnonzero(keep[start:stop]) + start
            start = 0
            stop = len(chosen)
            max_rows = max_copied
            keep = None
    while start < stop:
        end = min(start + max_rows, stop)
        rows: slice | Ints = slice(start, end) if chosen is None else chosen[start:end]
        yield rows, None if keep is None else keep[start:end]
        start = end


def _by_companion(task: _Task, queries: Floats32, companion: Companion) -> NearestRows | None:
    """Return squared distances and rows (Q, k), or `None` if too many rows remain in doubt.

    All queries are compared with one block of the table before the next block, so that the block
    and the sums of one query stay in a core's cache.
    """
    exact = queries.astype(np.float64)
    count = len(queries)
    k = task.k
    projected, errors = companion.project(queries)
    best = _no_rows(count, k)
    reach = [math.inf] * count  # squared distances within which k rows lie
    compared = 0
    doubtful = 0
    width = projected.size // count
    with faiss_threads(1):
        for rows, kept_rows in _blocks(
            task.keep, count, 0, len(task.vectors), _TABLE_ROWS, _TABLE_ROWS
        ):
            # `take` gives each part contiguous rows; indexing does not.
            table = companion.table
            if isinstance(rows, slice):
                block = table[:, rows]
            else:
                block = table.take(rows, axis=1)
            if kept_rows is None:
                penalty = None
            else:
                penalty = np.where(kept_rows, np.float32(0), np.float32(np.inf))
            numbers = []
            for query_number, query in enumerate(queries):
                sums = _sums(projected[:, query_number], block)
                if penalty is not None:
                    sums += penalty
                if reach[query_number] == math.inf:
                    reach[query_number] = _first_reach(query, task.vectors, rows, sums, k)
                limit = _limit(
                    reach[query_number], width, float(errors[query_number]) + companion.error
                )
                row = (sums <= limit).nonzero()[0]
                compared = compared + len(sums)
                doubtful = doubtful + len(row)
                if doubtful > compared * _DOUBT + _MIN_DOUBT * k * count:
                    return None
                if kept_rows is not None:
                    row = row[kept_rows[row]]
                if isinstance(rows, slice):
                    number = row + rows.start
                else:
                    number = rows[row]
                limit = _limit(reach[query_number], queries.shape[1])
                # "not above" also keeps NaN, the result of an overflow
                numbers.append(number[~(_sums_of(query, task.vectors, number) > limit)])
            number = np.concatenate(numbers)
            pair = np.arange(count).repeat([len(part) for part in numbers])
            best = _entered(
                best, pair, number, squared_distances(exact, task.vectors, pair, number)
            )
            reach = best[0][:, -1].tolist()
    return best


def _sums(query: Floats32, block: Floats32) -> Floats32:
    """Return Σ (q − x)² (N,) in float32 of a query (B, W) and the N rows of a block (B, N, W)."""
    faiss = load_faiss()
    size, width = block.shape[1:]
    sums: Floats32 = np.empty((len(block), size), np.float32)
    for out, *pair in zip(sums, query, block, strict=True):
        faiss.fvec_L2sqr_ny(*map(faiss.swig_ptr, (out, *pair)), width, size)
    for part in sums[1:]:
        sums[0] += part
    first: Floats32 = sums[0]
    return first


def _sums_of(query: Floats32, vectors: Floats32, rows: Ints) -> Floats32:
    """Return Σ (q − x)² (n,) in float32 of a query (P,) and some rows of vectors (N, P)."""
    faiss = load_faiss()
    sums = np.empty(len(rows), np.float32)
    pointers = map(faiss.swig_ptr, (sums, query, vectors, rows))
    faiss.fvec_L2sqr_by_idx(*pointers, vectors.shape[1], 1, len(rows))
    return sums


def _first_reach(
    query: Floats32, vectors: Floats32, rows: slice | Ints, sums: Floats32, k: int
) -> float:
    """Return a squared distance within which k rows lie, or infinity if too few rows are searched.

    Args:
        query: (P,).
        vectors: (N, P).
        rows: rows of a block.
        sums: squared distances of these rows in the companion.
        k: number of rows per query.
    """
    members = max(1, min(_GROUP, len(sums) // (4 * _CANDIDATES * k)))
    groups = len(sums) // members
    candidates = min(_CANDIDATES * k, groups)
    if candidates < k:
        return math.inf
    table = sums[: members * groups].reshape(members, groups)
    least = table.min(axis=0)
    group = least.argpartition(candidates - 1)[:candidates]
    # An infinite sum belongs to a masked row.
    if least[group].max() == np.inf:
        return math.inf
    row = table.take(group, axis=1).argmin(axis=0) * groups + group
    if isinstance(rows, slice):
        number = row + rows.start
    else:
        number = rows[row]
    reach = float(np.partition(_sums_of(query, vectors, number), k - 1)[k - 1])
    reach = reach * (1 + 2 * _gamma(len(query))) + len(query) * _TINY
    if reach < _LARGEST:
        return reach
    return math.inf


def _limit(squared: float, width: int, slack: float = 0.0, length: float = 0.0) -> float:
    """Return an upper bound of the float32 value of any row within a squared distance.

    Args:
        squared: the squared distance.
        width: number of products in a sum.
        slack: distance by which rounding in the companion can have moved query and row.
        length: length of the query if values are computed by products; 0 for sums.
    """
    radius = (math.sqrt(squared) * (1 + 2.0**-40) + slack) * (1 + 2.0**-40)
    size = (2 * length + radius) * (2 * length + radius)
    if not size < _LARGEST:
        return math.inf
    # The last factor leaves room for the rounding of this very product.
    return (radius * radius + size * _gamma(width) + width * _TINY) * (1 + 2.0**-22)


class _Scan:
    """A pass over the rows of the vectors for a group of queries.

    Args:
        task: the search.
        queries: (Q, columns).
        products: whether to compare by products rather than by sums; see the module's docstring.
    """

    def __init__(self, task: _Task, queries: Floats32, *, products: bool) -> None:
        self.task = task
        self.queries = queries
        self.products = products
        self.exact = queries.astype(np.float64)
        self.whole = task.columns == slice(0, task.vectors.shape[1])
        self.gamma = _gamma(queries.shape[1])
        self.tiny = queries.shape[1] * _TINY
        self.lengths = np.linalg.norm(self.exact, axis=1)

    def run(self) -> NearestRows | None:
        """Return squared distances and rows (Q, k), or `None` if sums should be used instead."""
        total = len(self.task.vectors)
        threads = self.task.threads
        step = -(-total // threads)
        ranges = [(start, min(start + step, total)) for start in range(0, total, step)]
        if len(ranges) == 1:
            return self._range(*ranges[0])
        with ThreadPoolExecutor(len(ranges), thread_name_prefix="search") as pool:
            answers = list(pool.map(lambda pointer: self._range(*pointer), ranges))
        best = _no_rows(len(self.queries), self.task.k)
        for answer in answers:
            if answer is None:
                return None
            query, rank = np.nonzero(answer[1] >= 0)
            best = _entered(best, query, answer[1][query, rank], answer[0][query, rank])
        return best

    def _range(self, start: int, stop: int) -> NearestRows | None:
        """Return the result of `run` for a range of rows."""
        count = len(self.queries)
        k = self.task.k
        best = _no_rows(count, k)
        reach: Floats64 | None = None  # squared distances within which k rows lie
        compared = doubtful = 0
        max_rows = max(1, _BLOCK_PAIRS // count)
        max_copied = min(max_rows, max(1, _BLOCK_NUMBERS // self.task.vectors.shape[1]))
        max_rows = max_rows if self.whole else max_copied
        for rows, kept_rows in _blocks(self.task.keep, count, start, stop, max_rows, max_copied):
            block = self.task.vectors[rows]
            if not self.whole:
                block = np.ascontiguousarray(block[:, self.task.columns])
            values = self._values(block, kept_rows)
            least = values.min(axis=1)
            if reach is None:
                reach = self._first_reach(rows, values, least)
            limits = self._limits(reach)
            # "not above" also keeps NaN, the result of an overflow
            query, column = np.nonzero(~(least > limits[:, None]))
            compared += len(block) * count
            step = max(1, _PAIRS // values.shape[1])
            # Bounds memory if many rows are equal.
            for first in range(0, len(query), step):
                queries = query[first : first + step]
                group = column[first : first + step]
                inside = values[queries, :, group]
                pair, member = np.nonzero(~(inside > limits[queries, None]))
                row = member * least.shape[1] + group[pair]
                searched = row < len(block)
                if kept_rows is not None:
                    searched[searched] = kept_rows[row[searched]]
                pair = pair[searched]
                row = row[searched]
                if self.products:
                    doubtful += len(row)
                    if doubtful > compared * _DOUBT + _MIN_DOUBT * k * count:
                        return None
                queries = queries[pair]
                if isinstance(rows, slice):
                    number = row + rows.start
                else:
                    number = rows[row]
                squared = self._measured(queries, number)
                closer = squared <= reach[queries]
                best = _entered(best, queries[closer], number[closer], squared[closer])
                reach = np.minimum(reach, best[0][:, -1])
        return best

    def _first_reach(self, rows: slice | Ints, values: Floats32, least: Floats32) -> Floats64:
        """Return squared distances (Q,) within which k rows of a block lie, or infinity."""
        k = self.task.k
        count, groups = least.shape
        if groups < k:
            return np.full(count, np.inf)
        group = least.argpartition(k - 1, axis=1)[:, :k].ravel()
        query = np.repeat(np.arange(count), k)
        row = values[query, :, group].argmin(axis=1) * groups + group
        # Masked rows and padding have infinite values.
        outside = ~np.isfinite(least[query, group])
        row[outside] = 0
        squared = self._measured(query, row + rows.start if isinstance(rows, slice) else rows[row])
        squared[outside] = np.inf
        reach: Floats64 = squared.reshape(count, k).max(1)
        return reach

    def _measured(self, query: Ints, row: Ints) -> Floats64:
        """Return squared distances (n,) in float64 between pairs of a query and a row."""
        return squared_distances(self.exact, self.task.vectors, query, row, self.task.columns)

    def _values(self, block: Floats32, kept_rows: Bools | None) -> Floats32:
        """Return squared distances (Q, G, C) in float32; masked rows and padding get infinity.

        Row i of the block is in column i modulo C. A column has G rows. If its minimum exceeds the
        limit, all of them are ruled out.
        """
        faiss = load_faiss()
        size, width = block.shape
        members = max(1, min(_GROUP, size // (4 * self.task.k)))
        groups = -(-size // members)
        count = len(self.queries)
        values = np.empty((count, members * groups), np.float32)
        pointer = faiss.swig_ptr(self.queries)
        if not self.products:
            faiss.fvec_L2sqr_ny(faiss.swig_ptr(values), pointer, faiss.swig_ptr(block), width, size)
        else:
            step = max(1, _PART_NUMBERS // width)
            with faiss_threads(1):
                for start in range(0, size, step):
                    part = block[start : start + step]
                    table, out = map(faiss.swig_ptr, (part, values[0, start:]))
                    stride = members * groups
                    faiss.pairwise_L2sqr(
                        width, count, pointer, len(part), table, out, -1, -1, stride
                    )
        values[:, size:] = np.inf
        if kept_rows is not None:
            values[:, :size] += np.where(kept_rows, np.float32(0), np.float32(np.inf))
        return values.reshape(count, members, groups)

    def _limits(self, squared: Floats64) -> Floats32:
        """Return upper bounds (Q,) of the float32 values of rows within squared distances (Q,)."""
        reach = np.sqrt(squared) * (1 + 2.0**-40)
        if self.products:
            size = np.square(2 * self.lengths + reach)
        else:
            size = reach * reach
        limits = reach * reach + self.gamma * size + self.tiny
        limits[~(size < _LARGEST)] = np.inf
        above: Floats32 = np.nextafter(limits.astype(np.float32), np.float32(np.inf))
        return above


@contextmanager
def faiss_threads(count: int) -> Iterator[None]:
    """Context manager that limits FAISS to `count` threads; searches use only the calling one.

    On busy cores, waiting for OpenMP threads can make a call take a hundred times as long, and a
    process that has started OpenMP threads cannot fork.
    """
    faiss = load_faiss()
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _no_rows(count: int, k: int) -> NearestRows:
    """Return the squared distances and rows (count, k) of queries without any rows."""
    return np.full((count, k), np.inf), np.full((count, k), -1, np.int64)


def _entered(best: NearestRows, query: Ints, row: Ints, squared: Floats64) -> NearestRows:
    """Merge pairs of query and row (n,) into `best` (Q, k); equal distances are ordered by row."""
    count, k = best[0].shape
    query = np.concatenate([np.repeat(np.arange(count), k), query])
    row = np.concatenate([best[1].ravel(), row])
    squared = np.concatenate([best[0].ravel(), squared])
    order = np.lexsort((row, squared, query))
    counts = np.bincount(query, minlength=count)
    positions = np.repeat(np.cumsum(counts) - counts, k).reshape(count, k) + np.arange(k)
    order = order[positions]
    return squared[order], row[order]


def _nearest_by_faiss(
    queries: Floats32, vectors: Floats32, k: int, keep: Bools | None
) -> tuple[Floats64, Ints, list[bool]] | None:
    """Return squared distances and rows (Q, k) from FAISS's own search for more than k rows.

    FAISS returns the nearest rows by float32 distance. A query is decided if the bound of the
    module's docstring rules out all rows that FAISS has not returned.

    Args:
        queries: (Q, P).
        vectors: (N, P).
        k: number of rows per query.
        keep: boolean mask (N,) of the rows to search, for a single query; or `None`.

    Returns:
        The distances, the rows, and whether each query is decided. `None` if another way is
        needed or faster.
    """
    # Without this way, one filtered query among 60,000 vectors is 1.6 to 2.3 times as dear.
    faiss = load_faiss()
    count, width = vectors.shape
    proposed = k + _MARGIN + k // 16
    searched = count
    selector = None
    if keep is not None:
        searched = int(np.count_nonzero(keep))
        bits = np.packbits(keep, bitorder="little")
        selector = faiss.IDSelectorBitmap(bits)
    if searched <= proposed or (count > _TABLE_ROWS and searched < _SPARSE_ONE * count):
        return None
    size = len(queries)
    sums = np.empty((size, proposed), np.float32)
    rows = np.empty((size, proposed), np.int64)
    pointer, table, out, numbers = map(faiss.swig_ptr, (queries, vectors, sums, rows))
    faiss.cvar.distance_compute_blas_threshold = (_FEW + 1) * width
    # A single query is compared on the calling thread.
    with faiss_threads(1) if size > 1 else nullcontext():
        faiss.knn_L2sqr(pointer, table, width, size, count, proposed, out, numbers, None, selector)
    rows.sort(axis=1)
    exact = queries.astype(np.float64)
    squared, rows = nearest_first(candidate_distances(exact, vectors, rows), rows, k)
    lengths = [0.0]
    if size > 1:
        lengths = np.sqrt(np.einsum("ij,ij->i", exact, exact)).tolist()
    # An unused place has no row, and the largest number of float32; its query is not decided.
    decided = [
        last < _LARGEST and _limit(square, width, 0.0, length) < last
        for square, length, last in zip(
            squared[:, -1].tolist(), lengths, sums[:, -1].tolist(), strict=True
        )
    ]
    return squared, rows, decided


def _gamma(width: int) -> float:
    """Return γ of the module's docstring for sums of `width` products."""
    terms = (width + 16) * 2.0**-24
    return terms / (1 - terms)


def candidate_distances(
    queries: Floats64, vectors: Floats32, rows: Ints, columns: slice = slice(None)
) -> Floats64:
    """Return squared distances (Q, n) in float64 between queries and candidates of their own.

    Args:
        queries: (Q, width of `columns`).
        vectors: (N, P).
        rows: (Q, n), the candidates; -1 stands for the last row.
        columns: columns of the vectors to compare.
    """
    count, width = queries.shape
    squared = np.empty(rows.shape)
    wide = max(1, min(rows.shape[1], _PAIR_NUMBERS // vectors.shape[1]))
    step = max(1, _PAIR_NUMBERS // (wide * vectors.shape[1]))
    for start in range(0, count, step):
        for first in range(0, rows.shape[1], wide):
            part = slice(start, start + step), slice(first, first + wide)
            some = vectors.take(rows[part], axis=0)[:, :, columns]
            difference = (queries[part[0], None] - some).reshape(-1, width)
            sums = np.einsum("ij,ij->i", difference, difference)
            squared[part] = sums.reshape(some.shape[:2])
    return squared


def nearest_first(squared: Floats64, rows: Ints, count: int) -> NearestRows:
    """Return the `count` smallest distances of each query (Q, n), ascending, and their rows.

    Equal distances keep their order.
    """
    order = squared.argsort(axis=1, kind="stable")[:, :count]
    # `take` counts positions in the flattened array.
    if len(rows) > 1:
        order += rows.shape[1] * np.arange(len(rows))[:, None]
    return squared.take(order), rows.take(order)


def squared_distances(
    queries: Floats64,
    vectors: Floats32 | Floats64,
    query: Ints,
    row: Ints,
    columns: slice = slice(None),
) -> Floats64:
    """Return squared distances |q − x|² (n,) in float64 between pairs of a query and a row.

    Args:
        queries: (Q, width of `columns`).
        vectors: (N, P).
        query: (n,), index of each pair's query.
        row: (n,), index of each pair's row.
        columns: columns of the vectors to compare.
    """
    squared = np.empty(len(row))
    step = max(1, _PAIR_NUMBERS // vectors.shape[1])
    for start in range(0, len(row), step):
        pairs = slice(start, start + step)
        difference = queries.take(query[pairs], axis=0)
        difference -= vectors.take(row[pairs], axis=0)[:, columns]
        np.einsum("ij,ij->i", difference, difference, out=squared[pairs])
    return squared
