"""Decode and encode items: the long part of building an index."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from retrieval.errors import DataError
from retrieval.serving.bundle import Bundle
from retrieval.serving.images import Limits, decode, full_size, read_image
from retrieval.serving.index.origins import Source, Sources
from retrieval.serving.index.sources import contents
from retrieval.serving.progress import Meter
from retrieval.serving.threads import ahead

_SHOWN = 10  # faults that a message spells out


@dataclass(frozen=True)
class Done:
    """One item that was decoded, or why it could not be.

    Attributes:
        stamp: names the item and its state (`Source.stamp`).
        fault: why it was skipped; None when it was encoded.
        bytes: size of the original image.
        width: of the original image, in pixels.
        height: of the original image, in pixels.
        original: what the index keeps of the original.
    """

    stamp: str
    fault: str | None = None
    bytes: int | None = None
    width: int | None = None
    height: int | None = None
    original: builtins.bytes | None = None


class Sink(Protocol):
    """Takes what was encoded: an index, or a part of a folder of embeddings."""

    def append(self, entries: Sequence[Done], arrays: dict[str, NDArray[np.float32]]) -> None:
        """Take items in order, and the rows of those that have no fault."""

    def sync(self) -> None:
        """Have all of it on the disk."""


@dataclass(frozen=True)
class _Decoded:
    """An encoder input (or None with a fault) and what is kept of the original."""

    done: Done
    pixels: NDArray[Any] | None


@dataclass(frozen=True)
class Encoding:
    """Items decoded in threads and encoded in batches, into a sink.

    Args:
        bundle: encodes.
        sources: the items.
        batch: items that go through the encoder at once.
        workers: threads that decode.
        limits: the largest images that are decoded.
        skip_bad: leave out images that cannot be used, instead of refusing all.
        kept: makes what is kept of an original from its bytes and the decoded image; None keeps nothing.
        features: whether the backbone's features are wanted too.
        tell: say what is left out as it is found.
    """

    bundle: Bundle
    sources: Sources
    batch: int
    workers: int
    limits: Limits
    skip_bad: bool
    kept: Callable[[bytes, Image.Image], bytes] | None = None
    features: bool = False
    tell: bool = True

    def encode(self, sink: Sink) -> None:
        """Decode and encode all items.

        Raises:
            DataError: images that cannot be used, without `skip_bad`; all of them were looked for.
        """
        items = self.sources.items
        faults: list[str] = []
        with Meter("encoding", len(items), "items") as meter:
            waiting: list[_Decoded] = []
            for decoded in self._decode(items):
                self._report(decoded.done, faults, meter)
                meter.update()
                if faults and not self.skip_bad:
                    continue  # nothing will be written: only look for all that is wrong
                waiting.append(decoded)
                if len(waiting) == self.batch:
                    self._flush(waiting, sink)
                    waiting = []
            if not (faults and not self.skip_bad):
                self._flush(waiting, sink)
        if faults and not self.skip_bad:
            more = f"\n  … and {len(faults) - _SHOWN:,} more" if len(faults) > _SHOWN else ""
            shown = "\n".join(f"  - {fault}" for fault in faults[:_SHOWN])
            raise DataError(
                f"{len(faults):,} of {len(items):,} items cannot be used:\n{shown}{more}\n"
                "Mend or remove them, or leave them out with --skip-bad (in Python skip_bad=True). Nothing was written."
            )
        if len(faults) == len(items):
            raise DataError(f"None of the {len(items):,} items can be used. The first: {faults[0]}")
        sink.sync()

    def _report(self, entry: Done, faults: list[str], meter: Meter) -> None:
        if entry.fault is not None:
            faults.append(entry.fault)
            if self.skip_bad and self.tell:
                meter.say(f"skipped: {entry.fault}")

    def _decode(self, items: Sequence[Source]) -> Iterator[_Decoded]:
        """Give decoded items in order, a few batches ahead of their use."""
        if self.sources.features is not None:
            yield from map(self._row, items)
            return
        given = contents(((item, item.origin) for item in items), self.limits.bytes)
        yield from ahead(self._image, given, workers=self.workers, most=2 * self.batch)

    def _image(self, given: tuple[Source, bytes | DataError | None]) -> _Decoded:
        preprocessing = self.bundle.manifest.input.preprocessing
        assert preprocessing is not None
        item, content = given
        stamp, name = item.stamp(), item.name
        try:
            if isinstance(content, DataError):
                raise content
            if content is None and item.path is None:
                assert item.origin is not None
                content = item.origin.read(self.limits.bytes)
            elif content is None:
                assert item.path is not None
                content = read_image(item.path, self.limits, name)
            image = decode(content, self.limits, name)
            try:
                pixels = preprocessing(image)
                original = self.kept(content, image) if self.kept else None
            except DataError as fault:
                raise DataError(f"{name}: {fault}") from fault
        except DataError as fault:
            return _Decoded(Done(stamp, str(fault)), None)
        return _Decoded(Done(stamp, None, len(content), *full_size(image), original), pixels)

    def _row(self, item: Source) -> _Decoded:
        assert self.sources.features is not None
        values = self.sources.features[item.row]
        if not np.isfinite(values).all():
            fault = f"{item.name}: vector {item.key} holds NaN, infinity or a number beyond float32."
            return _Decoded(Done(item.stamp(), fault), None)
        return _Decoded(Done(item.stamp()), values)

    def _flush(self, decoded: list[_Decoded], sink: Sink) -> None:
        if not decoded:
            return
        good = [one.pixels for one in decoded if one.pixels is not None]
        shape = (0, *self.bundle.manifest.input.shape)
        pixels = np.stack(good) if good else np.empty(shape, self.bundle.manifest.input.dtype)
        if self.features:
            features = self.bundle.features(pixels, batch=self.batch)
            encoded = self.bundle.encode_features(features, batch=self.batch)
        else:
            encoded = self.bundle.encode(pixels, batch=self.batch)
        arrays = {"vectors": encoded.vector, **({"features": features} if self.features else {})}
        if encoded.code is not None:
            arrays["codes"] = encoded.code
        sink.append([one.done for one in decoded], arrays)
