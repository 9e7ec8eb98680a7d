"""Write the items of an index as Parquet, for Embedding Atlas and for FiftyOne."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.base.files import whole_file, whole_folder
from retrieval.base.photo_files import path_text
from retrieval.base.progress import Meter
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.identity import identity_metadata
from retrieval.errors import DataError, RetrievalError
from retrieval.images.decoding import Limits, decode, format_of, read_image
from retrieval.images.preprocessing import thumbnail
from retrieval.index.calibration import as_queries
from retrieval.index.index import Index
from retrieval.index.parquet import pyarrow
from retrieval.store.items import VECTOR, Item

_PAGE = 1000
"""Number of items that are in memory at a time."""
_EXTENSIONS = {"JPEG": ".jpg", "HEIF": ".heic"}
"""File name extensions that differ from the format's name."""


@dataclass
class Exported:
    """Result of an export.

    Attributes:
        items: number of items that were written.
        without_vector: number of items that were left out, because they have no vector.
        without_picture: number of items whose image is not kept or cannot be read.
    """

    items: int = 0
    without_vector: int = 0
    without_picture: int = 0


def write_parquet(
    index: Index,
    output: Path,
    *,
    neighbors: int = 0,
    filter: str | None = None,
    replace: bool = False,
) -> Exported:
    """Write a Parquet file with a row for each item, in the order of ids.

    The columns are id, label, metadata (JSON), path, bundle and vector. With `neighbors`, there are
    also `image`, a struct of the bytes of a small JPEG, and `neighbors`, a struct of ids (rows of
    this file, from 0) and distances, as Embedding Atlas takes them.

    Args:
        index: the index.
        output: the file.
        neighbors: number of neighbours of each item, without itself.
        filter: write only items that match.
        replace: whether to replace an existing file.

    Raises:
        DataError: the file exists or cannot be written, no item matches, or the index was migrated
            meanwhile.
        MissingDependency: pyarrow is not installed.
    """
    if output.is_dir():
        raise DataError(f"{output} is a folder. Choose another name for the file.")
    if output.exists() and not replace:
        raise DataError(f"{output} exists already. Choose another name, or pass --replace.")
    pa = pyarrow()
    bundle = index.follow()
    exported = Exported()
    kinds = {name: pa.string() for name in ("id", "label", "metadata", "path", "bundle")}
    kinds[VECTOR] = pa.list_(pa.float32(), bundle.manifest.vector)
    numbers: dict[str, int] = {}
    if neighbors:
        kinds["image"] = pa.struct({"bytes": pa.binary()})
        kinds["neighbors"] = pa.struct(
            {"ids": pa.list_(pa.int64()), "distances": pa.list_(pa.float64())}
        )
        pages = _pages(index, bundle, filter, Exported(), "numbering")
        numbers = {item.id: row for row, item in enumerate(i for page in pages for i in page)}
    schema = pa.schema(kinds.items(), identity_metadata(bundle))
    with whole_file(output, DataError) as path, pa.parquet.ParquetWriter(path, schema) as file:
        for items in _pages(index, bundle, filter, exported, "exporting"):
            columns = _columns(items, bundle)
            if neighbors:
                pictures = [_small_picture(index, item) for item in items]
                exported.without_picture += pictures.count(None)
                columns["image"] = [picture and {"bytes": picture} for picture in pictures]
                columns["neighbors"] = _neighbors(index, bundle, items, numbers, neighbors)
            flat = pa.array(np.concatenate([item.arrays[VECTOR] for item in items]))
            columns[VECTOR] = pa.FixedSizeListArray.from_arrays(flat, bundle.manifest.vector)
            file.write_table(pa.table(columns, schema))
    return exported


def write_fiftyone(
    index: Index, output: Path, *, filter: str | None = None, replace: bool = False
) -> Exported:
    """Write a folder that FiftyOne imports as `FiftyOneImageClassificationDataset`.

    It has the images in `data`, `labels.json`, and `vectors.npy` (N, P), in the order of the
    images' names. Items without an image are left out.

    Raises:
        DataError: see `write_parquet`; or no item has an image.
    """
    exists = DataError(f"{output} exists already. Choose another name, or pass --replace.")
    if replace:
        # The name may be that of a folder of photos.
        exists = DataError(
            f"{output} exists already and is no export for FiftyOne, so it is not replaced. Choose"
            " another name."
        )
        replace = (output / "labels.json").is_file() and (output / "vectors.npy").is_file()
    is_free = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    if not (is_free or replace):
        raise exists
    bundle = index.follow()
    exported = Exported()
    labels: dict[str, Any] = {}
    vectors = []
    with whole_folder(output, replace=replace, exists_error=exists) as folder:
        (folder / "data").mkdir()
        for items in _pages(index, bundle, filter, exported, "exporting"):
            for item in items:
                content = _original(index, item)
                if content is None:
                    exported.items -= 1
                    exported.without_picture += 1
                    continue
                format = str(format_of(content))
                name = f"{len(labels):08}"
                extension = _EXTENSIONS.get(format, f".{format.lower()}")
                (folder / "data" / f"{name}{extension}").write_bytes(content)
                labels[name] = {
                    "label": item.label,
                    "attributes": {"item": item.id, "metadata": dict(item.metadata)},
                }
                vectors.append(item.arrays[VECTOR])
        if not labels:
            raise DataError(f"No item of {index.path} has an image that can be read.")
        text = json.dumps({"labels": labels, "embedding": bundle.sha256}, ensure_ascii=False)
        (folder / "labels.json").write_text(text, encoding="utf-8")
        np.save(folder / "vectors.npy", np.stack(vectors))
    return exported


def _pages(
    index: Index, bundle: Bundle, filter: str | None, exported: Exported, what: str
) -> Iterator[list[Item]]:
    """Yield the items that have a vector, with their arrays, in the order of ids.

    Raises:
        DataError: no item matches the filter, or another bundle is served now.
    """
    after = None
    any_items = False
    with Meter(what, len(index), "items") as meter:
        while page := index.scan(filter, after=after, limit=_PAGE):
            after = page[-1].id
            stored = index.get([item.id for item in page], arrays=True)
            items = [item for item in stored.values() if VECTOR in item.arrays]
            items.sort(key=lambda item: item.id)
            if index.follow() is not bundle:
                raise DataError(
                    f"The index {index.path} was migrated to another bundle while its items were"
                    " exported. Run the command again."
                )
            exported.items += len(items)
            any_items = any_items or bool(items)
            exported.without_vector += len(stored) - len(items)
            if items:
                yield items
            meter.update(len(page))
    if not any_items:
        matching = " that matches the filter" if filter else ""
        raise DataError(f"The index {index.path} has no item to export{matching}.")


def _columns(items: list[Item], bundle: Bundle) -> dict[str, Any]:
    """Return the columns of text of a page."""
    return {
        "id": [item.id for item in items],
        "label": [item.label for item in items],
        "metadata": [json.dumps(dict(item.metadata), ensure_ascii=False) for item in items],
        "path": [item.path and path_text(item.path) for item in items],
        "bundle": [bundle.sha256] * len(items),
    }


def _neighbors(
    index: Index, bundle: Bundle, items: list[Item], numbers: Mapping[str, int], count: int
) -> list[dict[str, Any]]:
    """Return the rows and distances of the items nearest to each item of a page."""
    answers = index.search(as_queries(bundle, items), count + 1)
    result = []
    for item, hits in zip(items, answers, strict=True):
        near = [hit for hit in hits if hit.id != item.id and hit.id in numbers][:count]
        ids = [numbers[hit.id] for hit in near]
        result.append({"ids": ids, "distances": [hit.distance for hit in near]})
    return result


def _original(index: Index, item: Item) -> bytes | None:
    """Return the bytes of an item's image; `None` if it is not kept or is not an image."""
    try:
        content: bytes | None = None
        if item.keep in ("copy", "thumbnail"):
            content = index.store.original(item.id)
        elif item.keep == "reference" and item.path is not None:
            content = read_image(item.path, Limits(), path_text(item.path))
        if content is not None:
            decode(content)
        return content
    except RetrievalError:
        return None


def _small_picture(index: Index, item: Item) -> bytes | None:
    """Return a small JPEG of an item's image, or `None`; see `_original`."""
    content = _original(index, item)
    if content is None:
        return None
    return thumbnail(decode(content))
