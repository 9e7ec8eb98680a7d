"""Check all images of a data set before training, and leave out those that cannot be read."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from retrieval.base.files import cache_folder, write_bytes
from retrieval.base.machine import cores
from retrieval.base.progress import Meter
from retrieval.data.cache import files_identity
from retrieval.errors import DataError
from retrieval.images.decoding import decode
from retrieval.images.image_files import ImageFiles

log = logging.getLogger(__name__)

# Largest number of images that a message names.
_MAX_NAMED = 10
ADVICE = "Set [data] skip_bad = true to leave out what cannot be read."


def skip_unreadable(files: Sequence[Path], what: str) -> tuple[list[int], list[str]]:
    """Return the indices of the readable images, and a sentence on each unreadable image.

    Each image is decoded in full, because a truncated file can have an intact header. The result is
    cached until a file changes. `what` names the data set in messages.

    Raises:
        DataError: no image can be read.
    """
    cached = cache_folder() / "readable" / f"{files_identity(files)}.json"
    try:
        faults = [str(text) for text in json.loads(cached.read_bytes())]
    except (OSError, ValueError, TypeError):
        faults = []
    if len(faults) != len(files):
        faults = _faults(files)
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(cached, json.dumps(faults).encode(), shared=True)
        except OSError as error:
            # Not fatal: the next run checks again.
            log.warning("%s cannot be written: %s.", cached, error.strerror or error)
    reasons = [text for text in faults if text]
    if reasons and len(reasons) == len(files):
        raise DataError(f"{what}: none of its {len(files):,} images can be read. {reasons[0]}")
    if reasons:
        lines = reasons[:_MAX_NAMED]
        if len(reasons) > _MAX_NAMED:
            lines.append(f"… and {len(reasons) - _MAX_NAMED:,} more.")
        log.warning(
            "%s: %d of %d images cannot be read and are left out:%s",
            what,
            len(reasons),
            len(files),
            "".join(f"\n  - {line}" for line in lines),
        )
    readable = [i for i, text in enumerate(faults) if not text]
    return readable, [f"left out: {text}" for text in reasons]


def _faults(files: Sequence[Path]) -> list[str]:
    """Return the reason why each image cannot be read, or "" for a readable image."""

    def fault(file: Path) -> str:
        try:
            decode(file)
        except DataError as error:
            return str(error)
        return ""

    faults = []
    # At most eight threads, because each holds a decoded image in memory.
    with (
        ThreadPoolExecutor(min(8, cores())) as threads,
        Meter("checking images", len(files), "images") as meter,
    ):
        for text in threads.map(fault, files):
            faults.append(text)
            meter.update()
    return faults


def report_left_out(files: ImageFiles, folder: Path, skip_bad: bool) -> list[str]:
    """Log and return a sentence for each reason why files of a folder are left out.

    Raises:
        DataError: a link is broken, and `skip_bad` is false.
    """
    notes = files.notes(folder)
    dangling = files.dangling(folder)
    if dangling:
        if not skip_bad:
            raise DataError(f"{dangling} {ADVICE}")
        notes = [*notes, dangling]
    for note in notes:
        log.warning("%s", note)
    return notes
