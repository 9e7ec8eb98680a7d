"""The tools of the server, with bounds on what an agent may ask."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, ImageContent, TextContent, ToolAnnotations
from pydantic import Field
from retrieval.base.regular_files import read_plain
from retrieval.base.runtime import installed_version
from retrieval.errors import DataError, RetrievalError
from retrieval.images.decoding import Limits, decode

from retrieval_mcp.searched_index import LocalIndex, ServedIndex

T = TypeVar("T")
MAX_BYTES = 10_000_000
"""Size limit of a query image, in bytes."""

ItemId = Annotated[str, Field(min_length=1, max_length=1000)]
Image = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_BYTES * 4 // 3 + 100,
        description="Path of an image file, or an image as a data URL (data:image/png;base64,…).",
    ),
]


def server_of(index: LocalIndex | ServedIndex, photos: Path) -> MCPServer[Any]:
    """Return a server whose tools search an index.

    Args:
        index: the index.
        photos: folder whose files an agent may name.
    """
    server: MCPServer[Any] = MCPServer(
        "retrieval",
        instructions=f"{index.about()} Search it by an image, a text or similar items.",
        version=installed_version(),
        log_level="WARNING",
    )

    def search(
        image: Image | None = None,
        text: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None,
        like: Annotated[Sequence[ItemId], Field(max_length=100)] = (),
        k: Annotated[int, Field(ge=1, le=100)] = 10,
        filter: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None,
    ) -> dict[str, Any]:
        """Find the items most similar to an image, a text or other items, nearest first.

        Give exactly one of image, text and like (ids of items). filter keeps items by label and
        metadata, such as: price < 20 and label in ('shoe', 'boot').
        """

        def work() -> dict[str, Any]:
            if sum((image is not None, text is not None, bool(like))) != 1:
                raise DataError("Give exactly one of image, text and like.")
            content = None if image is None else image_bytes(image, photos)
            return index.search(content, k, text=text, like=list(like), filter=filter)

        return _answered(work)

    def identify(image: Image, far: Annotated[float, Field(gt=0, lt=1)] = 0.01) -> dict[str, Any]:
        """Say which class of the index an image shows; the label is null for unknown.

        far is the accepted share of strangers, whose class the index lacks, that get a label.
        """
        return _answered(lambda: index.identify(image_bytes(image, photos), far))

    def get(id: ItemId, picture: bool = False) -> CallToolResult:
        """Get an item's label and metadata, and with picture a small picture of it."""

        def work() -> CallToolResult:
            item = index.get(id)
            content: list[Any] = [TextContent(type="text", text=f"{item}")]
            if picture:
                jpeg = base64.b64encode(index.picture(id)).decode()
                content.append(ImageContent(type="image", data=jpeg, mime_type="image/jpeg"))
            return CallToolResult(content=content, structured_content=item)

        return _answered(work)

    for tool in (search, identify, get):
        server.add_tool(tool, annotations=ToolAnnotations(read_only_hint=True))
    return server


def _answered(work: Callable[[], T]) -> T:
    """Return what a function returns; turn its errors into sentences for the agent."""
    try:
        return work()
    except RetrievalError as fault:
        raise ToolError(str(fault)) from None


def image_bytes(image: str, photos: Path) -> bytes:
    """Return the bytes of an image that an agent names.

    Args:
        image: a data URL, or a path in `photos`.
        photos: the folder whose files an agent may name.

    Raises:
        DataError: the file lies elsewhere, is too large, or is not an image. So nothing else is
            ever sent to a server.
    """
    if image.startswith("data:"):
        try:
            content = base64.b64decode(image.partition(";base64,")[2], validate=True)
        except binascii.Error:
            raise DataError("The data URL is not base64.") from None
        name = "The image"
    else:
        path = Path(photos, image).resolve()
        if not path.is_relative_to(photos.resolve()):
            raise DataError(
                f"{image} is not below {photos.resolve()}. Name a file in this folder, or start"
                " 'retrieval mcp' with --photos FOLDER."
            )
        name = image
        try:
            content = read_plain(path, MAX_BYTES + 1)
        except (OSError, ValueError) as fault:
            reason = getattr(fault, "strerror", None) or fault
            raise DataError(f"{image} cannot be read: {reason}.") from None
    decode(content, Limits(bytes=MAX_BYTES), name)
    return content
