"""Features of a frozen backbone, computed once and kept on disk.

A cache entry is a folder with `features.f32`, rows of float32, and `journal.jsonl`. The journal's
first line describes the entry; each further line has the checksum of a finished block of rows.
Blocks without a line or with a wrong checksum are computed (again). An interrupted run therefore
continues where it stopped, and a damaged file is repaired.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.data.loading import RawInputs, inputs
from retrieval.errors import BundleError, DataError, MissingDependency
from retrieval.host.files import cache_folder
from retrieval.serving.progress import Meter
from retrieval.serving.sessions import ahead

if TYPE_CHECKING:
    from retrieval.model.contracts import Dataset
    from retrieval.serving.images import Preprocessing


log = logging.getLogger(__name__)

# Raise this version when the format changes, or decoding or resizing. Otherwise, outdated features
# would be found.
_FORMAT = 2
_JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class Way:
    """A faster way to compute the same features up to rounding, with its own cache entries.

    Attributes:
        name: name of the way, part of its entries' keys.
        features: maps raw inputs (B, …) to features (B, F); called in several threads.
        rows: largest B.
        threads: number of threads, each of which also decodes its inputs.
    """

    name: str
    features: Callable[[Tensor], Tensor]
    rows: int
    threads: int


def frozen_features(
    backbone_features: Callable[[Tensor], Tensor],
    dataset: Dataset,
    preprocessing: Preprocessing | None,
    *,
    fingerprint: str,
    device: torch.device | str,
    batch: int,
    folder: Path | None = None,
    progress: bool = True,
    quicker: Way | None = None,
) -> NDArray[np.float32]:
    """Return features (N, F) of every item, memory-mapped, from the cache on disk or computed now.

    The entry's name is a hash of everything that could change a bit of a feature: the fingerprint,
    the preprocessing, the items' content, the batch size, the device type and, if used, the quicker
    way. An entry begun without the quicker way is completed without it. A dataset without `arrays`
    or `files` cannot be identified; each run computes its features into a temporary file.

    Args:
        backbone_features: maps raw inputs on `device`, uint8 (B, channels, H, W) or float32
            (B, F'), to features (B, F). The backbone must be in evaluation mode.
        dataset: the items.
        preprocessing: the backbone's preprocessing, or `None` for vectors.
        fingerprint: identifies the backbone and its weights.
        device: device of `backbone_features`.
        batch: number of items at a time.
        folder: the cache folder; the default is `cache_folder()`.
        progress: whether to show progress on stderr.
        quicker: used instead of `backbone_features`, unless it raises a `BundleError` or
            `MissingDependency`.

    Returns:
        The features. Writing to them changes memory only, never the file.

    Raises:
        DataError: an item cannot be read, a feature is not finite, or the cache cannot be written.
    """
    content = dataset_identity(dataset)
    parts = [_FORMAT, fingerprint, repr(preprocessing), content, batch, torch.device(device).type]
    entries = (folder or cache_folder()) / "features"
    place = entries / _key(parts)

    def plain(items: NDArray[np.int64]) -> Iterator[NDArray[np.float32]]:
        for x in inputs(dataset, items, preprocessing, batch):
            with torch.no_grad():
                yield backbone_features(x.to(device)).float().cpu().numpy()

    if quicker is not None and not (place / _JOURNAL).exists():
        compute = partial(_in_threads, quicker, RawInputs(dataset, preprocessing, budget=0), batch)
        try:
            entry = None if content is None else entries / _key([*parts, quicker.name])
            return _filled(entry, dataset, batch, compute, progress)
        except (BundleError, MissingDependency) as fault:
            log.info("Features are computed by torch: %s", fault)
    return _filled(None if content is None else place, dataset, batch, plain, progress)


Compute = Callable[[NDArray[np.int64]], Iterator[NDArray[np.float32]]]


def _key(parts: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _in_threads(
    way: Way, raw: RawInputs, batch: int, items: NDArray[np.int64]
) -> Iterator[NDArray[np.float32]]:
    """Yield the features of items, `batch` at a time, decoding and computing in each thread."""
    blocks = [items[i : i + batch] for i in range(0, len(items), batch)]
    shares = (block[i : i + way.rows] for block in blocks for i in range(0, len(block), way.rows))

    def features(chosen: NDArray[np.int64]) -> NDArray[np.float32]:
        return way.features(torch.from_numpy(raw.batch(chosen))).numpy()

    computed = ahead(features, shares, workers=way.threads, most=2 * way.threads)
    for block in blocks:
        yield np.concatenate(list(itertools.islice(computed, -(-len(block) // way.rows))))


def _filled(
    place: Path | None, dataset: Dataset, batch: int, compute: Compute, progress: bool
) -> NDArray[np.float32]:
    """Return an entry's features after computing missing ones; without a place, use a temporary."""

    def computed(items: NDArray[np.int64]) -> Iterator[NDArray[np.float32]]:
        blocks = compute(items)
        while True:
            try:
                features = next(blocks)
            except StopIteration:
                return
            except OSError as error:  # from the dataset, not from the cache
                raise DataError(f"An item of the dataset cannot be read: {error}.") from error
            yield features

    with ExitStack() as stack:
        try:
            if place is None:
                log.warning(
                    "The dataset names no files, so its features are computed for this run only."
                )
                temporary = tempfile.TemporaryDirectory(
                    prefix="retrieval-features-", ignore_cleanup_errors=True
                )
                place = Path(stack.enter_context(temporary))
            else:
                place.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_locked(place / "lock"))
            return _Entry(place, dataset, batch).fill(computed, progress)
        except OSError as error:
            what = (
                "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
            )
            raise DataError(
                f"Features cannot be kept in {place}: {what}. Make room, or set RETRIEVAL_CACHE to"
                " another folder."
            ) from error


class _Entry:
    """One cache entry, locked by this process."""

    def __init__(self, folder: Path, dataset: Dataset, batch: int) -> None:
        self.data, self.journal = folder / "features.f32", folder / _JOURNAL
        self.dataset, self.batch, self.key = dataset, batch, folder.name
        self.blocks = -(-len(dataset) // batch)

    def fill(self, compute: Compute, progress: bool) -> NDArray[np.float32]:
        """Compute missing and damaged blocks, and return all features."""
        width, done = self._verified()
        missing = [block for block in range(self.blocks) if block not in done]
        if missing:
            width = self._compute(missing, width, compute, progress)
        if not self.blocks:
            return np.empty((0, width), np.float32)
        shape = (len(self.dataset), width)
        # Mode "c" (copy on write): the caller's changes do not reach the file, and torch accepts
        # the array without a warning.
        return np.memmap(self.data, dtype=np.float32, mode="c", shape=shape)

    def _verified(self) -> tuple[int, set[int]]:
        """Return the width and the blocks with correct checksums; warn of damaged ones."""
        try:
            lines = self.journal.read_bytes().split()
        except FileNotFoundError:
            return 0, set()
        header = _parsed(lines[0]) if lines else None
        if (
            header is None
            or header.get("key") != self.key
            or not isinstance(header.get("features"), int)
            or header["features"] < 1
        ):
            log.warning(
                "The cached features in %s have a damaged journal; computing them again.",
                self.data.parent,
            )
            self.journal.unlink()
            return 0, set()
        width: int = header["features"]
        sums = {}
        for line in map(_parsed, lines[1:]):
            if line and isinstance(block := line.get("block"), int) and 0 <= block < self.blocks:
                sums[block] = line.get("sum")
        sound = set()
        with self._open() as file:
            for block, checksum in sums.items():
                file.seek(block * self.batch * width * 4)
                if _checksum(file.read(self._rows(block) * width * 4)) == checksum:
                    sound.add(block)
        if len(sound) < len(sums):
            log.warning(
                "%d of %d blocks of cached features in %s are damaged; computing them again.",
                len(sums) - len(sound),
                len(sums),
                self.data.parent,
            )
        if not sound:  # all blocks are damaged, so the header may be too
            self.journal.unlink()
            return 0, sound
        return width, sound

    def _compute(
        self,
        missing: list[int],
        width: int,
        compute: Compute,
        progress: bool,
    ) -> int:
        items = np.concatenate([self._items(block) for block in missing])
        if width == 0:
            self.data.unlink(missing_ok=True)
        with (
            self._open() as data,
            self.journal.open("a", encoding="utf-8") as journal,
            Meter("features", len(items), "items", show=progress) as meter,
        ):
            journal.write("\n")  # ends a line that an interrupted run left incomplete
            # Use plain writes: with a full disk, writing to mapped memory would kill the process.
            for block, features in zip(missing, compute(items), strict=True):
                self._check(block, features, width)
                if width == 0:
                    width = features.shape[1]
                    _append(journal, {"key": self.key, "features": width})
                content = np.ascontiguousarray(features, dtype="<f4").tobytes()
                data.seek(block * self.batch * width * 4)
                data.write(content)
                data.flush()
                _append(journal, {"block": block, "sum": _checksum(content)})
                meter.update(len(features))
            os.fsync(data.fileno())
        return width

    def _check(self, block: int, features: NDArray[np.float32], width: int) -> None:
        expected = (self._rows(block), width or features.shape[-1])
        if features.shape != expected or not features.shape[-1]:
            raise DataError(
                f"The backbone gave features of shape {features.shape}, not {expected}."
            )
        bad = np.flatnonzero(~np.isfinite(features).all(axis=1))
        if len(bad):
            name = self.dataset.keys[int(self._items(block)[bad[0]])]
            raise DataError(
                f"The backbone's features of {name} are not finite. Check its weights and the"
                " image."
            )

    def _items(self, block: int) -> NDArray[np.int64]:
        return np.arange(block * self.batch, block * self.batch + self._rows(block))

    def _rows(self, block: int) -> int:
        return min(self.batch, len(self.dataset) - block * self.batch)

    def _open(self) -> BinaryIO:
        self.data.touch()
        return self.data.open("r+b")


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return a journal line's content, or None if it is incomplete or damaged."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _append(journal: TextIO, values: dict[str, Any]) -> None:
    journal.write(json.dumps(values, separators=(",", ":")) + "\n")
    journal.flush()


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Context manager that lets one process at a time fill an entry, while others wait."""
    try:
        import fcntl
    except ImportError:  # Windows has no such locks: two processes may do the same work
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning(
                "Waiting for another process that computes the same features (%s).", path.parent
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def dataset_identity(dataset: Dataset) -> str | None:
    """Return a hash of a dataset's items in order, or None without `arrays` and `files`.

    Arrays are hashed in full, files by path, size, modification time and the boxes cut from them.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{dataset.kind} {len(dataset)}\n".encode())
    if dataset.arrays is not None:
        array = dataset.arrays
        digest.update(f"{array.dtype.str} {array.shape}\n".encode())
        # Hash in blocks, because a memory-mapped array may not fit in memory.
        rows = max(1, (1 << 24) // max(1, array[:1].nbytes))
        for start in range(0, len(array), rows):
            digest.update(np.ascontiguousarray(array[start : start + rows]).data.cast("B"))
        return digest.hexdigest()
    files = getattr(dataset, "files", None)
    if files is None:
        return None
    digest.update(files_identity(files).encode())
    if (boxes := getattr(dataset, "boxes", None)) is not None:
        digest.update(
            repr([None if box is None else tuple(map(float, box)) for box in boxes]).encode()
        )
    return digest.hexdigest()


def files_identity(files: Iterable[Path]) -> str:
    """Return a hash of files in order, by path, size and modification time."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            state = file.stat()
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
        line = f"{file.absolute()}\0{state.st_size}\0{state.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
