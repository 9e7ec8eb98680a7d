"""Where vectors lie, as a sample of them says; kept for as long as they are in memory, since they do not change."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np

from retrieval.serving.index.contract import Floats

_SAMPLE = 256
_OFFSET = 16.0


@dataclass(frozen=True)
class Frame:
    """Where vectors lie far from zero, or are so large or small that float32 loses their squares: how to bring them near."""

    centre: Floats
    scale: np.float32

    def moved(self, vectors: Floats) -> Floats:
        """Return (vectors − centre) × scale: a power of two, so that only the difference is rounded."""
        near = vectors - self.centre
        near *= self.scale
        return near


def _made(vectors: Floats, columns: slice) -> Frame | None:
    """Return the frame that a sample of the rows asks for; it decides about speed, never about the answer."""
    sample = vectors[:: -(-len(vectors) // _SAMPLE), columns].astype(np.float64)
    centre = sample.mean(0)
    spread = float(np.square(sample - centre).sum(1).mean())
    offset = float(np.square(centre).sum())
    far = offset > _OFFSET * spread
    size = spread if far and spread > 0 else offset + spread
    if not far and (size == 0 or 2.0**-60 < size < 2.0**100):
        return None
    if not far:
        centre = np.zeros_like(centre)
    exponent = 0 if size == 0 or 2.0**-60 < size < 2.0**100 else int(np.frexp(size)[1]) // 2
    return Frame(centre.astype(np.float32), np.float32(2.0 ** -max(-126, min(126, exponent))))


_KNOWN: dict[tuple[int, int | None, int | None], tuple[weakref.ref[Floats], Frame | None]] = {}


def frame_of(vectors: Floats, columns: slice) -> Frame | None:
    """Return the frame of some columns of vectors, looked up once for an array: the sample's copies in float64 cost more than a small search."""
    key = id(vectors), columns.start, columns.stop
    known = _KNOWN.get(key)
    if known is None or known[0]() is not vectors:
        known = weakref.ref(vectors, lambda _: _KNOWN.pop(key, None)), _made(vectors, columns)
        _KNOWN[key] = known
    return known[1]
