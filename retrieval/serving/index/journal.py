"""What a long encoding has done so far, on disk, so that it goes on where it stopped."""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import StoreError
from retrieval.host.files import whole_file

_SYNC_SECONDS = 2.0
_SUM = 8


@dataclass(frozen=True)
class Done:
    """One item that was dealt with.

    Attributes:
        stamp: names the item and its state (`Source.stamp`).
        fault: why it was skipped; None when it was encoded.
        bytes: of the original image, as are `width` and `height` in pixels.
        width: see `bytes`.
        height: see `bytes`.
        original: what a living index keeps of it; never part of a journal.
    """

    stamp: str
    fault: str | None = None
    bytes: int | None = None
    width: int | None = None
    height: int | None = None
    original: builtins.bytes | None = None


class Journal:
    """Vectors and codes of the items done so far, in a folder beside the output, which the caller holds (`retrieval.serving.files.locks`).

    Numbers are appended and synced before the lines that speak of them, so a journal cut off anywhere is true up to
    its last whole line. Each line carries a checksum of itself and of its item's numbers: what the disk gives back
    differently is done again.

    Args:
        folder: `<output>.partial`; made when it is not there.
        header: what the work depends on; a journal with another header starts over.
        widths: numbers per item in each file: {"vectors": P} and perhaps {"codes": C}.
        stamps: of all items in order; what the journal has done of another beginning starts over from there.

    Attributes:
        done: the items that need no more work, in order.
        widths: see above.
    """

    def __init__(
        self, folder: Path, header: dict[str, Any], widths: dict[str, int], stamps: Sequence[str]
    ) -> None:
        self.folder = folder
        self.widths = widths
        folder.mkdir(exist_ok=True)
        self._sums = bytearray()  # of the numbers of each item that was encoded
        self._files: dict[str, IO[bytes]] = {}
        self.done: list[Done] = []
        try:
            self.done = self._read(header, stamps)
            self._open(header)
        except BaseException:
            if self.done:  # hours of work, perhaps: a full disk now must not cost them
                self.close()
            else:
                self.remove()
            raise

    def _read(self, header: dict[str, Any], stamps: Sequence[str]) -> list[Done]:
        """Return the longest beginning of the items that an earlier run has done, and that the disk gives back as written."""
        done: list[Done] = []
        try:
            with ExitStack() as stack:
                lines = stack.enter_context((self.folder / "journal.jsonl").open("rb"))
                rows = [
                    (width, stack.enter_context((self.folder / name).open("rb")))
                    for name, width in self.widths.items()
                ]
                if json.loads(lines.readline()) != header:
                    return done
                for line, stamp in zip(lines, stamps, strict=False):
                    content = json.loads(line)
                    entry = Done(**content["item"])
                    row = b""
                    if entry.fault is None:
                        row = _sum(*(file.read(4 * width) for width, file in rows))
                    if entry.stamp != stamp or _line(entry, row) != line:
                        break
                    done.append(entry)
                    self._sums += row
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        return done

    def _open(self, header: dict[str, Any]) -> None:
        """Cut the files to what `done` covers, and open them for more."""
        good = sum(entry.fault is None for entry in self.done)
        for name, width in self.widths.items():
            path = self.folder / name
            path.touch()
            os.truncate(path, good * width * 4)
            self._files[name] = path.open("ab")
        with whole_file(self.folder / "journal.jsonl") as fresh, fresh.open("wb") as file:
            file.write(f"{json.dumps(header)}\n".encode())
            file.writelines(self._lines(self.done, 0))
        self._files["journal.jsonl"] = (self.folder / "journal.jsonl").open("ab")
        self._waiting: list[Done] = []
        self._synced = time.monotonic()

    def append(self, entries: Sequence[Done], arrays: dict[str, NDArray[np.float32]]) -> None:
        """Add items in order, and the numbers of those that were encoded: (n, P) "vectors", perhaps (n, C) "codes"."""
        rows = [np.ascontiguousarray(arrays[name], dtype="<f4") for name in self.widths]
        for name, array in zip(self.widths, rows, strict=True):
            self._files[name].write(array.tobytes())
        for parts in zip(*rows, strict=True):
            self._sums += _sum(*(part.tobytes() for part in parts))
        self._waiting += entries
        self.done += entries
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Have all of it on the disk."""
        for name in self.widths:
            self._files[name].flush()
            os.fsync(self._files[name].fileno())
        lines = self._files["journal.jsonl"]
        good = sum(entry.fault is None for entry in self._waiting)
        lines.writelines(self._lines(self._waiting, len(self._sums) // _SUM - good))
        lines.flush()
        os.fsync(lines.fileno())
        self._waiting.clear()
        self._synced = time.monotonic()

    def _lines(self, entries: Sequence[Done], row: int) -> Iterator[bytes]:
        """Give the lines of items, the first encoded one of which is `row`."""
        for entry in entries:
            good = entry.fault is None
            yield _line(entry, bytes(self._sums[row * _SUM : (row + 1) * _SUM]) if good else b"")
            row += good

    def verify(self, arrays: Sequence[NDArray[np.float32]]) -> None:
        """Compare finished arrays, in the order of `widths`, with what the encoder gave.

        Raises:
            StoreError: the disk gave back other numbers.
        """
        for row, parts in enumerate(zip(*arrays, strict=True)):
            if _sum(*(part.tobytes() for part in parts)) != self._sums[row * _SUM : (row + 1) * _SUM]:
                raise StoreError(
                    f"The numbers of item {row:,} were altered on the disk below {self.folder} after they were written. "
                    "Check the disk, then run the command again."
                )

    def write_array(self, name: str, target: Path) -> None:
        """Write one of the files as a NumPy array (n, width), float32."""
        good = sum(entry.fault is None for entry in self.done)
        with (self.folder / name).open("rb") as raw, target.open("xb") as file:
            shape = (good, self.widths[name])
            np.lib.format.write_array_header_1_0(
                file, {"descr": "<f4", "fortran_order": False, "shape": shape}
            )
            shutil.copyfileobj(raw, file, 1 << 20)

    def close(self) -> None:
        """Close the files and keep what was done for another run."""
        for file in self._files.values():
            try:
                file.close()
            except OSError:  # a full disk: what could not be written is done again
                continue

    def remove(self) -> None:
        """Close the files and remove the folder."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _sum(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_SUM)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _line(entry: Done, row: bytes) -> bytes:
    """Return an item's line: itself, the checksum of its numbers, and one of the line."""
    item = {name: value for name, value in asdict(entry).items() if name != "original"}
    content = json.dumps({"item": item, "numbers": row.hex()})
    return f'{content[:-1]}, "line": "{_sum(content.encode()).hex()}"}}\n'.encode()
