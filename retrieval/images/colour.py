"""Bring decoded images to 8-bit grey or RGB in sRGB, by a fixed rule for each mode."""

from __future__ import annotations

import functools
import io
from typing import Any, Literal

import numpy as np
from PIL import Image

from retrieval.errors import DataError

SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
BITS = "bits a sample"
"""Key of `Image.info` for the file's bits per sample, if Pillow's 8-bit mode hides them."""
_PROFILE = "icc_profile"
"""Key of `Image.info` for the file's colour profile."""
_MAX_PROFILE_BYTES = 1 << 22
_SRGB_TOLERANCE = 1  # largest difference, of 255, between sRGB and a vendor's profile of it
_MODES = {b"GRAY": "L", b"RGB ": "RGB", b"CMYK": "CMYK"}
"""Mode of the pixels to which a profile applies, by the colour space in the profile's header."""
_WITHOUT_RANGE = {"F": "floating-point", "I": "32-bit"}
_BAND = 1_000_000  # pixels


def to_mode(image: Image.Image, mode: Literal["L", "RGB"]) -> Image.Image:
    """Return the image in 8-bit grey or RGB, by a fixed rule for each mode.

    A colour profile is applied; see `to_srgb`. 16-bit values keep their upper 8 bits, as in Pillow
    and OpenCV. Transparent images are placed on a white background. 32-bit and floating-point grey
    is refused, because its range is unknown: 0–1 and 0–255 are both common.

    Raises:
        DataError: the image's mode has no fixed range, or Pillow cannot convert it.
    """
    check_range(image, "an image")
    try:
        return _converted(to_srgb(image), mode)
    except (ValueError, KeyError, OSError) as error:
        change = f"an image of mode {image.mode} cannot be converted to {mode}"
        raise DataError(f"{change}: {error}.") from error


def _converted(image: Image.Image, mode: str) -> Image.Image:
    """Return the image in a mode without transparency, whatever its colour profile."""
    if image.mode == mode and "transparency" not in image.info:
        return image
    if image.mode in SIXTEEN_BITS:
        return _upper_bits(image).convert(mode)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        return _on_white(image, mode)
    if image.mode == "LAB":
        image = image.convert("RGB")
    return image.convert(mode)


def to_srgb(image: Image.Image) -> Image.Image:
    """Return the image in sRGB and without its colour profile, on white and in 8 bits.

    An image that has no profile, or that of sRGB, is returned as it is. So is one whose profile is
    damaged, larger than 4 MiB, or for other pixels, such as an RGB profile of a grey image.
    """
    profile = image.info.get(_PROFILE) or b""
    mode = _MODES.get(profile[16:20])
    base = {"CMYK": "CMYK", "P": "RGB"}.get(image.mode) or Image.getmodebase(image.mode)
    if mode != base or len(profile) > _MAX_PROFILE_BYTES:
        return image
    transform = _transform(profile, mode)
    if transform is None:
        return image
    out = _applied(transform, _converted(image, mode))
    out.info = {k: v for k, v in image.info.items() if k not in (_PROFILE, "transparency")}
    return out


@functools.lru_cache(maxsize=8)
def _transform(profile: bytes, mode: str) -> Any:
    """Return a transform to sRGB, or `None` if a profile is unusable or that of sRGB itself."""
    from PIL import ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        target = ImageCms.createProfile("sRGB")
        # LittleCMS's tables for grey are too coarse for dark pixels.
        if mode == "L":
            flags = ImageCms.Flags.NOOPTIMIZE
        else:
            flags = ImageCms.Flags.NONE
        transform = ImageCms.buildTransform(source, target, mode, "RGB", flags=flags)
    except Exception:  # a broken profile must not prevent decoding
        return None
    if mode == "CMYK":
        return transform
    # Each vendor writes another profile of sRGB, so compare what a profile does to many colours.
    colours = np.random.default_rng(0).integers(0, 256, (64, 64, len(mode)), np.uint8)
    image = Image.frombytes(mode, (64, 64), colours.tobytes())
    change = np.asarray(_applied(transform, image), int) - np.asarray(image, int)
    if np.abs(change).max() <= _SRGB_TOLERANCE:
        return None
    return transform


def _applied(transform: Any, image: Image.Image) -> Image.Image:
    """Return an image in L, RGB or CMYK in the colours of sRGB, as L or RGB."""
    out: Image.Image
    if image.mode == "L":
        greys = transform.apply(Image.frombytes("L", (256, 1), bytes(range(256))))
        out = image.point(list(greys.convert("L").tobytes()))
    else:
        out = transform.apply(image)
    return out


def check_range(image: Image.Image, name: str) -> None:
    """Refuse an image whose mode does not define the values of black and white.

    Raises:
        DataError: the image is 32-bit or floating-point grey.
    """
    if image.mode not in _WITHOUT_RANGE:
        return
    raise DataError(
        f"{name} is {_WITHOUT_RANGE[image.mode]} grey (mode {image.mode}), which does not say what"
        " white is: 1, 255 or any other number. Scale it and save it as 8-bit or 16-bit grey. For"
        " values from 0 to 1: Image.fromarray((values * 255).round().clip(0,"
        " 255).astype('uint8'))."
    )


def _on_white(image: Image.Image, mode: str) -> Image.Image:
    """Return a transparent image on white; converts bands of rows to save memory."""
    out = Image.new(mode, image.size)
    rows = max(1, _BAND // image.width)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        if band.mode == "La":
            band = band.convert("LA")
        band = band.convert("RGBA")
        white = Image.new("RGBA", band.size, (255, 255, 255, 255))
        out.paste(Image.alpha_composite(white, band).convert(mode), (0, top))
    return out


def _upper_bits(image: Image.Image) -> Image.Image:
    """Convert 16-bit grey to 8-bit grey; a transparent value becomes white."""
    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    if (transparent := image.info.get("transparency")) is not None:
        grey[values == transparent] = 255
    return Image.fromarray(grey)


def few_levels(image: Image.Image) -> str | None:
    """Return why a 16-bit image loses most of its levels in 8 bits, or `None` if it does not.

    It loses them if it uses at most a quarter of the 16-bit range, as images of 12-bit cameras do.
    The text completes a sentence that begins with the image's name.
    """
    values = np.asarray(image if image.mode in SIXTEEN_BITS else image.convert("RGB"))
    top = int(values.max(initial=0))
    if image.mode not in SIXTEEN_BITS:
        if image.info.get(BITS) != 16:
            return None
        top = top << 8 | 255  # the largest possible value: Pillow has dropped the lower 8 bits
    if not 0 < top < 1 << 14:
        return None
    if top < 256:
        above = "255, so it is black in 8 bits"
        advice = "Save it as 8 bits"
    else:
        above = f"{top:,} of 65,535, so {(top >> 8) + 1} of 256 levels are left in 8 bits"
        advice = f"Multiply it by {(1 << 16) >> top.bit_length()} before it is saved"
    return f"is a 16-bit image with no value above {above}. {advice}"
