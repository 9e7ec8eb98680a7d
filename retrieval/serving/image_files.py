"""Formats of images: how their files begin, how large they may be, and which files below a folder
are images.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from retrieval.errors import DataError
from retrieval.host.walk import files_below, leads_nowhere

# Pillow reads dozens of formats, some through other programs (EPS runs Ghostscript): these are all
# that we ask it for.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
EXTENSIONS = frozenset(
    {
        *(".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"),
        *(".avif", ".heic", ".heif", ".hif"),
    }
)


HOW = {
    "AVIF": "is AVIF, which needs a newer Pillow: pip install 'pillow>=11.3'.",
    "HEIF": "is HEIC, which needs pillow-heif: pip install 'embedding-retrieval[heif]'.",
}


def _start(*starts: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(starts)


def _brand(*brands: bytes) -> Callable[[bytes], bool]:
    """Test the brands that an ISO base media file (AVIF, HEIC) names in its first box."""
    return lambda head: head[4:8] == b"ftyp" and any(brand in head[8:] for brand in brands)


STARTS: dict[str, Callable[[bytes], bool]] = {
    "JPEG": _start(b"\xff\xd8\xff"),
    "PNG": _start(b"\x89PNG\r\n\x1a\n"),
    "GIF": _start(b"GIF87a", b"GIF89a"),
    "WEBP": lambda head: head[:4] == b"RIFF" and head[8:12] == b"WEBP",
    "TIFF": _start(b"II*\0", b"MM\0*", b"MM*\0", b"II\0*", b"MM\0+", b"II+\0"),
    "BMP": lambda head: head[:2] == b"BM" and head[6:10] == b"\0\0\0\0",
    "PPM": lambda head: re.match(rb"P[1-6]\s+[0-9#]", head) is not None,
    "AVIF": _brand(b"avif", b"avis"),
    "HEIF": _brand(b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"),
}
"""How a file's first bytes tell its format, by Pillow's name."""

HEAD_BYTES = 64
"""Bytes that tell a format."""


def format_of(content: bytes) -> str | None:
    """Return the format that a file's first bytes name, as Pillow calls it; None for one that is
    not known.
    """
    head = content[:HEAD_BYTES]
    return next((name for name, begins in STARTS.items() if begins(head)), None)


REDUCIBLE = 4
"""How many times `Limits.pixels` a JPEG may have, which is decoded at a half or a quarter of its
size.
"""


@dataclass(frozen=True)
class Limits:
    """The largest images that are decoded.

    Attributes:
        pixels: width × height. A JPEG with up to four times as many is decoded at a half of its
            size, as phones' photos of 48 megapixels are.
        bytes: of the file.
        side: width and height, in pixels.
        aspect: how many times longer one side may be than the other.
    """

    pixels: int = 25_000_000
    bytes: int = 20_000_000
    side: int = 20_000
    aspect: int = 1_000

    @property
    def memory(self) -> int:
        """Bytes that decoding and preprocessing one image may take: the most that the largest ones
        were seen to.
        """
        return 64_000_000 + 24 * self.pixels

    def check_size(self, name: str, width: int, height: int, times: int = 1) -> None:
        """Refuse an image by its size.

        Args:
            name: of the image, for errors.
            width: in pixels.
            height: in pixels.
            times: how many times `pixels` it may have.

        Raises:
            DataError: too many pixels, or a side that is too long.
        """
        longer, shorter = max(width, height), max(1, min(width, height))
        beyond = f"{name} has {width} × {height} pixels; the limit is"
        if width * height > times * self.pixels:
            raise DataError(
                f"{beyond} {self.pixels:,}. Save it smaller, or raise the limit (--max-pixels)."
            )
        if longer > self.side:
            raise DataError(f"{beyond} {self.side:,} on each side. Save it smaller.")
        if longer > self.aspect * shorter:
            raise DataError(f"{beyond} one side of {self.aspect:,} times the other. Cut it.")


@functools.cache
def can_open(format: str) -> bool:
    """Return whether a format can be decoded here: AVIF needs a Pillow that has it, HEIF the
    package pillow-heif.
    """
    if format == "AVIF":
        try:
            from PIL import AvifImagePlugin
        except ImportError:
            return False
        AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # several images are decoded at a time
        return bool(AvifImagePlugin.SUPPORTED)
    if format == "HEIF":
        try:
            from pillow_heif import register_heif_opener
        except ImportError:
            return False
        register_heif_opener(thumbnails=False, decode_threads=1)
    return format in (*FORMATS, "HEIF")


NO_IMAGE = "no image"
"""Why most files are left out."""
_SHOWN = 3  # names of files in a sentence


_OTHERS: dict[str, Callable[[bytes], bool]] = {
    "JPEG 2000": lambda head: head.startswith((b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51")),
    "JPEG XL": lambda head: head.startswith((b"\0\0\0\x0cJXL ", b"\xff\x0a")),
    "Photoshop": lambda head: head.startswith(b"8BPS"),
    "SVG": lambda head: head.startswith(b"<svg"),
}
"""How files of formats begin that are not read."""
_KNOWN = {**STARTS, **_OTHERS}


@dataclass(frozen=True)
class ImageFiles:
    """The images that a folder holds, and what else.

    Attributes:
        images: the image files, sorted.
        left_out: the other files by the reason, which follows "is": "JPEG 2000, which is not read".
        nowhere: links that lead nowhere, sorted: each may have been an image, or a folder of them.
    """

    images: list[Path]
    left_out: dict[str, list[Path]] = field(default_factory=dict)
    nowhere: list[Path] = field(default_factory=list)

    def notes(self, folder: Path) -> list[str]:
        """Return a sentence for each reason: how many files, which ones first, and why."""
        return [
            f"{folder}: {len(files):,} file{'s are' if len(files) > 1 else ' is'} left out, being"
            f" {reason}: {_some(files, folder)}."
            for reason, files in self.left_out.items()
        ]

    def dangling(self, folder: Path) -> str:
        """Return a sentence on the links that lead nowhere; "" for none."""
        if not self.nowhere:
            return ""
        several = len(self.nowhere) > 1
        return (
            f"{folder}: {len(self.nowhere):,} link{'s lead' if several else ' leads'} nowhere: "
            f"{_some(self.nowhere, folder)}. Mend or remove {'them' if several else 'it'}."
        )


def find_images(folder: Path) -> ImageFiles:
    """Return the image files below a folder; hidden files and folders are not looked at.

    A file is an image by its extension, and else by how it begins. Links are followed: see
    `retrieval.host.walk.files_below`.

    Raises:
        DataError: it is not a folder, holds no image, or a folder below it cannot be read.
    """
    images: list[Path] = []
    nowhere: list[Path] = []
    left_out: dict[str, list[Path]] = {}
    for path in sorted(files_below(folder)):
        if leads_nowhere(path):
            nowhere.append(path)
            continue
        reason = _reason(path)
        if reason is None:
            images.append(path)
        else:
            left_out.setdefault(reason, []).append(path)
    files = ImageFiles(images, left_out, nowhere)
    if not images:
        seen = " ".join(filter(None, [*files.notes(folder), files.dangling(folder)]))
        raise DataError(
            f"{folder} holds no image (looked for"
            f" {', '.join(FORMATS)}).{f' {seen}' if seen else ''}"
        )
    return files


def _reason(path: Path) -> str | None:
    """Return why a file is left out; None for an image."""
    if not path.is_file():
        return "no regular file"
    if path.suffix.lower() in EXTENSIONS:
        return None
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        return f"not to be read ({error.strerror or error})"
    kind = next((name for name, fits in _KNOWN.items() if fits(head)), None)
    if kind is None:
        return NO_IMAGE
    return None if kind in FORMATS else f"{kind}, which is not read here"


def _some(files: Sequence[Path], folder: Path) -> str:
    names = [path.relative_to(folder).as_posix() for path in files[:_SHOWN]]
    return ", ".join(names) + (", …" if len(files) > _SHOWN else "")
