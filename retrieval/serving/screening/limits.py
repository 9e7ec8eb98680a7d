"""How large an image may be, and how much of everything its file may hold."""

from __future__ import annotations

from dataclasses import dataclass

from retrieval.errors import DataError


@dataclass(frozen=True)
class Limits:
    """The largest images that are decoded. Photographs keep far below all of them.

    Attributes:
        pixels: width × height.
        bytes: of the file.
        side: of width and of height, in pixels.
        aspect: how many times longer one side may be than the other.
        scans: passes over the image that a JPEG may ask for; photographs have some ten at most.
        parts: segments, chunks, blocks or boxes of a file.
        tiles: strips or tiles of a TIFF.
        items: images, tiles and metadata blocks of an AVIF or HEIC file.
        interpreted: samples of the few kinds of files that Pillow decodes in Python, one at a time.
    """

    pixels: int = 25_000_000
    bytes: int = 20_000_000
    side: int = 20_000
    aspect: int = 1_000
    scans: int = 64
    parts: int = 20_000
    tiles: int = 100_000
    items: int = 1_000
    interpreted: int = 6_000_000

    @property
    def memory(self) -> int:
        """Bytes that decoding and preprocessing one image may take: the most that the largest ones were seen to."""
        return 64_000_000 + 24 * self.pixels

    def check_size(self, name: str, width: int, height: int) -> None:
        """Refuse an image by its size.

        Raises:
            DataError: too many pixels, or a side that is too long.
        """
        longer, shorter = (width, height) if width > height else (height, width)
        if width * height <= self.pixels and longer <= self.side and longer <= self.aspect * max(1, shorter):
            return
        said = f"{name} has {width} × {height} pixels; the limit is"
        if width * height > self.pixels:
            raise DataError(f"{said} {self.pixels:,}. Save it smaller, or raise the limit.")
        if longer > self.side:
            raise DataError(f"{said} {self.side:,} on each side. Save it smaller.")
        raise DataError(f"{said} one side of {self.aspect:,} times the other. Cut it.")

    def check_count(self, name: str, count: int, limit: int, of: str) -> None:
        """Refuse more than a limit of something.

        Raises:
            DataError: there are more.
        """
        if count > limit:
            raise DataError(f"{name} has more than {limit:,} {of}. Save it anew, as a plain JPEG or PNG.")

    def check_interpreted(self, name: str, samples: int, kind: str) -> None:
        """Refuse what Pillow would decode in Python for too long.

        Raises:
            DataError: there are too many samples.
        """
        if samples > self.interpreted:
            raise DataError(
                f"{name} is a {kind}, which is slow to decode, of {samples:,} samples; the limit for these is "
                f"{self.interpreted:,}. Save it as a PNG."
            )
