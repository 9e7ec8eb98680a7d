"""Signatures of bundles and indexes: Ed25519 over the one file that holds the checksums of all others."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retrieval.errors import BundleError, RetrievalError, StoreError
from retrieval.runtime import require
from retrieval.snapshot import Snapshot, Unusable

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ENDING = ".sig"
_COVERED: dict[str, tuple[str, type[RetrievalError]]] = {
    "index": ("SHA256SUMS", StoreError),
    "bundle": ("manifest.json", BundleError),
}
_KEY_BYTES = 10_000
_SIGNATURE_BYTES = 200
_COVERED_BYTES = 4_000_000


def new_key(path: Path) -> Path:
    """Write a new private key, which only its owner may read, and beside it the public one.

    Args:
        path: of the private key; must not exist.

    Returns:
        The public key's path: the private one's with `.pub` added.

    Raises:
        RetrievalError: a file is there already, or cannot be written.
        MissingDependency: the extra `sign` is not installed.
    """
    made = _ed25519().Ed25519PrivateKey.generate()
    forms = _serialization()
    private = made.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    public = made.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    other = path.with_name(f"{path.name}.pub")
    for target, content, mode in ((path, private, 0o600), (other, public, 0o644)):
        try:
            with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
        except FileExistsError:
            raise RetrievalError(f"{target} exists already: keys are never written over.") from None
        except OSError as fault:
            raise RetrievalError(f"{target} cannot be written: {fault.strerror or fault}.") from None
    return other


def sign(folder: Path, key: Path) -> Path:
    """Sign a bundle or an index, which is checked first, and return the signature's path.

    Args:
        folder: of the bundle or index.
        key: a private key, as `new_key` writes it.

    Raises:
        RetrievalError: neither a bundle nor an index, damaged, or no such key.
        MissingDependency: the extra `sign` is not installed.
    """
    private = _private(key)
    kind = "index" if (folder / _COVERED["index"][0]).is_file() else "bundle"
    name, error = _COVERED[kind]
    if kind == "index":
        from retrieval.index.store import Index

        with Index.open(folder, threads=1, device="cpu") as index:
            checked = index.sha256
    else:
        from retrieval.bundle import Bundle

        checked = Bundle.open(folder, threads=1, device="cpu").sha256
    target = folder / f"{name}{ENDING}"
    temporary = folder / f".{name}{ENDING}.{os.getpid()}"
    try:
        with Snapshot(folder) as opened:
            content = opened.read(name, _COVERED_BYTES)
        if hashlib.sha256(content).hexdigest() != checked:
            raise error(f"{folder} was changed while it was being signed. Run the command again.")
        temporary.write_bytes(base64.b64encode(private.sign(_message(kind, content))) + b"\n")
        temporary.replace(target)
    except (OSError, Unusable) as fault:
        raise error(f"{target} cannot be written: {getattr(fault, 'strerror', None) or fault}.") from None
    finally:
        temporary.unlink(missing_ok=True)
    return target


def check_signature(folder: Snapshot, kind: str, content: bytes, key: Path) -> None:
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

    public = _public(key)
    name, error = _COVERED[kind]
    try:
        signature = base64.b64decode(folder.read(f"{name}{ENDING}", _SIGNATURE_BYTES).strip(), validate=True)
        public.verify(signature, _message(kind, content))
    except Unusable as fault:
        raise error(
            f"The {kind} {folder.path} is not signed: {name}{ENDING} {fault}. Its maker can sign it with 'retrieval sign'."
        ) from None
    except (binascii.Error, InvalidSignature):
        raise error(
            f"The {kind} {folder.path} is not what the holder of {key} signed: it was changed, or another key signed it."
        ) from None


def _message(kind: str, content: bytes) -> bytes:
    return f"retrieval {kind} 1\n".encode() + content


def _private(path: Path) -> Ed25519PrivateKey:
    made = _read_key(path, lambda text: _serialization().load_pem_private_key(text, password=None))
    if not isinstance(made, _ed25519().Ed25519PrivateKey):
        raise RetrievalError(
            f"{path} is no private key for Ed25519. Make one with 'retrieval sign --new-key'."
        )
    return cast("Ed25519PrivateKey", made)


def _public(path: Path) -> Ed25519PublicKey:
    made = _read_key(path, lambda text: _serialization().load_pem_public_key(text))
    if not isinstance(made, _ed25519().Ed25519PublicKey):
        raise RetrievalError(f"{path} is no public key for Ed25519: name the one that ends in .pub.")
    return cast("Ed25519PublicKey", made)


def _read_key(path: Path, load: Any) -> Any:
    _ed25519()
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


def _ed25519() -> Any:
    require("cryptography", ("cryptography",), "sign")
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return ed25519


def _serialization() -> Any:
    from cryptography.hazmat.primitives import serialization

    return serialization
