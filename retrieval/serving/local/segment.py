"""An immutable file of items' arrays: written once, synced, mapped by every reader, with a checksum for each piece of it."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import StoreError
from retrieval.host.files import sync, whole_file
from retrieval.serving.files.plain import open_plain
from retrieval.serving.local.distances import squared_norms
from retrieval.serving.stores.contract import FEATURES, VECTOR, Floats

Numbers = NDArray[np.int64]


class Pieces(Protocol):
    """The rows of an array, a piece after the other; the first one tells the width."""

    def __getitem__(self, at: int, /) -> Floats: ...

    def __iter__(self) -> Iterator[Floats]: ...


_MAGIC = b"retrieval segment 1\n"
_PAGE = 4096
_PIECE = 1 << 22
"""Bytes that one checksum covers."""


class Segment:
    """An opened segment: numbers of items, ascending, and arrays of them, one row an item.

    Opening compares the head with the record. The pieces are compared with their checksums by `verify`, once: after an unclean stop,
    too, a file that was synced before the record spoke of it is what it was, but a disk may have altered it since.

    Features lie in a segment of their own beside the file: no search reads them, and generations share one where their items
    are the same.

    Args:
        path: the file.
        expected: SHA-256 of its head, as the record has it.

    Raises:
        StoreError: missing, cut off, or altered: the end of a sentence.

    Attributes:
        head_sum: SHA-256 of its head.
        numbers: (N,), int64, ascending.
        arrays: (N, width), float32, by name.
        beside: the segment that holds the features; None where none are kept.
    """

    def __init__(self, path: Path, expected: str) -> None:
        self.path = path
        try:
            with open_plain(path) as file:
                size = os.fstat(file.fileno()).st_size
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except FileNotFoundError:
            raise
        except OSError as fault:
            raise StoreError(f"cannot be read: {fault.strerror or fault}") from fault
        head = bytes(self._map[:_PAGE])
        if hashlib.sha256(head).hexdigest() != expected:
            raise StoreError("was altered")
        said = json.loads(head[len(_MAGIC) :].rstrip(b"\0"))  # ours, since its hash is
        if said["size"] != size:
            raise StoreError(f"has {size:,} bytes instead of {said['size']:,}")
        count = said["count"]
        self.numbers: Numbers = np.frombuffer(self._map, "<i8", count, said["numbers"])
        self.arrays: dict[str, Floats] = {
            name: np.frombuffer(self._map, "<f4", count * width, start).reshape(count, width)
            for name, (width, start) in said["arrays"].items()
        }
        self.head_sum = expected
        self.beside: Segment | None = None
        if sum_ := said.get("features"):
            self.beside = Segment(features_file(path), sum_)
            self.arrays |= self.beside.arrays
        self._places = {name: start for name, (_, start) in said["arrays"].items()}
        self._seen: set[int] = set()
        self._sums = np.frombuffer(self._map, "<u4", said["pieces"], said["sums"])
        self._body = (_PAGE, said["sums"])
        self._sums_sum = said["sums_sum"]
        self._verified = False
        self._norms: Floats | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.numbers)

    def norms(self) -> Floats:
        """Return the squared length of each vector (N,), which exact search takes; computed once."""
        if self._norms is None:
            self._norms = squared_norms(self.arrays[VECTOR])
        return self._norms

    def verify(self, *, features: bool = False, anew: bool = False) -> None:
        """Compare every piece with its checksum, unless that was done before; those of features only with `features`.

        Args:
            features: see above.
            anew: whether it was done before or not: what is made of a segment gets checksums of its own, which would hide what became of it since.

        Raises:
            StoreError: altered: the end of a sentence.
        """
        if features and self.beside is not None:
            self.beside.verify(anew=anew)
        if self._verified and not anew:
            return
        with self._lock:
            if self._verified and not anew:
                return
            view = memoryview(self._map)
            start, stop = self._body
            found = [zlib.crc32(view[at : min(at + _PIECE, stop)]) for at in range(start, stop, _PIECE)]
            if zlib.crc32(self._sums.tobytes()) != self._sums_sum or found != self._sums.tolist():
                self._verified = False
                raise StoreError("was altered")
            self._verified = True

    def verify_rows(self, name: str, rows: Numbers) -> None:
        """Compare the pieces that hold these rows of an array with their checksums, unless that was done before.

        Raises:
            StoreError: altered: the end of a sentence.
        """
        if self.beside is not None and name in self.beside.arrays:
            self.beside.verify_rows(name, rows)
            return
        if self._verified or not len(rows):
            return
        width = self.arrays[name].strides[0]
        begin = self._places[name] - self._body[0] + rows * width
        self._verify_pieces(
            set(np.unique(np.concatenate([begin // _PIECE, (begin + width - 1) // _PIECE])).tolist())
        )

    def verify_numbers(self) -> None:
        """Compare the pieces that hold the items' numbers with their checksums; they are a small part of all.

        Raises:
            StoreError: altered: the end of a sentence.
        """
        if not self._verified:
            self._verify_pieces(set(range(-(-self.numbers.nbytes // _PIECE))))

    def _verify_pieces(self, wanted: set[int]) -> None:
        sums_hold = zlib.crc32(self._sums.tobytes()) == self._sums_sum
        with memoryview(self._map) as view:
            for piece in wanted - self._seen:
                at = self._body[0] + piece * _PIECE
                found = zlib.crc32(view[at : min(at + _PIECE, self._body[1])])
                if not sums_hold or found != self._sums[piece]:
                    raise StoreError("was altered")
        self._seen |= wanted

    def trust(self) -> None:
        """Take it as verified: this process has just written it."""
        self._verified = True
        if self.beside is not None:
            self.beside.trust()


def features_file(path: Path) -> Path:
    """Return where a segment's features lie."""
    return path.with_suffix(".features")


def write_segment(
    path: Path, numbers: Numbers, arrays: Mapping[str, Pieces], *, shared: Segment | None = None
) -> str:
    """Write a segment, synced, under a temporary name that becomes `path` at the end; return the SHA-256 of its head.

    Args:
        path: the file.
        numbers: (N,), ascending.
        arrays: by name: pieces (n, width), N rows together, which may be mapped from other segments.
        shared: holds the features of exactly these items: they take no more room.

    Raises:
        OSError: the disk refuses.
    """
    said = {}
    if shared is not None:
        _link(shared.path, features_file(path))
        said["features"] = shared.head_sum
    elif FEATURES in arrays:
        said["features"] = _write(features_file(path), numbers, {FEATURES: arrays[FEATURES]}, {})
    return _write(path, numbers, {name: one for name, one in arrays.items() if name != FEATURES}, said)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; where the file system has none, write a second file."""
    fresh = target.with_name(f"{target.name}.tmp")
    fresh.unlink(missing_ok=True)
    try:
        os.link(source, fresh)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, fresh)
        sync(fresh)
    fresh.replace(target)


def _write(path: Path, numbers: Numbers, arrays: Mapping[str, Pieces], more: Mapping[str, str]) -> str:
    widths = {name: pieces[0].shape[1] for name, pieces in arrays.items()}
    places, at = {}, _round(_PAGE + 8 * len(numbers))
    for name, width in widths.items():
        places[name] = (width, at)
        at = _round(at + 4 * width * len(numbers))
    pieces = -(-(at - _PAGE) // _PIECE)
    with whole_file(path) as temporary, temporary.open("r+b") as file:
        file.seek(_PAGE)
        file.write(_bytes(numbers, "<i8"))
        for name, parts in arrays.items():
            file.seek(places[name][1])
            for part in parts:
                for start in range(0, len(part), 65_536):
                    file.write(_bytes(part[start : start + 65_536], "<f4"))
        file.truncate(at)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            found = [zlib.crc32(view[begin : min(begin + _PIECE, at)]) for begin in range(_PAGE, at, _PIECE)]
        sums = np.array(found, "<u4")
        file.seek(at)
        file.write(sums.tobytes())
        said = {
            "count": len(numbers),
            "size": at + sums.nbytes,
            "numbers": _PAGE,
            "arrays": places,
            "sums": at,
            "pieces": pieces,
            "sums_sum": zlib.crc32(sums.tobytes()),
            **more,
        }
        head = (_MAGIC + json.dumps(said).encode()).ljust(_PAGE, b"\0")
        file.seek(0)
        file.write(head)
    return hashlib.sha256(head).hexdigest()


def _bytes(array: NDArray[Any], kind: str) -> memoryview:
    return np.ascontiguousarray(array, kind).data.cast("B")


def _round(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
