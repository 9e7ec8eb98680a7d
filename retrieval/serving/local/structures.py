"""What speeds up the search of a segment: a back end for each sub-space, built from its vectors, kept in files beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from retrieval.errors import StoreError
from retrieval.host.files import whole_file
from retrieval.serving.files.plain import open_plain
from retrieval.serving.index.backends import choose, short_name
from retrieval.serving.index.contract import IndexBackend, using
from retrieval.serving.local.compact import Compact
from retrieval.serving.local.compact import build as build_compact
from retrieval.serving.stores.contract import Floats

COMPACT = "compact"
COMPACT_LEAST = 50_000
"""Vectors from which exact search of a segment has a companion: fewer are read in a moment."""
LEAST = 20_000
"""Vectors from which a segment gets a structure: fewer are searched exactly in a moment."""


@dataclass(frozen=True)
class Structure:
    """What the record says of a segment's structure.

    Attributes:
        backend: its name.
        options: its parameters.
        files: name and SHA-256 of a file for each sub-space.
    """

    backend: str
    options: Mapping[str, Any]
    files: tuple[tuple[str, str], ...]

    @staticmethod
    def parse(text: str | None) -> Structure | None:
        """Return what a column holds."""
        if text is None:
            return None
        said = json.loads(text)
        return Structure(said["backend"], said["options"], tuple(map(tuple, said["files"])))

    def text(self) -> str:
        """Return what the column is to hold."""
        return json.dumps({"backend": self.backend, "options": self.options, "files": self.files})


@dataclass(frozen=True)
class Wanted:
    """Which structure segments are to have.

    Attributes:
        backend: its name; "auto" goes by the size of the index.
        options: its parameters.
    """

    backend: str = "auto"
    options: Mapping[str, Any] | None = None

    def of(self, count: int, total: int, width: int, spaces: int = 1) -> tuple[str, Mapping[str, Any]] | None:
        """Return the back end of a segment of `count` vectors in an index of `total`; None: exact search needs none.

        Exact search of a large segment has a compact companion of the vectors; see `retrieval.serving.local.compact`.
        """
        name = choose(total, width) if self.backend == "auto" else short_name(self.backend)
        if name == "flat":
            return (COMPACT, {}) if spaces == 1 and count >= COMPACT_LEAST else None
        return None if count < LEAST else (name, dict(self.options or {}))


def build_structure(
    path: Path,
    vectors: Floats,
    spans: Sequence[tuple[int, int]],
    name: str,
    options: Mapping[str, Any],
    make: Callable[[str, Mapping[str, Any]], IndexBackend],
    report: Callable[[int], object],
    run: Callable[[Callable[[], None]], None] = lambda work: work(),
) -> Structure:
    """Build and write the structure of a segment, beside its file `path`; `run` does what takes long.

    Raises:
        PluginError: the back end fails.
        OSError: the disk refuses.
    """
    if name == COMPACT:
        made = build_compact(vectors)
        return Structure(
            name, {}, () if made is None else (_saved(path.with_name(f"{path.stem}.compact"), made),)
        )
    files = []
    for number, (start, stop) in enumerate(spans):
        backend = make(name, options)
        columns = np.ascontiguousarray(vectors[:, start:stop])
        with using(name, "build"):
            run(partial(backend.build, columns, report))
        with using(name, "save"):
            files.append(_saved(path.with_name(f"{path.stem}.{number}.{name.replace('/', '-')}"), backend))
    return Structure(name, dict(options), tuple(files))


def _saved(file: Path, made: IndexBackend | Compact) -> tuple[str, str]:
    """Write a file whole; return its name and SHA-256."""
    with whole_file(file) as temporary:
        temporary.unlink()
        if isinstance(made, Compact):
            made.save(temporary)
        else:
            made.save_beside(temporary)
    return file.name, sha256_of(file)


def load_companion(folder: Path, said: Structure, count: int, width: int) -> Compact | None:
    """Load the companion of a segment that is searched exactly, compared with the record; None where it has none.

    Raises:
        StoreError: it is missing or was altered.
    """
    for file, expected in said.files:
        if not is_whole(folder / file, expected):
            raise StoreError(f"{file} is missing or was altered.")
        return Compact.load(folder / file, count, width)
    return None


def load_structure(
    folder: Path,
    said: Structure,
    vectors: Floats,
    spans: Sequence[tuple[int, int]],
    make: Callable[[str, Mapping[str, Any]], IndexBackend],
) -> list[IndexBackend]:
    """Load the structure of a segment with these vectors, compared with the record.

    Raises:
        StoreError: a file is missing or altered, or the back end refuses it: the end of a sentence.
        PluginError: the back end is not there.
    """
    backends = []
    for (file, expected), (start, stop) in zip(said.files, spans, strict=True):
        path = folder / file
        if not is_whole(path, expected):
            raise StoreError(f"{file} is missing or was altered.")
        backend = make(said.backend, said.options)
        with using(said.backend, "load"):
            backend.load_beside(path, vectors[:, start:stop])
            backend.check(len(vectors), stop - start)
        backends.append(backend)
    return backends


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_whole(path: Path, expected: str) -> bool:
    """Whether a regular file of this SHA-256 lies there."""
    try:
        return sha256_of(path) == expected
    except OSError:
        return False
