"""Segments that are opened, verified and made ready before a search needs them: by the writer, or in a thread beside the searches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from retrieval.errors import RetrievalError, StoreError
from retrieval.serving.index.contract import IndexBackend
from retrieval.serving.local.piece import SEGMENTS, Piece, damaged, structure_of
from retrieval.serving.local.segment import Segment
from retrieval.serving.local.structures import Structure
from retrieval.serving.stores.contract import Generation


@dataclass(frozen=True)
class Row:
    """A segment as the record names it.

    Attributes:
        number: of the segment.
        file: its name.
        sum: SHA-256 of its head.
        count: of its items.
        structure: what the record says of its structure.
    """

    number: int
    file: str
    sum: str
    count: int
    structure: str | None


class Ready:
    """Pieces that a view may take at once.

    Args:
        folder: of the index.
        make: builds a back end by what the record says of it.
        renew: called in the thread when what was asked for is ready.
    """

    def __init__(self, folder: Path, make: Callable[..., IndexBackend], renew: Callable[[], None]) -> None:
        self._folder = folder
        self._make = make
        self._renew = renew
        self._lock = threading.Lock()
        self._written: dict[str, Piece] = {}
        self._made: dict[str, Piece] = {}
        self._failed: set[str] = set()
        self._asked: dict[str, tuple[Row, Segment, Generation]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def open(self, row: Row, generation: Generation) -> Segment:
        """Open a segment's file, unverified.

        Raises:
            FileNotFoundError: it is gone.
            StoreError: it is damaged.
        """
        with self._lock:
            known = self._written.get(row.file)
        path = self._folder / SEGMENTS / row.file
        try:
            segment = known.segment if known else Segment(path, row.sum)
        except StoreError as fault:
            raise damaged(path, fault) from None
        if len(segment) != row.count or {name: array.shape[1] for name, array in segment.arrays.items()} != generation.widths:  # fmt: skip
            raise damaged(path, StoreError("is another than the record says"))
        return segment

    def load(self, row: Row, segment: Segment, generation: Generation) -> Piece:
        """Return the piece of a segment, with its structure."""
        structure = Structure.parse(row.structure)
        loaded, compact = structure_of(self._folder, structure, segment, generation, self._make)
        return Piece(row.number, segment, None, loaded, compact, row.structure)

    def wrote(self, file: str, segment: Segment) -> None:
        """Note a segment that this process has just written: it needs no second look."""
        segment.trust()
        with self._lock:
            self._written[file] = Piece(0, segment, None, None)

    def wrote_structure(self, row: Row, segment: Segment, generation: Generation) -> None:
        """Load a structure that this process has just written, so that no search waits for it."""
        piece = self.load(row, segment, generation)
        if piece.structure is None:
            segment.norms()
        with self._lock:
            self._written[row.file] = piece

    def take(self, row: Row) -> Piece | None:
        """Return the piece of a row if it is ready; it is the caller's from now on."""
        with self._lock:
            for pieces in (self._written, self._made):
                piece = pieces.get(row.file)
                if piece is not None and piece.said == row.structure:
                    del pieces[row.file]
                    return replace(piece, number=row.number)
        return None

    def sound(self, row: Row) -> bool:
        """Whether nothing was found wrong with a segment, so that others may stand in for it until it is ready."""
        with self._lock:
            return _key(row) not in self._failed

    def ask(self, row: Row, segment: Segment, generation: Generation) -> None:
        """Have a piece made ready in the background."""
        with self._lock:
            made, asked = self._made.get(row.file), self._asked.get(row.file)
            if self._closed or (made and made.said == row.structure) or (asked and asked[0] == row):
                return
            self._asked[row.file] = (row, segment, generation)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="opening", daemon=True)
                self._thread.start()

    def keep(self, files: Collection[str]) -> None:
        """Forget whatever was made ready of other files than these: the record names them no more."""
        with self._lock:
            self._made = {file: piece for file, piece in self._made.items() if file in files}
            self._asked = {file: asked for file, asked in self._asked.items() if file in files}

    def forget(self, files: Collection[str]) -> None:
        """Let go of segments that this process wrote and that are merged by now."""
        with self._lock:
            self._written = {file: piece for file, piece in self._written.items() if file not in files}

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed or not self._asked:
                    self._thread = None
                    return
                asked = row, segment, generation = next(iter(self._asked.values()))
            piece = None
            with suppress(RetrievalError, OSError):  # what a search then meets, it says
                piece = self._made_ready(row, segment, generation)
            with self._lock:
                if self._asked.get(row.file) is not asked:
                    continue  # the record names another by now
                del self._asked[row.file]
                if piece is None:
                    self._failed.add(_key(row))
                else:
                    self._made[row.file] = piece
            self._renew()

    def _made_ready(self, row: Row, segment: Segment, generation: Generation) -> Piece | None:
        said = Structure.parse(row.structure)
        folder = self._folder / SEGMENTS
        if said is not None and not all((folder / name).is_file() for name, _ in said.files):
            return None  # most likely the record names it no more
        segment.verify()
        piece = self.load(row, segment, generation)
        if piece.structure is None:
            segment.norms()
        return piece

    def close(self) -> None:
        """Let go of everything, and end the thread."""
        with self._lock:
            self._closed = True
            self._written.clear()
            self._made.clear()
            self._asked.clear()
            thread = self._thread
        if thread is not None:
            thread.join()


def _key(row: Row) -> str:
    return f"{row.file} {row.structure}"
