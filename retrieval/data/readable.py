"""Check all images of a data set before training, and leave out those that cannot be read."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from retrieval.data.cache import files_identity
from retrieval.errors import DataError
from retrieval.host.cores import cores
from retrieval.host.files import cache_folder, write_bytes
from retrieval.serving.image_files import ImageFiles
from retrieval.serving.images import decode
from retrieval.serving.progress import Meter

log = logging.getLogger(__name__)

SHOWN = 10  # largest number of images that a message names
ADVICE = "Set [data] skip_bad = true to leave out what cannot be read."


def skip_unreadable(files: Sequence[Path], what: str) -> tuple[list[int], list[str]]:
    """Return the indices of the readable images, and a sentence on each of the others.

    Each image is decoded in full, because a truncated file can have an intact header. The result is
    cached until a file changes. `what` names the data set in messages.

    Raises:
        DataError: no image can be read.
    """
    cached = cache_folder() / "readable" / f"{files_identity(files)}.json"
    bad = _remembered(cached, len(files))
    if bad is None:
        bad = _unreadable(files)
        _remember(cached, bad)
    if len(bad) == len(files):
        raise DataError(
            f"{what}: none of its {len(files):,} images can be read. {next(iter(bad.values()), '')}"
        )
    if bad:
        listed = "".join(f"\n  - {text}" for text in [*bad.values()][:SHOWN])
        more = f"\n  - … and {len(bad) - SHOWN:,} more." if len(bad) > SHOWN else ""
        log.warning(
            "%s: %d of %d images cannot be read and are left out:%s%s",
            what,
            len(bad),
            len(files),
            listed,
            more,
        )
    return [i for i in range(len(files)) if i not in bad], [
        f"left out: {text}" for text in bad.values()
    ]


def report_left_out(files: ImageFiles, folder: Path, skip_bad: bool) -> list[str]:
    """Return and log the reasons why files in a folder are left out, a sentence each.

    Raises:
        DataError: a link is broken, and `skip_bad` is false.
    """
    dangling = files.dangling(folder)
    if dangling and not skip_bad:
        raise DataError(f"{dangling} {ADVICE}")
    notes = [*files.notes(folder), *([dangling] if dangling else [])]
    for note in notes:
        log.warning("%s", note)
    return notes


def _unreadable(files: Sequence[Path]) -> dict[int, str]:
    def fault(file: Path) -> str | None:
        try:
            decode(file)
        except DataError as error:
            return str(error)
        return None

    reasons: dict[int, str] = {}
    # At most eight threads, because each holds a decoded image in memory.
    with (
        ThreadPoolExecutor(min(8, cores())) as threads,
        Meter("checking images", len(files), "images") as meter,
    ):
        for i, text in enumerate(threads.map(fault, files)):
            meter.update()
            if text:
                reasons[i] = text
    return reasons


def _remembered(path: Path, count: int) -> dict[int, str] | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        bad = {int(i): str(text) for i, text in values.items()}
    except (OSError, ValueError, AttributeError):
        return None
    return bad if all(0 <= i < count for i in bad) else None


def _remember(path: Path, bad: dict[int, str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, json.dumps(bad).encode(), shared=True)
    except OSError as error:  # not fatal: the next run checks again
        log.warning(
            "The result of checking the images cannot be stored in %s: %s.",
            path,
            error.strerror or error,
        )
