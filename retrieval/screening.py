"""Read an image file's structure before anything decodes it, and refuse what would cost far more than it should.

A few bytes can ask for seconds of work or gigabytes: scans, chunks, tiles and frames are counted here, without a pixel.
"""

from __future__ import annotations

from dataclasses import dataclass

from retrieval.errors import DataError


@dataclass(frozen=True)
class Limits:
    """The largest images that are decoded.

    Attributes:
        pixels: width × height.
        bytes: of the file.
        side: of width and of height, in pixels.
        aspect: how many times longer one side may be than the other.
        memory: bytes that decoding one image may take.
        scans: passes over the image that a JPEG may ask for; photographs have ten at most.
    """

    pixels: int = 25_000_000
    bytes: int = 20_000_000
    side: int = 20_000
    aspect: int = 1_000
    memory: int = 600_000_000
    scans: int = 64

    def check_size(self, name: str, width: int, height: int) -> None:
        """Refuse an image by its size.

        Raises:
            DataError: too many pixels, none, or a side that is too long.
        """
        if min(width, height) < 1:
            raise DataError(f"{name} has no pixels ({width} × {height}).")
        said = f"{name} has {width} × {height} pixels; the limit is"
        if width * height > self.pixels:
            raise DataError(f"{said} {self.pixels:,}. Save it smaller, or raise the limit.")
        if max(width, height) > self.side:
            raise DataError(f"{said} {self.side:,} on each side. Save it smaller.")
        if max(width, height) > self.aspect * min(width, height):
            raise DataError(
                f"{said} a side of {self.aspect:,} times the other. Cut it, or save it in another shape."
            )


def screen(content: bytes, limits: Limits, name: str) -> None:
    """Refuse an encoded image by its structure.

    Raises:
        DataError: it would cost more than an image may.
    """
