"""The gallery's files, read piece by piece: no file stays open, and a slow client holds one piece. What an index keeps of them is held whole."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retrieval.errors import StoreError
from retrieval.serving.http.errors import RequestError

PIECE = 262_144  # bytes that are read and sent at a time
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)

# What browsers show as it is, by its first bytes; the file's name is not asked.
_MEDIA = {
    b"\xff\xd8\xff": "image/jpeg",
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
}


KEPT = ("copy", "thumbnail")
"""What an item's `keep` says where the index itself holds bytes of the original."""


class Gallery:
    """Which originals may be shown: those below the folders that the operator named, and what the index keeps.

    An index names files of the machine that it lies on, and may be a stranger's. A link counts as what it leads to.

    Args:
        folders: whose files may be shown.

    Raises:
        StoreError: a folder that is none.
    """

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        if missing := [str(folder) for folder in folders if not folder.is_dir()]:
            raise StoreError(f"There is no folder {', '.join(missing)}, which --images names.")
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]

    def original(self, path: Path) -> Path | None:
        """Return where an original is, through no link; None if it may not be shown. May wait for the disk."""
        real = Path(os.path.realpath(path))
        return real if any(real.is_relative_to(folder) for folder in self._folders) else None

    def offers(self, path: Path | None, keep: str) -> bool:
        """Whether to offer an item's image; asks no disk, as `original` does."""
        return keep in KEPT or (path is not None and bool(self._folders))


@dataclass(frozen=True)
class Picture:
    """An item's original, every method for a thread: the storage may hang.

    Attributes:
        path: where it is; None where the index keeps it.
        id: the item's.
        size: in bytes.
        stamp: the file's identity, by which a change is noticed between two pieces.
        first: its first piece.
        media_type: None where browsers cannot show it.
        content: all of it, where the index keeps it.
    """

    path: Path | None
    id: str
    size: int
    stamp: tuple[int, int, int]
    first: bytes
    media_type: str | None
    content: bytes | None = None

    @property
    def tag(self) -> str:
        """What changes when the picture does."""
        said = self.content or repr((self.path, self.stamp)).encode("utf-8", "backslashreplace")
        return hashlib.sha256(said).hexdigest()[:32]

    @classmethod
    def kept(cls, id: str, content: bytes) -> Picture:
        """Return a picture that the index keeps."""
        first = content[:PIECE]
        return cls(None, id, len(content), (0, len(content), 0), first, _media_type(first), content)

    @classmethod
    def of(cls, id: str, path: Path | None, size: int | None) -> Picture:
        """Read the beginning of the file that an item was indexed from.

        Args:
            id: the item's.
            path: of the file; None where the index names none.
            size: of the file when it was indexed, in bytes.

        Raises:
            RequestError: 404, there is no file, or it is gone, or another one.
        """
        if path is None:
            raise RequestError(
                404, f"Item {id} was indexed from features, or the index keeps nothing of its image."
            )
        try:
            known, first = _piece(path, 0)
        except (OSError, ValueError):
            raise RequestError(404, f"The image of item {id} is no longer where it was indexed.") from None
        if size is not None and known.st_size != size:
            raise _changed(id)
        return cls(path, id, known.st_size, _stamp(known), first, _media_type(first))

    def piece(self, offset: int) -> bytes:
        """Return the bytes from `offset` on, at most `PIECE` of them.

        Raises:
            RequestError: 404, the file was changed meanwhile.
        """
        if self.content is not None:
            return self.content[offset : offset + PIECE]
        assert self.path is not None
        try:
            known, content = _piece(self.path, offset)
        except OSError:
            raise _changed(self.id) from None
        if _stamp(known) != self.stamp or not content:
            raise _changed(self.id)
        return content

    def whole(self, limit: int) -> bytes:
        """Return all of it.

        Raises:
            RequestError: 404, it is larger than `limit`, or was changed meanwhile.
        """
        if self.size > limit:
            raise RequestError(404, f"The image of item {self.id} is too large to be shown.")
        if self.content is not None:
            return self.content
        pieces, held = [self.first], len(self.first)
        while held < self.size:
            pieces.append(self.piece(held))
            held += len(pieces[-1])
        return b"".join(pieces)


def _piece(path: Path, offset: int) -> tuple[os.stat_result, bytes]:
    """Return what a file is and a piece of it. A pipe or device is no such file, and opening it does not wait."""
    handle = os.open(path, _FLAGS)
    try:
        known = os.fstat(handle)
        if not stat.S_ISREG(known.st_mode):
            raise OSError(f"{path} is not a regular file")
        os.lseek(handle, offset, os.SEEK_SET)
        return known, os.read(handle, PIECE)
    finally:
        os.close(handle)


def _stamp(known: os.stat_result) -> tuple[int, int, int]:
    return known.st_ino, known.st_size, known.st_mtime_ns


def _changed(id: str) -> RequestError:
    return RequestError(404, f"The image of item {id} was changed after it was indexed.")


def _media_type(first: bytes) -> str | None:
    for start, media_type in _MEDIA.items():
        if first.startswith(start):
            return media_type
    return "image/webp" if first[:4] == b"RIFF" and first[8:12] == b"WEBP" else None
