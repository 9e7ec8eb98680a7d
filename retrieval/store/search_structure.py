"""Search structures, which speed up the search among the vectors of a generation.

A structure is one approximate back end per sub-space (column range of the vectors), or a companion:
a narrow table that speeds up exact search. It is derived from the vectors and covers the first rows
of their file; later rows are searched exactly. The index's SQLite record holds checksums of the
structure's files. A damaged structure is rebuilt.
"""

from __future__ import annotations

import json
import logging
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.base.arrays import Bools, Ints
from retrieval.base.files import whole_file
from retrieval.base.regular_files import open_plain
from retrieval.base.runtime import load_faiss
from retrieval.errors import RetrievalError, StoreError
from retrieval.store.backends import choose, make_backend, short_name
from retrieval.store.exact_search import Companion, faiss_threads
from retrieval.store.index_backend import IndexBackend, checked_search, using
from retrieval.store.items import Floats

log = logging.getLogger("retrieval.store")

ARRAYS = "arrays"  # subfolder of an index that holds the files of arrays and structures
MIN_ROWS = 20_000
"""A generation gets a structure from this many vectors on; below it exact search is fast enough."""
COMPANION = "companion"
"""Name of the structure that speeds up exact search: a narrow table (`search.Companion`)."""
COMPANION_MIN_ROWS = 50_000
"""Exact search in one sub-space gets a companion from this many vectors on."""
_BLOCK = 1 << 20  # bytes
# A structure is rebuilt once the added rows exceed this share of those it covers.
_GROWTH = 1 / 8
# Some candidates may be deleted items, so each query gets a few more.
_MARGIN = 16
_MAX_CANDIDATES = 4096
"""If too few of this many candidates per query are live, all rows are searched exactly."""
_RARE_SHARE = 0.02
"""A filter is searched exactly, which is faster, if it matches at most this share of the rows or at
most `_MAX_CANDIDATES` rows."""


@dataclass(frozen=True)
class StructureChoice:
    """The structure that an index is configured to have.

    Attributes:
        backend: the back end's name; "auto" chooses by the size of the index.
        options: the back end's parameters.
    """

    backend: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)

    def of(self, count: int, width: int, spaces: int) -> tuple[str, dict[str, Any]] | None:
        """Return the back end and its options for `count` vectors, or None for plain search."""
        if self.backend == "auto":
            name = choose(count, width)
        else:
            name = short_name(self.backend)
        if name == "flat":
            if spaces == 1 and count >= COMPANION_MIN_ROWS:
                return (COMPANION, {})
            return None
        if count < MIN_ROWS:
            return None
        return (name, dict(self.options))

    def text(self) -> str:
        """Return the JSON that the record stores."""
        return json.dumps(self.__dict__)

    @staticmethod
    def parse(text: str) -> StructureChoice:
        """Parse the JSON that `text` returned."""
        return StructureChoice(**json.loads(text))


@dataclass(frozen=True)
class Structure:
    """Description of a structure, as the record stores it.

    Attributes:
        backend: the back end's name.
        options: the back end's parameters.
        rows: number of rows that it covers, from the start of the file of vectors.
        files: name and CRC-32 of each file. A back end has one file per sub-space. A companion has
            one file, or none if its table would not be narrow enough.
    """

    backend: str
    options: Mapping[str, Any]
    rows: int
    files: tuple[tuple[str, str], ...]

    @staticmethod
    def parse(text: str) -> Structure:
        """Parse the JSON of the record's column `structure`."""
        fields = json.loads(text)
        return Structure(**fields | {"files": tuple(map(tuple, fields["files"]))})

    @staticmethod
    def names(text: str | None) -> list[str]:
        """Return the names of a structure's files; `text` is the record's column, or None."""
        if text is None:
            return []
        return [name for name, _ in Structure.parse(text).files]

    def text(self) -> str:
        """Return the JSON for the record's column `structure`."""
        return json.dumps(self.__dict__)

    def damaged(self, folder: Path) -> list[str]:
        """Return the names of the structure's files that are missing or altered in a folder."""
        files = [(name, folder / ARRAYS / name, checksum) for name, checksum in self.files]
        return [name for name, path, checksum in files if not _is_whole(path, checksum)]

    def outgrown(self, rows: int) -> bool:
        """Return whether a file of `rows` rows has outgrown this structure."""
        return rows - self.rows > _GROWTH * max(MIN_ROWS, self.rows)


@dataclass(frozen=True)
class Loaded:
    """A structure in memory."""

    structure: Structure
    backends: Sequence[IndexBackend] = ()
    companion: Companion | None = None

    def intact(self) -> bool:
        """Return whether the files that the structure has mapped have kept their content."""
        if self.companion is not None:
            return self.companion.intact()
        return all(backend.intact() for backend in self.backends)

    def propose(
        self, space: int, queries: Floats, count: int, keep: Bools | None, *, filtered: bool
    ) -> Ints | None:
        """Return each query's candidate rows, padded with -1, or None if exact search is needed.

        Args:
            space: number of the sub-space.
            queries: (Q, width of the sub-space).
            count: number of rows wanted per query.
            keep: mask of the rows to search; None searches all rows.
            filtered: whether a filter made `keep`; otherwise it leaves out only deleted rows.
        """
        backend = self.backends[space]
        name = self.structure.backend
        size = self.structure.rows
        breadth = min(count * backend.expand, size)
        if keep is None:
            return checked_search(backend, name, queries, breadth, size)
        if filtered:
            matching = int(np.count_nonzero(keep))
            if matching <= max(_MAX_CANDIDATES, _RARE_SHARE * size) or not backend.selective:
                return None
            rows = checked_search(backend, name, queries, breadth, size, keep)
            if (rows >= 0).sum(axis=1).min() >= min(count, matching):
                return rows
            return None
        breadth += _MARGIN
        while breadth <= min(_MAX_CANDIDATES, size):
            rows = checked_search(backend, name, queries, breadth, size)
            rows = np.where((rows >= 0) & keep[rows], rows, -1)
            if (rows >= 0).sum(axis=1).min() >= count:
                return rows
            breadth *= 4
        return None


def build_structure(
    folder: Path,
    stem: str,
    vectors: Floats,
    spans: Sequence[tuple[int, int]],
    name: str,
    options: Mapping[str, Any],
    plugins: Sequence[str],
    report: Callable[[int], object],
) -> Structure:
    """Build a structure over vectors (N, P) and write it to new files."""
    files = []
    if name == COMPANION:
        if (companion := Companion.build(vectors)) is not None:
            files.append(_saved(folder / ARRAYS / f"{stem}.{name}", companion.save))
        return Structure(name, {}, len(vectors), tuple(files))
    threads = load_faiss().omp_get_max_threads()
    if threading.current_thread() is not threading.main_thread():
        # One core is left to searches, which go on during the build.
        threads = max(1, threads - 1)
    with faiss_threads(threads):
        for number, (start, stop) in enumerate(spans):
            backend = make_backend(name, options, plugins)
            with using(name, "build"):
                backend.build(np.ascontiguousarray(vectors[:, start:stop]), report)
            path = folder / ARRAYS / f"{stem}.{number}.{name.replace('/', '-')}"
            with using(name, "save"):
                files.append(_saved(path, backend.save))
    return Structure(name, dict(options), len(vectors), tuple(files))


def adopt_structure(
    folder: Path,
    stem: str,
    vectors: Floats,
    old: Loaded,
    rows: Ints,
    name: str,
    options: Mapping[str, Any],
    plugins: Sequence[str],
) -> Structure | None:
    """Write the structure `old` for other vectors (N, P) of the same items to a new file.

    Args:
        folder: folder of the index.
        stem: prefix of the file's name.
        vectors: the new vectors.
        old: a structure of one sub-space, in memory.
        rows: (N,), ascending: row of each vector in `old`.
        name, options, plugins: see `make_backend`; the back end of `old`.

    Returns:
        The structure, or None if its back end cannot do this.
    """
    backend = make_backend(name, options, plugins)
    with using(name, "adopt"):
        if not backend.adopt(old.backends[0], rows, vectors):
            return None
    path = folder / ARRAYS / f"{stem}.0.{name.replace('/', '-')}"
    with using(name, "save"):
        file = _saved(path, backend.save)
    return Structure(name, dict(options), len(vectors), (file,))


def _saved(path: Path, save: Callable[[Path], object]) -> tuple[str, str]:
    """Write a complete file or none; return its name and CRC-32."""
    with whole_file(path) as temporary:
        # `save` creates the file.
        temporary.unlink()
        save(temporary)
    return path.name, _checksum_of(path)


def load_structure(
    folder: Path,
    structure: Structure,
    vectors: Floats,
    spans: Sequence[tuple[int, int]],
    plugins: Sequence[str],
) -> Loaded | None:
    """Load a structure over vectors (N, P); if it cannot be used, log why and return None."""
    name = structure.backend
    paths = [folder / ARRAYS / file for file, _ in structure.files]
    backends = []
    try:
        if names := structure.damaged(folder):
            raise StoreError(f"{names[0]} is missing or was altered.")
        if name == COMPANION:
            size = (structure.rows, vectors.shape[1])
            return Loaded(structure, (), Companion.load(paths[0], *size) if paths else None)
        for path, (start, stop) in zip(paths, spans, strict=True):
            backend = make_backend(name, structure.options, plugins)
            with using(name, "load"):
                backend.load(path, vectors[: structure.rows, start:stop])
            backends.append(backend)
    except (RetrievalError, OSError) as fault:
        log.warning(
            "The search structure of the index %s cannot be used. The index is searched exactly "
            "until the structure is built again. Cause: %s",
            folder,
            fault,
        )
        return None
    return Loaded(structure, backends)


def _checksum_of(path: Path) -> str:
    """Return the CRC-32 of a file; a SHA-256 would take twice as long."""
    checksum = 0
    with open_plain(path) as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"


def _is_whole(path: Path, expected: str) -> bool:
    """Return whether `path` is a regular file with this checksum."""
    try:
        return _checksum_of(path) == expected
    except OSError:
        return False
