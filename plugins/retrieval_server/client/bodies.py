"""Encode the client's arguments: images as the bytes of a file, the rest as JSON or forms."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from retrieval.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image as Picture

    Image: TypeAlias = "str | Path | bytes | Picture | NDArray[np.uint8]"
    """A file's path, its bytes, a Pillow image, or uint8 pixels (H, W) or (H, W, 3 or 4)."""


@dataclass(frozen=True)
class NewItem:
    """An item to add, with an image or a vector.

    `bundle` is the SHA-256 of the bundle that computed the vector; if it is not the index's, the
    server refuses the item.
    """

    id: str
    image: Image | None = None
    vector: Iterable[float] | None = None
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    bundle: str | None = None

    def json(self) -> dict[str, Any]:
        """Return the item as a JSON object, without the image."""
        return without_none(
            id=self.id,
            label=self.label,
            metadata=self.metadata or None,
            vector=numbers_of(self.vector),
            bundle=self.bundle,
        )


_FORMATS = {
    **dict.fromkeys(("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), "PNG"),
    **dict.fromkeys(("F", "I", "I;16B", "LAB", "PA", "YCbCr"), "TIFF"),
}
"""File format that stores each of these Pillow modes unchanged: the server converts the image."""


def image_bytes(image: Image) -> bytes:
    """Return an image as the bytes of a file.

    Bytes and the content of a path are returned unchanged; other images become PNG or TIFF.

    Raises:
        DataError: the file cannot be read, or the argument is not an image.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        return file_bytes(Path(image))
    from PIL import Image as pillow

    picture = image if isinstance(image, pillow.Image) else _of_array(image)
    if picture.mode not in _FORMATS:
        picture = picture.convert({"La": "LA", "RGBa": "RGBA"}.get(picture.mode, "RGB"))
    out = io.BytesIO()
    picture.save(out, _FORMATS[picture.mode])
    return out.getvalue()


def file_bytes(path: Path, largest: int | None = None) -> bytes:
    """Return the content of a file, which may have up to `largest` bytes.

    Raises:
        DataError: the file cannot be read, is not a regular file, or is too large.
    """
    try:
        # Reading a pipe or device might never end.
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is not a file.")
        with path.open("rb") as file:
            content = file.read(-1 if largest is None else largest + 1)
    except (OSError, ValueError) as fault:
        raise DataError(
            f"{path} cannot be read: {getattr(fault, 'strerror', None) or fault}."
        ) from None
    if largest is not None and len(content) > largest:
        raise DataError(f"{path} has more than {largest:,} bytes, the server's limit.")
    return content


def _of_array(array: Any) -> Picture:
    import numpy as np
    from PIL import Image as pillow

    shape: tuple[int, ...] = ()
    if isinstance(array, np.ndarray):
        shape = array.shape
    if (len(shape) == 2 or shape[2:] in ((3,), (4,))) and array.dtype == np.uint8 and array.size:
        return pillow.fromarray(array)
    described = (str(getattr(array, name)) for name in ("dtype", "shape") if hasattr(array, name))
    raise DataError(
        "An image is a path, bytes, a Pillow image or a uint8 array (H, W) or (H, W, 3 or 4), not"
        f" {' '.join([type(array).__name__, *described])}."
    )


async def form_of(
    images: Iterable[Image], fields: Mapping[str, str], **examples: Iterable[Image]
) -> dict[str, Any]:
    """Return httpx's arguments for a form with images, which a thread reads and encodes.

    `examples` are the images of fields other than `image`, by the field's name.
    """

    def read() -> list[Any]:
        fields_with_images = {"image": images, **examples}
        pairs = [(name, image) for name, group in fields_with_images.items() for image in group]
        return [(name, ("image", image_bytes(image))) for name, image in pairs]

    return {"files": await asyncio.to_thread(read), "data": fields}


def as_items(images: Any) -> list[Any]:
    """Return one or several images or ids as a list."""
    if isinstance(images, list | tuple):
        return [*images]
    return [images]


def json_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return httpx's arguments for a JSON body."""
    return {"content": dumps(body), "headers": {"Content-Type": "application/json"}}


def id_parameter(id: str, **options: str) -> dict[str, Any]:
    """Return httpx's argument for the URL parameters that name an item."""
    if str(id) == "":
        raise DataError("An id must have at least one character.")
    return {"params": {"id": str(id), **options}}


def without_none(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def texts_of(**options: Any) -> dict[str, str]:
    """Return options as form fields or URL parameters, without those that are None."""
    return {
        name: value if isinstance(value, str) else dumps(value)
        for name, value in without_none(**options).items()
    }


def dumps(value: object) -> str:
    """Return a value as JSON; raise a `DataError` if it is not JSON."""

    def plain(value: Any) -> Any:
        if not hasattr(value, "item"):
            raise TypeError(f"an object of type {type(value).__name__} is not JSON")
        # NumPy's scalars have a method `item`, but `json` does not know them.
        return value.item()

    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"This cannot be sent as JSON: {error}.") from None


def numbers_of(vector: Iterable[float] | None) -> list[float] | None:
    """Return a vector as a list of numbers, or None; raise a `DataError` for anything else."""
    try:
        return None if vector is None else [float(number) for number in vector]
    except (TypeError, ValueError):
        raise DataError("A vector is a sequence of numbers.") from None
