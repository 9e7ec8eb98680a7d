"""What a caller gives of an item or an image → the bytes of a file."""

from __future__ import annotations

import io
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
    """A file's path, a file's bytes, a Pillow image, or pixels (H, W) or (H, W, 3) of 0 to 255."""


@dataclass(frozen=True)
class NewItem:
    """What an item is to be: of an image, of a vector (P numbers), or, with neither, one that is there and changes."""

    id: str
    image: Image | None = None
    vector: Iterable[float] | None = None
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # Pillow's modes that a PNG holds


def image_bytes(image: Image) -> bytes:
    """Return an image as a file's bytes: those of a path or bytes as they are, else a PNG.

    Raises:
        DataError: the file cannot be read, or it is no image.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        return file_bytes(Path(image))
    from PIL import Image as pillow

    picture = image if isinstance(image, pillow.Image) else _of_array(image)
    out = io.BytesIO()
    (picture if picture.mode in _PNG else picture.convert("RGB")).save(out, "PNG")
    return out.getvalue()


def file_bytes(path: Path, largest: int | None = None) -> bytes:
    """Return what is in a file.

    Args:
        path: the file.
        largest: bytes that it may have.

    Raises:
        DataError: it cannot be read, is no regular file, or is larger.
    """
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is not a file.")
        with path.open("rb") as file:
            content = file.read(-1 if largest is None else largest + 1)
    except (OSError, ValueError) as fault:
        raise DataError(f"{path} cannot be read: {getattr(fault, 'strerror', None) or fault}.") from None
    if largest is not None and len(content) > largest:
        raise DataError(f"{path} has more than {largest:,} bytes, the server's limit.")
    return content


def _of_array(array: Any) -> Picture:
    import numpy as np
    from PIL import Image as pillow

    pixels = isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.size
    if pixels and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
        return pillow.fromarray(array)
    said = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
    raise DataError(
        f"An image is a path, bytes, a Pillow image or a uint8 array (H, W) or (H, W, 3), not {said}."
    )
