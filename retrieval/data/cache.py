"""Features of a frozen backbone, computed once and kept on disk.

A cache entry is a folder with `features.f32` (rows of float32) and `sums`, a checksum of each block
of rows, which is zero until the block is written. Blocks whose checksum is zero or wrong are
computed, so an interrupted run continues where it stopped, and a damaged file is repaired.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from retrieval.base.arrays import Floats32, Ints
from retrieval.base.files import cache_folder
from retrieval.base.memory_map import FileMap
from retrieval.base.photo_files import address_of, remote_state
from retrieval.base.progress import Meter
from retrieval.data.loading import inputs
from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.data.datasets import Dataset
    from retrieval.images.preprocessing import Preprocessing


log = logging.getLogger(__name__)

# Raise this version whenever the format, decoding or resizing changes, so that no run reuses
# features from before the change.
_FORMAT = 4
_CHECKSUM_BYTES = 16


def checksum(content: Any) -> bytes:
    """Return a hash of 16 bytes."""
    return hashlib.blake2b(content, digest_size=16).digest()


def frozen_features(
    backbone_features: Callable[[Tensor], Tensor],
    dataset: Dataset,
    preprocessing: Preprocessing | None,
    *,
    width: int,
    fingerprint: str,
    device: torch.device | str,
    batch_size: int,
) -> Floats32:
    """Return every item's features (N, F), memory-mapped, from the cache on disk or computed now.

    The entry's name is a hash of everything that could change a bit of a feature: the fingerprint
    of the backbone, the preprocessing, the items' content, the batch size and the device type. A
    dataset without `arrays` or `files` cannot be identified; each run computes its features into a
    temporary file.

    `backbone_features` maps raw inputs on `device` to features (B, `width`); its backbone must be
    in evaluation mode. Writing to the result changes memory only, never the file.

    Raises:
        DataError: an item cannot be read, a feature is not finite, or the cache cannot be written.
    """
    identity = dataset_identity(dataset)
    entry = None
    if identity is not None:
        # The batch size and the device count, because they change how torch rounds.
        device_type = torch.device(device).type
        key = [_FORMAT, fingerprint, repr(preprocessing), identity, batch_size, device_type, width]
        name = checksum(json.dumps(key).encode()).hex()
        entry = cache_folder() / "features" / name

    def compute(items: Ints) -> Iterator[Floats32]:
        try:
            for x in inputs(dataset, items, preprocessing, batch_size):
                with torch.no_grad():
                    features = backbone_features(x.to(device))
                yield features.float().cpu().numpy()
        except OSError as error:  # from the dataset, not from the cache
            raise DataError(f"An item of the dataset cannot be read: {error}.") from error

    try:
        with _locked(entry) as folder:
            _fill(folder, dataset, width, batch_size, compute)
            if not len(dataset):
                return np.empty((0, width), np.float32)
            path = folder / "features.f32"
            last_words = f"Error: {path} was cut short while it was read. Run the command again."
            with path.open("rb") as file:
                return FileMap(file, last_words).floats((len(dataset), width))
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.ENOSPC:
            reason = "the disk is full"
        where = "a temporary folder"
        variable = "TMPDIR"
        if entry is not None:
            where = str(entry)
            variable = "RETRIEVAL_CACHE"
        raise DataError(
            f"Features cannot be kept in {where}: {reason}. Make room, or set {variable} to"
            " another folder."
        ) from error


@contextmanager
def _locked(entry: Path | None) -> Iterator[Path]:
    """Context manager: an entry's locked folder, or a temporary folder if there is no entry."""
    if entry is None:
        log.warning("The dataset has no arrays or files, so features are kept for this run only.")
        with tempfile.TemporaryDirectory(
            prefix="retrieval-features-", ignore_cleanup_errors=True
        ) as temporary:
            yield Path(temporary)
        return
    entry.mkdir(parents=True, exist_ok=True)
    lock = FileLock(entry / "lock")
    # Try without waiting first, to tell the user why nothing happens.
    try:
        acquired = lock.acquire(timeout=0)
    except Timeout:
        log.warning("Waiting for another process that computes the features %s.", entry)
        acquired = lock.acquire()
    except NotImplementedError as error:  # a file system without locks
        raise OSError(str(error)) from error
    with acquired:
        yield entry


def _fill(
    folder: Path,
    dataset: Dataset,
    width: int,
    batch_size: int,
    compute: Callable[[Ints], Iterator[Floats32]],
) -> None:
    """Compute an entry's missing and damaged blocks."""
    row_bytes = 4 * width
    starts = range(0, len(dataset), batch_size)
    items = np.arange(len(dataset))
    blocks = [items[start : start + batch_size] for start in starts]
    features_file = folder / "features.f32"
    sums_file = folder / "sums"
    for path in (features_file, sums_file):
        path.touch()
    # Read and write, which neither empties a file nor ignores `seek`.
    with features_file.open("r+b") as data, sums_file.open("r+b") as sums:
        missing = []
        damaged = 0
        for number, block in enumerate(blocks):
            stored_sum = sums.read(_CHECKSUM_BYTES)
            content = data.read(len(block) * row_bytes)
            if any(stored_sum) and checksum(content) == stored_sum:
                continue
            missing.append(number)
            damaged += any(stored_sum)
        if damaged:
            log.warning(
                "%d of %d blocks of cached features in %s are damaged; computing them again.",
                damaged,
                len(blocks),
                folder,
            )
        if not missing:
            return
        chosen = np.concatenate([blocks[number] for number in missing])
        with Meter("features", len(chosen), "items") as meter:
            # Use plain writes: with a full disk, writing to mapped memory would kill the process.
            for number, features in zip(missing, compute(chosen), strict=True):
                _check(features, blocks[number], width, dataset)
                content = np.ascontiguousarray(features, dtype="<f4").tobytes()
                data.seek(batch_size * number * row_bytes)
                data.write(content)
                data.flush()
                # Written last: an interruption before it leaves a block to be computed again.
                sums.seek(number * _CHECKSUM_BYTES)
                sums.write(checksum(content))
                sums.flush()
                meter.update(len(features))
        os.fsync(data.fileno())


def _check(
    features: Floats32,
    items: Ints,
    width: int,
    dataset: Dataset,
) -> None:
    if features.shape != (len(items), width):
        raise DataError(
            f"The backbone gave features of shape {features.shape}, not {(len(items), width)}."
        )
    bad = np.flatnonzero(~np.isfinite(features).all(axis=1))
    if len(bad):
        raise DataError(
            f"The backbone's features of {dataset.keys[int(items[bad[0]])]} are not finite. Check"
            " its weights and the image."
        )


def dataset_identity(dataset: Dataset) -> str | None:
    """Return a hash of a dataset's items in order, or None if it has neither `arrays` nor `files`.

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
            block = np.ascontiguousarray(array[start : start + rows])
            digest.update(block.data.cast("B"))
        return digest.hexdigest()
    files = getattr(dataset, "files", None)
    if files is None:
        return None
    digest.update(files_identity(files).encode())
    boxes = getattr(dataset, "boxes", None)
    if boxes is not None:
        edges = [None if box is None else tuple(map(float, box)) for box in boxes]
        digest.update(repr(edges).encode())
    return digest.hexdigest()


def files_identity(files: Iterable[Path]) -> str:
    """Return a hash of files in order, by path, size and modification time."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        if address_of(file):
            digest.update(f"{file}\0{remote_state(file)}\n".encode("utf-8", "surrogateescape"))
            continue
        try:
            state = file.stat()
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}.") from error
        line = f"{file.absolute()}\0{state.st_size}\0{state.st_mtime_ns}\n"
        # A file's name may be no UTF-8.
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
