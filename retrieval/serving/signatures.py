"""Signatures of bundles and indexes: Ed25519 over the one file that holds the checksums of all others."""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retrieval.errors import BundleError, RetrievalError, StoreError
from retrieval.serving.files.places import StrPath
from retrieval.serving.files.snapshot import Snapshot, Unusable
from retrieval.serving.runtime import require

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

ENDING = ".sig"
COVERED: dict[str, tuple[str, type[RetrievalError]]] = {
    "index": ("SHA256SUMS", StoreError),
    "bundle": ("manifest.json", BundleError),
}
_KEY_BYTES = 10_000
_SIGNATURE_BYTES = 200


def check_signature(folder: Snapshot, kind: str, content: bytes, key: StrPath) -> None:
    """Refuse an opened bundle or index that the holder of a key did not sign.

    Args:
        folder: opened.
        kind: "bundle" or "index".
        content: of the file that is signed, as it was read.
        key: the public key's file.

    Raises:
        RetrievalError: `BundleError` or `StoreError`: no signature, a damaged one, or another key's; or no such key.
        MissingDependency: the extra `sign` is not installed.
    """
    from cryptography.exceptions import InvalidSignature

    public = _public(Path(key))
    name, error = COVERED[kind]
    try:
        signature = base64.b64decode(folder.read(f"{name}{ENDING}", _SIGNATURE_BYTES).strip(), validate=True)
        public.verify(signature, message(kind, content))
    except Unusable as fault:
        raise error(
            f"The {kind} {folder.path} is not signed: {name}{ENDING} {fault}. Its maker can sign it with 'retrieval sign'."
        ) from None
    except (binascii.Error, InvalidSignature):
        raise error(
            f"The {kind} {folder.path} is not what the holder of {key} signed: it was changed, or another key signed it."
        ) from None


def message(kind: str, content: bytes) -> bytes:
    """Return what is signed: the kind of folder, then the file that covers all others."""
    return f"retrieval {kind} 1\n".encode() + content


def _public(path: Path) -> Ed25519PublicKey:
    made = read_key(path, lambda text: serialization().load_pem_public_key(text))
    if not isinstance(made, ed25519().Ed25519PublicKey):
        raise RetrievalError(f"{path} is not a public key for Ed25519: name the one that ends in .pub.")
    return cast("Ed25519PublicKey", made)


def read_key(path: Path, load: Any) -> Any:
    """Return what `load` makes of a key's file; None if it is not a key.

    Raises:
        RetrievalError: the file cannot be read.
        MissingDependency: the extra `sign` is not installed.
    """
    ed25519()
    real = Path(os.path.realpath(path))
    try:
        with Snapshot(real.parent) as folder:
            return load(folder.read(real.name, _KEY_BYTES))
    except (Unusable, OSError) as fault:
        raise RetrievalError(
            f"The key {path} {fault if isinstance(fault, Unusable) else 'is missing'}."
        ) from None
    except Exception:  # the library raises several kinds, ValueError and its own
        return None


def ed25519() -> Any:
    """Return cryptography's module of the algorithm.

    Raises:
        MissingDependency: the extra `sign` is not installed.
    """
    require("cryptography", ("cryptography",), "sign")
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return ed25519


def serialization() -> Any:
    """Return cryptography's module of key formats."""
    from cryptography.hazmat.primitives import serialization

    return serialization
