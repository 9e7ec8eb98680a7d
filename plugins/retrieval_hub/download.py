"""Open a bundle at `hf://OWNER/NAME`: download what its manifest names, and check it.

A repository may come from anyone. Only the manifest and the files that it names by plain names are
downloaded, no larger than it says, and each must have the SHA-256 that it says.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.base.arrays import Array, Ints
from retrieval.base.files import cache_folder, hold, make_folder, rename_whole
from retrieval.base.progress import Meter
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.manifest import (
    FILE,
    MANIFEST_BYTES,
    Manifest,
    manifest_text,
    parse_manifest,
    read_files,
)
from retrieval.errors import BundleError, DataError, some
from retrieval.plugin import Dataset

from retrieval_hub.hub import REPOSITORY, hub_errors, load_hub

_ADDRESS = re.compile(
    rf"hf://({REPOSITORY})(?:@([\w][\w./-]{{0,200}}))?(?:\?bundle=([0-9a-f]{{64}}))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHUNK = 256
"""Number of images in memory at a time."""


def bundle_folder(address: str) -> Path:
    """Return the folder of the bundle at an address, which is downloaded once for each commit.

    Args:
        address: `hf://OWNER/NAME`, `hf://OWNER/NAME@REVISION`, each with or without
            `?bundle=SHA256`, the SHA-256 that the manifest must have. A revision is a branch, a tag
            or a commit. A commit that was downloaded before needs no network.

    Raises:
        BundleError: the address is wrong, does not exist, or holds no bundle that can be used.
        ServerError: the hub cannot be reached.
        MissingDependency: `huggingface_hub` is not installed.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise BundleError(
            f"{address} is not the address of a bundle on a hub. Write hf://OWNER/NAME,"
            " hf://OWNER/NAME@REVISION, or one of these with ?bundle=SHA256."
        )
    repository, revision, expected = match.groups()
    home = cache_folder() / "hub" / repository.replace("/", "--")
    commit = revision or ""
    if not (_COMMIT.fullmatch(commit) and (home / commit).is_dir()):
        with hub_errors(address):
            info = load_hub().HfApi().model_info(repository, revision=revision, files_metadata=True)
        commit = str(info.sha)
        if not _COMMIT.fullmatch(commit):
            raise BundleError(f"{address} cannot be used: the hub names no commit.")
        sizes = {entry.rfilename: entry.size for entry in info.siblings or ()}
        folder = home / commit
        if not folder.is_dir():
            make_folder(home)
            with hold(folder, f"downloading {address}", BundleError):
                if not folder.is_dir():
                    _download(address, repository, commit, sizes, folder)
    folder = home / commit
    sha256 = hashlib.sha256((folder / FILE).read_bytes()).hexdigest()
    if expected not in (None, sha256):
        raise BundleError(f"{address} holds the bundle {sha256}, another than the address names.")
    return folder


def _download(
    address: str, repository: str, commit: str, sizes: Mapping[str, int | None], folder: Path
) -> None:
    """Download and check a bundle, and put it into its folder when it is whole.

    An interrupted call leaves complete files in the folder `COMMIT.partial`, which the next call
    uses. A bundle with a fault leaves nothing.
    """
    partial = folder.with_name(f"{folder.name}.partial")

    def fetch(name: str, most: int) -> None:
        with hub_errors(address):
            load_hub().hf_hub_download(
                repository,
                name,
                revision=commit,
                local_dir=partial,
                tqdm_class=_bounded(f"{address}: {name}", most),
            )

    try:
        if FILE not in sizes:
            raise BundleError(f"It is not a bundle: it has no {FILE}.")
        fetch(FILE, MANIFEST_BYTES)
        manifest = parse_manifest(partial / FILE, manifest_text(partial))
        _refuse_unfit(manifest, sizes, partial)
        for name, record in manifest.files.items():
            fetch(name, record.bytes)
        read_files(partial, manifest.files)
    except (BundleError, DataError) as fault:
        shutil.rmtree(partial, ignore_errors=True)
        raise BundleError(f"{address} cannot be used. {fault}") from None
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    exists = BundleError(f"{folder} exists already.")
    rename_whole(partial, folder, replace=False, exists_error=exists)


def _refuse_unfit(manifest: Manifest, sizes: Mapping[str, int | None], folder: Path) -> None:
    """Raise a BundleError if files are missing, of another size, or larger than the disk."""
    wrong = [
        f"{name} ({'missing' if sizes.get(name) is None else f'{sizes[name]:,} bytes'})"
        for name, record in manifest.files.items()
        if sizes.get(name) != record.bytes
    ]
    if wrong:
        raise BundleError(f"Its manifest does not describe its files: {some(wrong, 3)}.")
    needed = sum(record.bytes for record in manifest.files.values())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BundleError(
            f"Its files have {needed:,} bytes, and the disk of {folder.parent} has {free:,} left."
        )


def _bounded(what: str, most: int) -> type[Any]:
    """Return a class of progress displays that stop a download of more than `most` bytes."""

    class Bounded(Meter):
        def __init__(self, *, total: int | None = None, initial: int = 0, **_: Any) -> None:
            super().__init__("downloading", total or most, "bytes", done=initial)
            self.received = initial

        def update(self, count: int = 1, **metrics: str) -> None:
            self.received += count
            if self.received > most:
                raise BundleError(f"{what} is larger than the {most:,} bytes that it may have.")
            super().update(count, **metrics)

    return Bounded


class HubBundle:
    """The bundle at an address as an encoder: `hf://OWNER/NAME`.

    Args:
        address: the address.

    Raises:
        BundleError: see `bundle_folder`.
        DataError: the bundle takes no images, or its distance is not the Euclidean distance of its
            vectors.
    """

    def __init__(self, address: str) -> None:
        self.bundle = Bundle.open(bundle_folder(address))
        manifest = self.bundle.manifest
        if manifest.input.kind != "image" or not manifest.compares_by_euclidean:
            raise DataError(
                f"{address} does not embed images into vectors that are compared by their Euclidean"
                " distance."
            )

    def __call__(self, dataset: Dataset, items: Ints) -> Array:
        """Return the vectors (N, P) of items by index (N,).

        Raises:
            DataError: an item cannot be embedded.
        """
        if dataset.kind != "image":
            raise DataError("It embeds images, but the data hold vectors.")
        vectors = np.empty((len(items), self.bundle.manifest.vector), np.float32)
        for start in range(0, len(items), _CHUNK):
            rows = items[start : start + _CHUNK].tolist()
            images: list[Any] = [dataset[row] for row in rows]
            vectors[start : start + _CHUNK] = self.bundle.encode_images(images, progress=False)
        return vectors
