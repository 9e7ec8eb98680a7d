"""What a caller gives → the body of a request."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from retrieval.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image as Picture

    Image: TypeAlias = "str | Path | bytes | Picture | NDArray[np.uint8]"
    """A file's path, a file's bytes, a Pillow image, or uint8 pixels (H, W) or (H, W, 3)."""

Filter = str | Mapping[str, Any]
"""Which items, as text or as JSON: `"price < 20"`, `{"price": {"<": 20}}`."""

# Pillow's modes that a file of this format holds as they are: the server's rule says what they become
FILE_FORMATS = {
    **dict.fromkeys(("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), "PNG"),
    **dict.fromkeys(("F", "I", "I;16B", "LAB", "PA", "YCbCr"), "TIFF"),
}
ALPHA_MODES = {"La": "LA", "RGBa": "RGBA"}  # saved so, to keep their alpha; others as RGB


class SearchOptions(TypedDict, total=False):
    """How to search.

    How many hits (10), only which items, candidates for the rescorer, which metadata, whether to
    explain.
    """

    k: int
    filter: Filter | None
    candidates: int | None
    fields: Sequence[str] | None
    explain: bool


@dataclass(frozen=True)
class NewItem:
    """What an item is to be: of an image or of a vector (P numbers).

    With neither, an item that is there gets another label or other metadata.
    """

    id: str
    image: Image | None = None
    vector: Iterable[float] | None = None
    label: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def search_body(
    image: Image | None,
    vector: Iterable[float] | None,
    id: str | None,
    options: SearchOptions,
) -> dict[str, Any]:
    """Return the body of a search for one thing."""
    if sum(given is not None for given in (image, vector, id)) != 1:
        raise DataError("A search takes an image, a vector or an id: one of them.")
    if image is not None:
        return form([image], texts(options))
    query = {"id": id} if vector is None else {"vector": _numbers(vector)}
    return json_body({**query, **options})


def batch_body(
    images: Iterable[Image],
    vectors: Iterable[Iterable[float]],
    ids: Iterable[str],
    options: SearchOptions,
) -> dict[str, Any]:
    """Return the body of a search for several things of one kind."""
    pictures = list(images)
    queries = [{"vector": _numbers(vector)} for vector in vectors] + [{"id": id} for id in ids]
    kinds = {"picture"} if pictures else set()
    kinds |= {name for query in queries for name in query}
    if len(kinds) != 1:
        raise DataError("A batch takes images, vectors or ids: some of one of them.")
    return form(pictures, texts(options)) if pictures else json_body({"queries": queries, **options})


def item_body(item: NewItem, keep: str | None) -> dict[str, Any]:
    """Return the body that adds or replaces an item."""
    if (item.image is None) == (item.vector is None):
        raise DataError(
            "An item takes an image or a vector: one of them. "
            "`update` changes the label or metadata of one that is there."
        )
    if item.image is None:
        if keep is not None:
            raise DataError('"keep" says what is kept of an image; the item has none.')
        return json_body(_described(item, with_id=False))
    fields = {"label": item.label, "metadata": dumps(dict(item.metadata)), "keep": keep}
    return form([item.image], {name: text for name, text in fields.items() if text is not None})


def items_body(items: Iterable[NewItem]) -> dict[str, Any]:
    """Return the body that adds or replaces several items."""
    items = list(items)
    pictures = [item.image for item in items if item.image is not None]
    if not items or len(pictures) not in (0, len(items)):
        raise DataError(
            "Give one item at least; and of the items of one request all have images, or none has."
        )
    if pictures and any(item.vector is not None for item in items):
        raise DataError("An item takes an image or a vector, not both.")
    described = [_described(item, with_id=True) for item in items]
    if pictures:
        return form(pictures, {"items": dumps(described)})
    return json_body({"items": described})


def id_params(id: str, **others: str) -> dict[str, Any]:
    """Return the parameters of an address that names an item."""
    if id == "":
        raise DataError("An id has one character at least.")
    return {"params": {"id": id, **others}}


def texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options as fields of a form or parameters of an address."""
    return {
        name: value if isinstance(value, str) else dumps(value)
        for name, value in options.items()
        if value is not None
    }


def form(images: Sequence[Image], fields: Mapping[str, str]) -> dict[str, Any]:
    """Return images and fields as a form."""
    files = [("image", ("image", image_bytes(image))) for image in images]
    return {"files": files, "data": fields}


def json_body(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON as a body."""
    try:
        content = dumps(value).encode()
    except UnicodeEncodeError:
        raise DataError("Text that is sent must be Unicode without lone surrogates.") from None
    return {"content": content, "headers": {"Content-Type": "application/json"}}


def dumps(value: object) -> str:
    """Return a value as JSON, or refuse it in a sentence."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as fault:
        raise DataError(f"This cannot be sent as JSON: {fault}.") from None


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

    picture = image if isinstance(image, pillow.Image) else _picture(image)
    file = io.BytesIO()
    if format := FILE_FORMATS.get(picture.mode):
        picture.save(file, format)
    else:
        picture.convert(ALPHA_MODES.get(picture.mode, "RGB")).save(file, "PNG")
    return file.getvalue()


def file_bytes(path: Path, largest: int | None = None) -> bytes:
    """Return what is in a file of at most `largest` bytes.

    Raises:
        DataError: it cannot be read, is no regular file, or is larger.
    """
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is not a file.")
        with path.open("rb") as file:
            content = file.read(-1 if largest is None else largest + 1)
    except (OSError, ValueError) as fault:
        reason = getattr(fault, "strerror", None) or fault
        raise DataError(f"{path} cannot be read: {reason}.") from None
    if largest is not None and len(content) > largest:
        raise DataError(f"{path} has more than {largest:,} bytes, the server's limit.")
    return content


def _described(item: NewItem, *, with_id: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"id": item.id} if with_id else {}
    if item.label is not None:
        described["label"] = item.label
    if item.metadata:
        described["metadata"] = dict(item.metadata)
    if item.vector is not None:
        described["vector"] = _numbers(item.vector)
    return described


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds a {type(value).__name__}")


def _numbers(vector: Iterable[float]) -> list[float]:
    try:
        return [float(number) for number in vector]
    except (TypeError, ValueError):
        raise DataError("A vector is a sequence of numbers.") from None


def _picture(array: Any) -> Picture:
    import numpy as np
    from PIL import Image as pillow

    pixels = isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.size
    if pixels and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
        return pillow.fromarray(array)
    what = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
    raise DataError(
        f"An image is a path, bytes, a Pillow image or a uint8 array (H, W) or (H, W, 3), not {what}."
    )
