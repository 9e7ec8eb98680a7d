"""Bundles (exported models) that a remote store keeps in pieces, and a client caches."""

from __future__ import annotations

import hashlib
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from retrieval.base.files import cache_folder, whole_folder
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.manifest import (
    FILE,
    is_plain_name,
    manifest_text,
    opened_whole,
    parse_manifest,
    read_files,
)
from retrieval.errors import RetrievalError, StoreError

PIECE = 1 << 20  # bytes
BUNDLE_BYTES = 8 << 30  # size limit of a bundle that is fetched from a store
_MAX_FILES = 1000
_MEMORY_BYTES = 64 << 20  # a larger bundle is fetched to a temporary file


def bundle_pieces(bundle: Bundle, size: int = PIECE) -> Iterator[bytes]:
    """Yield a bundle's files as pieces of bytes, which a store keeps in this order.

    `kept_bundle` restores the files from the pieces.

    Args:
        bundle: an opened bundle.
        size: maximum size of a piece, in bytes.

    Raises:
        BundleError: the bundle was changed since it was opened.
        OSError: the disk has no room for a temporary copy.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as packed:
        copy = Path(folder) / "bundle"
        bundle.copy(copy)
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(copy.iterdir()):
                tar.add(path, path.name, recursive=False, filter=_plain)
        packed.seek(0)
        while piece := packed.read(size):
            yield piece


def kept_bundle(sha256: str, pieces: Callable[[], Iterable[bytes]]) -> Path:
    """Return a bundle's folder in the user's cache; fetch the bundle if it is missing or altered.

    Every file is compared with its checksum.

    Args:
        sha256: SHA-256 of the bundle's manifest (`Generation.bundle`).
        pieces: returns the pieces of `bundle_pieces` in order. It is called only if the bundle must
            be fetched.

    Raises:
        StoreError: the pieces do not form this bundle, or the cache cannot be written.
    """
    folder = cache_folder() / "bundles" / sha256
    if _is_intact(folder, sha256):
        return folder
    occupied = StoreError(f"{folder} exists.")
    try:
        with (
            whole_folder(folder, replace=True, exists_error=occupied) as fresh,
            tempfile.SpooledTemporaryFile(_MEMORY_BYTES) as packed,
        ):
            for piece in pieces():
                if packed.tell() + len(piece) > BUNDLE_BYTES:
                    limit = f"{BUNDLE_BYTES / 1e9:.1f} GB"
                    raise StoreError(f"The store returned a bundle of more than {limit}.")
                packed.write(piece)
            packed.seek(0)
            if not (_unpack(packed, fresh) and _is_intact(fresh, sha256)):
                raise StoreError(
                    f"The store's copy of the bundle {sha256[:16]}… is damaged: its checksums do"
                    " not match."
                )
    except OSError as fault:
        raise StoreError(
            f"The bundle of the index cannot be stored in {folder.parent}: "
            f"{fault.strerror or fault}. Name another folder with the environment variable"
            " RETRIEVAL_CACHE."
        ) from None
    return folder


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove owner, mode and time from a tar entry, so that equal bundles give equal pieces."""
    info.mtime = info.uid = info.gid = 0
    info.mode = 0o644
    info.uname = ""
    info.gname = ""
    return info


def _unpack(packed: IO[bytes], folder: Path) -> bool:
    """Unpack a bundle; return False unless it has only plain names of regular files."""
    try:
        with tarfile.open(fileobj=packed, mode="r:") as tar:
            for count, info in enumerate(tar):
                if info.isreg() and not info.issparse():
                    content = tar.extractfile(info)
                else:
                    content = None
                if content is None or count >= _MAX_FILES or not is_plain_name(info.name):
                    return False
                with (folder / info.name).open("xb") as file:
                    shutil.copyfileobj(content, file)
    except (tarfile.TarError, ValueError, EOFError, FileExistsError):
        return False
    return True


def _is_intact(folder: Path, sha256: str) -> bool:
    """Return whether a folder holds this bundle and all its files match their checksums."""
    if not folder.is_dir():
        return False

    def whole() -> bool:
        text = manifest_text(folder)
        if hashlib.sha256(text).hexdigest() != sha256:
            return False
        read_files(folder, parse_manifest(folder / FILE, text).files)
        return True

    try:
        return opened_whole(folder, whole)
    except RetrievalError:
        return False
