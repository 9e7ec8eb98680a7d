"""Open an index, of whichever format its folder is, or at whichever address."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from retrieval.errors import StoreError
from retrieval.serving.files.places import StrPath
from retrieval.serving.files.plain import read_plain
from retrieval.serving.index.base import Index
from retrieval.serving.index.frozen import FrozenIndex
from retrieval.serving.index.living import LivingIndex
from retrieval.serving.index.manifest import INDEX
from retrieval.serving.providers import Device
from retrieval.serving.store.address import Address, place_of
from retrieval.serving.store.writing import FORMAT

_BYTES = 1_000_000


def open_index(
    path: StrPath | Address,
    *,
    threads: int | None = None,
    device: Device = "auto",
    plugins: Iterable[str] = (),
    signed_by: StrPath | None = None,
) -> Index:
    """Open an index: a living one in a folder or at an address, or a folder of format 1, every file of which is compared with its SHA-256.

    Args:
        path: the folder; or the address of a store that a plugin brings, such as `milvus://host:19530/photos`, as text.
        threads: of one call of the encoder; None leaves it to ONNX Runtime.
        device: of the encoder: "auto", "cpu" or "cuda".
        plugins: files or modules of a third-party back end or store that is not installed.
        signed_by: a public key's file; an index that its holder did not sign is refused.

    Raises:
        StoreError: missing, altered, of another format.
        BundleError: its bundle cannot be used.
        PluginError: the plugin of its back end, or of its store, is not there.
    """
    folder = place_of(path)
    if isinstance(folder, Path) and format_of(folder) != FORMAT:
        return FrozenIndex.open(folder, threads=threads, device=device, plugins=plugins, signed_by=signed_by)
    if signed_by is not None:
        raise StoreError(
            f"{folder} is a living index: what is in it changes, so no signature covers it. Sign one that "
            "'retrieval index create --frozen' made, or leave --require-signature out."
        )
    return LivingIndex.open(folder, threads=threads, device=device, plugins=plugins)


def format_of(folder: Path) -> int | None:
    """Return the format that an `index.json` names; None where it names none."""
    try:
        said = json.loads(read_plain(folder / INDEX, _BYTES))
        return said.get("format") if isinstance(said, dict) else None
    except (OSError, ValueError, RecursionError):
        return None
