"""Limits on the images to decode."""

from __future__ import annotations

from dataclasses import dataclass

from retrieval.errors import DataError

REDUCIBLE = 4
"""A JPEG of up to this many times `Limits.pixels` is accepted, and decoded at half its size."""


@dataclass(frozen=True)
class Limits:
    """Limits on images to decode.

    Attributes:
        pixels: largest width × height. A JPEG with up to four times as many pixels, such as a
            phone's photo of 48 megapixels, is decoded at half its width and height.
        bytes: largest file size in bytes.
        side: largest width or height in pixels.
        aspect: largest ratio of the longer to the shorter side.
    """

    pixels: int = 25_000_000
    bytes: int = 20_000_000
    side: int = 20_000
    aspect: int = 1_000

    @property
    def memory(self) -> int:
        """Memory limit in bytes for decoding one image, from measurements of the largest images."""
        return 64_000_000 + 24 * self.pixels

    def check_size(self, name: str, width: int, height: int, times: int = 1) -> None:
        """Check the size of an image, which may have up to `times` × `pixels` pixels.

        Raises:
            DataError: the image has too many pixels or a side that is too long.
        """
        longer = max(width, height)
        shorter = max(1, min(width, height))
        beyond = f"{name} has {width} × {height} pixels; the limit is"
        if width * height > times * self.pixels:
            advice = "Save it smaller, or raise the limit on pixels."
            raise DataError(f"{beyond} {self.pixels:,}. {advice}")
        if longer > self.side:
            raise DataError(f"{beyond} {self.side:,} on each side. Save it smaller.")
        if longer > self.aspect * shorter:
            raise DataError(
                f"{beyond} {self.aspect:,} for the ratio of its sides. Crop or split it."
            )
