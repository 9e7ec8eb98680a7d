"""Bring an image in any form to an encoder's input: arrays and tensors, colours, resizing.

Training, indexing and serving prepare every image here, so that they see the same pixels.
"""

from __future__ import annotations

import functools
import io
import math
import os
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, TypeGuard, get_args

import numpy as np
from PIL import Image

from retrieval.base.arrays import Array, Pixels
from retrieval.errors import DataError

ImageLike: TypeAlias = "bytes | str | os.PathLike[str] | Image.Image | Array"
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]

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
_MAX_PIXELS_RESIZED_WHOLE = 4_000_000
_THUMBNAIL = 256  # pixels of the longer side


# Arrays and tensors


def from_array(array: Array) -> Image.Image:
    """Return a Pillow image of uint8 pixels (H, W), (H, W, 1) or (H, W, 3).

    Raises:
        DataError: the array has another shape or type.
    """
    is_colour = array.ndim == 3 and array.shape[2] == 3
    is_grey = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
    if array.dtype != np.uint8 or not array.size or not (is_grey or is_colour):
        kind = f"{array.dtype} {array.shape}"
        raise DataError(f"Pixels must be uint8 of shape (H, W) or (H, W, 3), not {kind}.")
    if is_grey:
        array = array.reshape(array.shape[:2])
    return Image.fromarray(np.ascontiguousarray(array))


def from_pixels(array: Array) -> Image.Image:
    """Return a Pillow image of pixels as in `from_array`, or of real numbers from 0 to 1.

    Raises:
        DataError: the array has another shape or type, or numbers beyond that range.
    """
    if array.dtype.kind != "f" or not array.size:
        return from_array(array)
    least = float(array.min())
    most = float(array.max())
    # NaN fails every comparison, so this refuses it too.
    if not (least >= 0 and most <= 1):
        raise DataError(
            f"Pixels that are real numbers must be from 0 to 1, but these are from {least:g} to"
            f" {most:g}. Scale them, leave out a normalisation, or pass uint8."
        )
    return from_array(np.rint(array * 255).astype(np.uint8))


def is_image(item: object) -> TypeGuard[ImageLike]:
    """Return whether an object has a type that `Bundle.preprocess` accepts."""
    return isinstance(item, bytes | str | os.PathLike | Image.Image | np.ndarray)


def as_list(images: Any) -> list[Any]:
    """Return one or several images as a list for `Bundle.preprocess`.

    N images may be one array (N, H, W, channels) or (N, H, W). Tensors have channels first, as in
    torchvision, and become arrays; N images may be one tensor (N, channels, H, W) or (N, H, W).

    Raises:
        DataError: the shape may be that of several grey images, or of one image.
    """
    if isinstance(images, str | bytes | os.PathLike | Image.Image):
        return [images]
    is_tensor = hasattr(images, "detach")
    if is_tensor or isinstance(images, np.ndarray):
        # Four channels are never taken for images 4 pixels wide; `from_array` refuses them.
        ends_with_channels = images.ndim == 3 and 1 <= images.shape[2] <= 4
        if images.ndim < 3 or (ends_with_channels and not is_tensor):
            return [channels_last(images)]
        if images.ndim == 3 and (ends_with_channels or len(images) == 3):
            raise DataError(
                f"Pixels of shape {tuple(images.shape)} may be several grey images or one colour"
                " image. Pass a list: list(images) or [image]."
            )
    return [channels_last(image) for image in images]


def channels_last(image: Any) -> Any:
    """Return a tensor (channels, H, W) or (H, W) as an array (H, W, channels) or (H, W).

    Other objects are returned as they are.
    """
    # A tensor is known by its method, because serving must not import torch.
    if not hasattr(image, "detach"):
        return image
    array: Array = image.detach().cpu().numpy()
    if array.ndim == 3:
        return array.transpose(1, 2, 0)
    return array


# Colours


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
    is_transparent = "transparency" in image.info
    if image.mode == mode and not is_transparent:
        return image
    if image.mode in SIXTEEN_BITS:
        return _upper_bits(image).convert(mode)
    if is_transparent or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        return _on_white(image, mode)
    # Pillow converts LAB to RGB only, so grey takes two steps.
    if image.mode == "LAB":
        image = image.convert("RGB")
    return image.convert(mode)


def to_srgb(image: Image.Image) -> Image.Image:
    """Return the image in sRGB and without its colour profile, on white and in 8 bits.

    An image that has no profile, or that of sRGB, is returned as it is. So is one whose profile is
    damaged, larger than 4 MiB, or for other pixels, such as an RGB profile of a grey image.
    """
    profile = image.info.get(_PROFILE) or b""
    # Bytes 16 to 19 of a profile name the colour space of the pixels that it describes.
    mode = _MODES.get(profile[16:20])
    base = {"CMYK": "CMYK", "P": "RGB"}.get(image.mode) or Image.getmodebase(image.mode)
    if mode != base or len(profile) > _MAX_PROFILE_BYTES:
        return image
    transform = _transform(profile, mode)
    if transform is None:
        return image
    out = _applied(transform, _converted(image, mode))
    # Neither is true of the new pixels, and a second call must not apply them again.
    out.info = {k: v for k, v in image.info.items() if k not in (_PROFILE, "transparency")}
    return out


# All photos of one camera have the same profile.
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
        # The transform gives RGB. A table of the 256 greys keeps a grey image grey.
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
        # Pillow converts premultiplied grey (La) to LA only.
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
    transparent = image.info.get("transparency")
    if transparent is not None:
        grey[values == transparent] = 255
    return Image.fromarray(grey)


def few_levels(image: Image.Image) -> str | None:
    """Return why a 16-bit image loses most of its levels in 8 bits, or `None` if it does not.

    It loses them if it uses at most a quarter of the 16-bit range, as images of 12-bit cameras do.
    The text completes a sentence that begins with the image's name.
    """
    if image.mode in SIXTEEN_BITS:
        top = int(np.asarray(image).max(initial=0))
    elif image.info.get(BITS) == 16:
        # The largest possible value, because Pillow has dropped the lower 8 bits.
        top = int(np.asarray(image.convert("RGB")).max(initial=0)) << 8 | 255
    else:
        return None
    if not 0 < top < 1 << 14:
        return None
    if top < 256:
        above = "255, so it is black in 8 bits"
        advice = "Save it as 8 bits"
    else:
        above = f"{top:,} of 65,535, so {(top >> 8) + 1} of 256 levels are left in 8 bits"
        advice = f"Multiply it by {(1 << 16) >> top.bit_length()} before it is saved"
    return f"is a 16-bit image with no value above {above}. {advice}"


# Files of decoded images


def to_png(image: Image.Image) -> bytes:
    """Return a decoded image as PNG.

    Raises:
        DataError: the image's colour space cannot be converted.
    """
    out = io.BytesIO()
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
        image = to_mode(image, "RGB")
    image.save(out, "PNG", compress_level=1)  # fast, because it is sent only once
    return out.getvalue()


def thumbnail(image: Image.Image) -> bytes:
    """Return a decoded image as a small JPEG.

    Raises:
        DataError: the image's colour space cannot be converted.
    """
    small = to_mode(image, "RGB").copy()
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=85)
    return out.getvalue()


# The encoder's input


@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing before the encoder: resize, centre crop and normalise.

    Resizing and cropping work on uint8 pixels; the encoder itself applies `mean` and `std`. The
    pixels are exactly those of torchvision's `Resize` and `CenterCrop` on a Pillow image. The only
    exception are images that would have more than 4 million pixels after resizing: their far ends
    are cut off first.

    Attributes:
        size: height and width of the encoder's input in pixels; a single number means both.
        channels: 1 (grey) or 3 (RGB).
        mean: mean of each channel, for pixels scaled to 0–1; a single number applies to all
            channels.
        std: standard deviation of each channel, likewise.
        interpolation: interpolation method for resizing.
        resize: length of the shorter side before the centre crop. `None` stretches the image to
            `size` without a crop.
    """

    size: tuple[int, int]
    channels: int = 3
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    interpolation: Interpolation = "bilinear"
    resize: int | None = None

    # Pydantic reads this class from a bundle's manifest and must refuse unknown keys.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        size: Any = self.size
        if isinstance(size, int | np.integer):
            object.__setattr__(self, "size", (int(size), int(size)))
        if len(self.size) != 2 or min(self.size) < 1:
            raise ValueError(
                f"size must be a height and a width of at least 1 pixel, not {self.size}"
            )
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 (grey) or 3 (RGB), not {self.channels}")
        for name in ("mean", "std"):
            numbers = tuple(getattr(self, name))
            if len(numbers) not in (1, self.channels):
                plural = f"{self.channels} numbers, or 1 for all of them"
                count = "1 number" if self.channels == 1 else plural
                raise ValueError(f"{name} must be {count}, not {len(numbers)}: {numbers}")
            object.__setattr__(self, name, numbers * (self.channels // len(numbers)))
        if self.resize is not None and self.resize < 1:
            raise ValueError(f"resize must be at least 1 pixel, not {self.resize}")
        if self.interpolation not in get_args(Interpolation):
            raise ValueError(
                f"interpolation must be one of {', '.join(get_args(Interpolation))}, not"
                f" '{self.interpolation}'"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one encoder input."""
        return (self.channels, *self.size)

    def __call__(self, image: Image.Image) -> Pixels:
        """Return the pixels (channels, H, W), uint8, of a decoded image of any size and mode.

        Raises:
            DataError: the image's colour space cannot be converted.
        """
        mode: Literal["L", "RGB"] = "L" if self.channels == 1 else "RGB"
        image = to_mode(image, mode)
        height, width = self.size
        resample = Image.Resampling[self.interpolation.upper()]
        resized = (width, height)
        if self.resize is not None:
            if math.prod(_resized(image.size, self.resize)) > _MAX_PIXELS_RESIZED_WHOLE:
                image = _trim(image, self.resize, max(self.size))
            resized = _resized(image.size, self.resize)
        if image.size != resized:
            image = image.resize(resized, resample)
        if resized != (width, height):
            left = _centred(resized[0], width)
            top = _centred(resized[1], height)
            image = image.crop((left, top, left + width, top + height))
        pixels = np.empty(self.shape, np.uint8)
        # A band at a time takes half as long as the transpose of an array (H, W, channels).
        for plane, band in zip(pixels, mode, strict=True):
            plane[:] = np.frombuffer(image.tobytes("raw", band), np.uint8).reshape(height, width)
        return pixels


def _resized(size: tuple[int, int], shorter: int) -> tuple[int, int]:
    """Return the size of an image whose shorter side becomes `shorter`.

    The longer side is truncated to whole pixels, as in torchvision and timm.
    """
    longer = int(shorter * max(size) / min(size))
    if size[0] <= size[1]:
        return (shorter, longer)
    return (longer, shorter)


def _centred(length: int, crop: int) -> int:
    """Return where a centre crop begins, as in torchvision's `CenterCrop`.

    Half pixels are rounded to even. If the crop is longer than the image, the result is negative:
    the image is padded, and an odd number of padded pixels puts one more at the end.
    """
    if crop <= length:
        return round((length - crop) / 2)
    return -((crop - length) // 2)


def _trim(image: Image.Image, shorter: int, crop: int) -> Image.Image:
    """Cut off the far ends of a very long image, which the centre crop would drop anyway.

    Otherwise, resizing the shorter side of a 1 × 20,000,000 image to 256 would create 1.3 × 10¹²
    pixels.
    """
    side = min(image.size)
    keep = max(side, -(-4 * side * max(crop, shorter) // shorter))
    if max(image.size) <= keep:
        return image
    width = min(image.width, keep)
    height = min(image.height, keep)
    left = (image.width - width) // 2
    top = (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
