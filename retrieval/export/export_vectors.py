"""A bundle, and what to index with it, of any model at an address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from retrieval.base.folder_kinds import StrPath
from retrieval.data.datasets import FileDataset
from retrieval.data.stored_inputs import ITEMS
from retrieval.export.export_backbone import BackboneEncoder
from retrieval.export.export_model import export_model
from retrieval.host.plugins import Plugins, load_plugins
from retrieval.index.parquet import pyarrow
from retrieval.index.sources import collect, is_table
from retrieval.model.model import Model
from retrieval.run.encoders import backbone_at, encoder_at


def prepared(
    address: str,
    parameters: Mapping[str, Any],
    images: tuple[Path, ...],
    extra: Sequence[str],
    folder: Path,
) -> tuple[Path, tuple[Path, ...]]:
    """Return a bundle, and what to index with it.

    A backbone has its bundle in the cache. Any other model embeds the images now; see
    `export_vectors`.

    Args:
        address: the model's address.
        parameters: further parameters of a backbone.
        images: see `retrieval.index.sources.collect`.
        extra: files and modules of further plugins.
        folder: an empty folder.
    """
    plugins = load_plugins(extra)
    named = backbone_at(plugins, address)
    if named is None:
        bundle, table = export_vectors(plugins, address, images, folder)
        return bundle, (table,)
    name, values = named
    # the export verifies on image files and cannot read tables
    photos = [image for image in images if not is_table(image.name)]
    return BackboneEncoder(name, {**values, **parameters}, extra).kept(photos), images


def export_vectors(
    plugins: Plugins, address: str, images: Sequence[StrPath], folder: Path
) -> tuple[Path, Path]:
    """Embed images, and return a bundle and a table to index.

    The bundle takes vectors and passes them on; the table has the images' vectors, ids, labels and
    metadata, and their paths as metadata.

    Args:
        plugins: the loaded plugins.
        address: the model's address.
        images: see `retrieval.index.sources.collect`.
        folder: the folder in which both are written.

    Raises:
        DataError: an image cannot be read, or not be embedded.
        MissingDependency: pyarrow is not installed.
    """
    pa = pyarrow()
    encoder = encoder_at(plugins, address)
    items = collect(images, "image").items
    files = [item.path for item in items if item.path is not None]
    dataset = FileDataset(files, [item.label or "" for item in items], [item.id for item in items])
    vectors = encoder(dataset, np.arange(len(items)))
    width = vectors.shape[1]
    backbone = plugins.build("backbones", {"name": "core.features"}, {"features": width})
    bundle = folder / "bundle"
    export_model(Model(backbone, nn.Identity()), vectors[:ITEMS], bundle, name=address)
    names = dict.fromkeys(name for item in items for name in item.metadata)
    columns: dict[str, Any] = {name: [item.metadata.get(name) for item in items] for name in names}
    columns |= {"path": list(map(str, files)), "key": dataset.keys, "label": dataset.labels}
    columns["features"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), width)
    table = folder / "vectors.parquet"
    pa.parquet.write_table(pa.table(columns), table)
    return bundle, table
