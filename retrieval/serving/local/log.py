"""What SQLite's write-ahead log would pass over in silence: damage in its midst looks to SQLite like the end of what was written."""

from __future__ import annotations

import struct
import time
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval.serving.files.plain import read_plain

_HEADER, _FRAME = 32, 24
_MAGIC = (0x377F0682, 0x377F0683)
_VERSION = 3_007_000
_PAGES = [1 << bits for bits in range(9, 17)]
_ALL = 0xFFFFFFFF
_TRIES = 5
_PAUSE = 0.05  # seconds: for a process that writes at this moment


def altered(path: Path) -> str | None:
    """Return what is wrong with a write-ahead log, as the end of a sentence; None where it is sound, torn at its end, or not there.

    SQLite reads frames up to the first whose checksum is wrong. After a power cut that is the end. Where whole frames of the
    same round follow, something else has altered the file, and acknowledged writes would be lost.
    """
    fault = None
    for _ in range(_TRIES):
        fault = _altered(path)
        if fault is None:
            return None
        time.sleep(_PAUSE)
    return fault


def _altered(path: Path) -> str | None:
    try:
        content = read_plain(path)
    except OSError:
        return None
    if len(content) <= _HEADER:
        return None  # its first write was cut off
    magic, version, page, _, *_, one, two = struct.unpack(">8I", content[:_HEADER])
    if magic not in _MAGIC or version != _VERSION or page not in _PAGES:
        return "has an altered header"
    order = ">" if magic & 1 else "<"
    words = np.frombuffer(content, f"{order}u4", (_HEADER - 8) // 4)[None]
    if _sums(words, np.zeros((1, 2), np.uint32)).tolist() != [[one, two]]:
        return "has an altered header"
    count = (len(content) - _HEADER) // (_FRAME + page)
    frames = np.frombuffer(content, np.uint8, count * (_FRAME + page), _HEADER).reshape(count, _FRAME + page)
    heads = np.ascontiguousarray(frames[:, :_FRAME]).view(">u4")  # page, pages after a commit, salts, sums
    summed = np.concatenate([frames[:, :8], frames[:, _FRAME:]], axis=1).view(f"{order}u4")
    stored = heads[:, 4:].astype(np.uint32)
    seeds = np.concatenate([np.array([[one, two]], np.uint32), stored])[:-1]
    own = (heads[:, 2:4] == np.frombuffer(content, ">u4", 2, 16)).all(axis=1)
    whole = own & (_sums(summed, seeds) == stored).all(axis=1)
    if whole.all():
        return None
    first = int(np.argmin(whole))
    # What follows in the same transaction may have reached the disk before it; a later transaction began after it was synced.
    ends = first + np.flatnonzero(own[first:] & (heads[first:, 1] > 0))
    return "was altered in its midst" if len(ends) and whole[ends[0] + 1 :].any() else None


def pages(path: Path) -> set[int]:
    """Return the numbers of the pages that a write-ahead log holds."""
    try:
        content = read_plain(path)
    except OSError:
        return set()
    if len(content) <= _HEADER:
        return set()
    page = struct.unpack(">I", content[8:12])[0]
    count = (len(content) - _HEADER) // (_FRAME + page)
    frames = np.frombuffer(content, np.uint8, count * (_FRAME + page), _HEADER).reshape(count, _FRAME + page)
    heads = np.ascontiguousarray(frames[:, :16]).view(">u4")
    own = (heads[:, 2:] == np.frombuffer(content, ">u4", 2, 16)).all(axis=1)
    return set(heads[own, 0].tolist())


def _sums(words: NDArray[np.uint32], seeds: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return SQLite's checksums (N, 2) of rows of words (N, 2 × n), each begun with a seed (N, 2).

    For each pair x, y: one += x + two, then two += y + one, modulo 2³². That is linear, so that a row's is a product.
    """
    weights, start = _weights(words.shape[1] // 2)
    with np.errstate(over="ignore"):
        return np.stack(
            [(words * weights[side]).sum(axis=1, dtype=np.uint32) + (seeds * start[side]).sum(axis=1, dtype=np.uint32) for side in (0, 1)],
            axis=1,
        )  # fmt: skip


@cache
def _weights(pairs: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return what each word counts in either sum (2, 2 × pairs), and what the seeds count (2, 2)."""
    weights = np.empty((2, 2 * pairs), np.uint32)
    power = [[1, 0], [0, 1]]  # of [[1, 1], [1, 2]], modulo 2³²
    for pair in reversed(range(pairs)):
        for side in (0, 1):
            one, two = power[side]
            weights[side, 2 * pair : 2 * pair + 2] = (one + two) & _ALL, two
        power = [[(one + two) & _ALL, (one + 2 * two) & _ALL] for one, two in power]
    return weights, np.array(power, np.uint32)
