"""What a long encoding has done so far, on disk, so that it goes on where it stopped."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import StoreError

_SYNC_SECONDS = 2.0


@dataclass(frozen=True)
class Done:
    """One item that was dealt with.

    Attributes:
        stamp: names the item and its state (`Source.stamp`).
        fault: why it was skipped; None when it was encoded.
        bytes: of the original image, as are `width` and `height` in pixels.
        width: see `bytes`.
        height: see `bytes`.
    """

    stamp: str
    fault: str | None = None
    bytes: int | None = None
    width: int | None = None
    height: int | None = None


class Journal:
    """Vectors and codes of the items done so far, in a folder beside the output.

    Numbers are appended and synced before the lines that speak of them, so a journal cut off anywhere is true up to
    its last whole line.

    Args:
        folder: `<output>.partial`; made when it is not there.
        header: what the work depends on; a journal with another header starts over.
        widths: numbers an item in each file: {"vectors": P} and perhaps {"codes": C}.
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
        self._lock = _lock(folder)
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
        """Return the longest beginning of the items that an earlier run has done."""
        try:
            lines = (self.folder / "journal.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
            if json.loads(lines[0]) != header:
                return []
            room = min(
                (self.folder / name).stat().st_size // (4 * width) for name, width in self.widths.items()
            )
            done: list[Done] = []
            good = 0
            for line, stamp in zip(lines[1:], stamps, strict=False):
                entry = Done(**json.loads(line))
                good += entry.fault is None
                if entry.stamp != stamp or good > room:
                    break
                done.append(entry)
            return done
        except (OSError, ValueError, IndexError, TypeError):
            return []

    def _open(self, header: dict[str, Any]) -> None:
        """Cut the files to what `done` covers, and open them for more."""
        good = sum(entry.fault is None for entry in self.done)
        for name, width in self.widths.items():
            path = self.folder / name
            path.touch()
            os.truncate(path, good * width * 4)
            self._files[name] = path.open("ab")
        lines = [json.dumps(header), *(json.dumps(asdict(entry)) for entry in self.done)]
        fresh = self.folder / "journal.new"
        fresh.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        fresh.replace(self.folder / "journal.jsonl")
        self._files["journal.jsonl"] = (self.folder / "journal.jsonl").open("ab")
        self._waiting: list[Done] = []
        self._synced = time.monotonic()

    def append(self, entries: Sequence[Done], arrays: dict[str, NDArray[np.float32]]) -> None:
        """Add items in order, and the numbers of those that were encoded: (n, P) "vectors", perhaps (n, C) "codes"."""
        for name in self.widths:
            self._files[name].write(np.ascontiguousarray(arrays[name], dtype="<f4").tobytes())
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
        lines.write("".join(f"{json.dumps(asdict(entry))}\n" for entry in self._waiting).encode())
        lines.flush()
        os.fsync(lines.fileno())
        self._waiting.clear()
        self._synced = time.monotonic()

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
        os.close(self._lock)

    def remove(self) -> None:
        """Close the files and remove the folder."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _lock(folder: Path) -> int:
    """Take the folder for this process; given back when the descriptor is closed, also by a crash.

    Raises:
        StoreError: another process has it.
    """
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # not on this system: two runs at once are the user's risk
        pass
    except OSError:
        os.close(handle)
        raise StoreError(
            f"Another process is building this index (it holds {folder}). Wait for it, or stop it."
        ) from None
    return handle
