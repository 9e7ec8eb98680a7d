"""Sign a bundle or an index: its maker's half of `retrieval.serving.signatures`."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

from retrieval.errors import RetrievalError, StoreError
from retrieval.host.files import write_bytes
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.snapshot import Snapshot, Unusable
from retrieval.serving.index.open import format_of, open_index
from retrieval.serving.signatures import COVERED, ENDING, ed25519, message, read_key, serialization
from retrieval.serving.store.writing import FORMAT

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

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
    made = ed25519().Ed25519PrivateKey.generate()
    forms = serialization()
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
    if format_of(folder) == FORMAT:
        raise StoreError(
            f"{folder} is a living index: what is in it changes, so no signature covers it. Sign the bundle that it is made with."
        )
    kind = "index" if (folder / COVERED["index"][0]).is_file() else "bundle"
    name, error = COVERED[kind]
    if kind == "index":
        with open_index(folder, threads=1, device="cpu") as index:
            checked = index.sha256
    else:
        checked = Bundle.open(folder, threads=1, device="cpu").sha256
    target = folder / f"{name}{ENDING}"
    try:
        with Snapshot(folder) as opened:
            content = opened.read(name, _COVERED_BYTES)
        if hashlib.sha256(content).hexdigest() != checked:
            raise error(f"{folder} was changed while it was being signed. Run the command again.")
        write_bytes(target, base64.b64encode(private.sign(message(kind, content))) + b"\n", shared=True)
    except (OSError, Unusable) as fault:
        raise error(f"{target} cannot be written: {getattr(fault, 'strerror', None) or fault}.") from None
    return target


def _private(path: Path) -> Ed25519PrivateKey:
    made = read_key(path, lambda text: serialization().load_pem_private_key(text, password=None))
    if not isinstance(made, ed25519().Ed25519PrivateKey):
        raise RetrievalError(
            f"{path} is not a private key for Ed25519. Make one with 'retrieval sign --new-key'."
        )
    return cast("Ed25519PrivateKey", made)
