"""A compact companion of a matrix of vectors: half of its size at most, read in its place to find the exact nearest.

Vectors of images fill few directions. Let V (P, D − 1) have orthonormal columns, those along which the vectors vary most
(their principal components), and m be their mean. The companion keeps of each vector z(x) = (Vᵀ (x − m), r): its
coordinates along V, and as its last number the length r of what they leave out. Lengths of two such rests differ by no more
than the rests themselves, so |z(q) − z(x)| ≤ |q − x|: no vector is nearer than its companion. A search of the companion
that measures again, on the vectors, whatever may be near enough is therefore exact; `exact.nearest` does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import StoreError
from retrieval.serving.index.contract import Floats

Doubles = NDArray[np.float64]

_ENERGY = 0.96
_WORTHWHILE = 0.9
_SAMPLE = 16_384
_STEP = 1 << 20  # numbers of a block
_LARGEST = 2.0**30  # above, squares of coordinates may leave float32


@dataclass(frozen=True)
class Compact:
    """What `build` makes. Derived: to be made again from the vectors where it is lost.

    Attributes:
        mean: (P,) float64.
        basis: (P, D − 1) float64, orthonormal columns.
        error: how far a row of `table` may be from z(x), as a distance.
        table: (N, D) float32.
    """

    mean: Doubles
    basis: Doubles
    error: float
    table: Floats

    def project(self, vectors: Floats) -> tuple[Floats, Doubles]:
        """Return z of each vector (M, D), rounded to float32, and how far rounding may have moved it (M,).

        The rest's length comes of |x − m|² − |Vᵀ (x − m)|², off by no more than P + 8 roundings of |x − m|² in double
        precision, so the length by the root of that; then each coordinate is rounded to float32.
        """
        apart = vectors - self.mean
        along = apart @ self.basis
        whole = np.einsum("ij,ij->i", apart, apart)
        rest = np.sqrt(np.maximum(whole - np.einsum("ij,ij->i", along, along), 0))
        lost = (2.0**-23 + np.sqrt((len(self.mean) + 8) * 2.0**-50)) * np.sqrt(whole) + 2.0**-120
        with np.errstate(over="ignore"):  # of a query without measure; a table's are refused by `build`
            return np.column_stack([along, rest]).astype(np.float32), lost

    def save(self, path: Path) -> None:
        """Write a new file: four arrays in NumPy's format, one after the other, the table last."""
        with path.open("xb") as file:
            for array in (self.mean, self.basis, np.array([self.error]), self.table):
                np.save(file, array, allow_pickle=False)

    @classmethod
    def load(cls, path: Path, count: int, width: int) -> Compact:
        """Map the file of the companion of `count` vectors of `width` numbers. Its checksum is its keeper's affair.

        Raises:
            StoreError: the end of a sentence: it is not such a file.
            OSError: it cannot be read.
        """
        with path.open("rb") as file:
            mean = _array(file, np.float64, (width, width))
            basis = _array(file, np.float64, (width, width), (1, width))
            error = _array(file, np.float64, (1, 1))
            shape = _header(file, np.float32, (count, count), (basis.shape[1] + 1, basis.shape[1] + 1))
            place = file.tell()
            if file.seek(0, 2) != place + 4 * shape[0] * shape[1]:
                raise StoreError("its length is not what its header says")
        if not (np.isfinite(mean).all() and np.isfinite(basis).all() and 0 <= error[0] < np.inf):
            raise StoreError("it holds numbers that are not finite")
        table = np.memmap(path, np.float32, "r", place, shape)
        return cls(mean, basis, float(error[0]), table)


def build(vectors: Floats) -> Compact | None:
    """Return the companion of vectors (N, P), or None where it would gain nothing: they fill all directions.

    Reads the vectors in blocks; the table (N, D) is in memory.
    """
    count, width = vectors.shape
    sample = vectors[:: max(1, -(-count // _SAMPLE))].astype(np.float64)
    if len(sample) < 2 * width or not np.isfinite(np.square(sample).sum()):
        return None
    mean = sample.mean(0)
    energy, basis = np.linalg.eigh(np.cov(sample.T))
    part = np.cumsum(energy[::-1]) / max(energy.sum(), np.finfo(float).tiny)
    size = min(-(-(int(np.searchsorted(part, _ENERGY)) + 2) // 8) * 8, width // 2)
    if size < 2 or part[size - 2] < _WORTHWHILE:
        return None
    made = Compact(
        mean, np.ascontiguousarray(basis[:, ::-1][:, : size - 1]), 0.0, np.empty((count, size), np.float32)
    )
    step, error = max(1, _STEP // width), 0.0
    for start in range(0, count, step):
        made.table[start : start + step], lost = made.project(vectors[start : start + step])
        error = max(error, float(lost.max()))
    if not error < _LARGEST:
        return None
    return Compact(made.mean, made.basis, error, made.table)


def _array(file: BinaryIO, kind: Any, *bounds: tuple[int, int]) -> Any:
    """Read an array of a type and of lengths within bounds."""
    shape = _header(file, kind, *bounds)
    data = file.read(int(np.prod(shape)) * np.dtype(kind).itemsize)
    if len(data) != int(np.prod(shape)) * np.dtype(kind).itemsize:
        raise StoreError("it is cut short")
    return np.frombuffer(data, kind).reshape(shape)


def _header(file: BinaryIO, kind: Any, *bounds: tuple[int, int]) -> tuple[int, ...]:
    """Read an array's header; return its shape.

    Raises:
        StoreError: damaged, or of another type or shape.
    """
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError
        shape, fortran, found = np.lib.format.read_array_header_1_0(file)
    except (ValueError, EOFError) as fault:
        raise StoreError("it is not a companion's file, or a damaged one") from fault
    fits = len(shape) == len(bounds) and all(
        low <= n <= high for n, (low, high) in zip(shape, bounds, strict=True)
    )
    if fortran or found != np.dtype(kind) or not fits:
        raise StoreError(f"it holds {found} {shape} where the vectors' companion has another type or shape")
    return tuple(shape)
