"""What a caller gives as an image → the bytes of a file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from retrieval.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image as Picture

    Image: TypeAlias = "str | Path | bytes | Picture | NDArray[np.uint8]"
    """A file's path, a file's bytes, a Pillow image, or pixels (H, W) or (H, W, 3) of 0 to 255."""

# Pillow's modes that a file of this format holds as they are: what becomes of them is the server's rule
_FORMATS = {
    **dict.fromkeys(("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), "PNG"),
    **dict.fromkeys(("F", "I", "I;16B", "LAB", "PA", "YCbCr"), "TIFF"),
}
_AS = {"La": "LA", "RGBa": "RGBA"}  # the alpha is kept; other modes are saved as RGB


def image_bytes(image: Image) -> bytes:
    """Return an image as a file's bytes: those of a path or bytes as they are, else a PNG or TIFF.

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
    if format := _FORMATS.get(picture.mode):
        picture.save(out, format)
    else:
        picture.convert(_AS.get(picture.mode, "RGB")).save(out, "PNG")
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
