"""Checkpoints: one safetensors file with a checksum, written atomically, without pickle.

A nested state of dicts and lists becomes named tensors, and a JSON skeleton in the file's header
that says where in the state each tensor belongs. The header also holds the file's SHA-256, which is
computed while zeros stand in its place. One rename therefore publishes tensors and checksum.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors, load_file, save_file
from torch import Tensor

from retrieval.base.files import whole_file
from retrieval.errors import DataError

CHECKPOINT_FORMAT = "retrieval checkpoint 2"
TRAIN_AGAIN = "Train again, with --replace (in Python replace=True)."
"""Advice if a checkpoint is damaged and the run cannot be used without it."""

_BLANK = "0" * 64
"""Placeholder for the checksum while it is computed: as many zeros as a SHA-256 has hex digits."""
# Nothing else in the header matches: quotation marks inside strings are escaped, and a tensor named
# "sha256" has an object as its value, not a string.
_CHECKSUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')


@dataclass(frozen=True)
class Mapped:
    """A large tensor on the CPU, written without a copy, and loaded as a view of the file.

    A process that needs a few of the tensor's rows therefore reads only these into memory.
    """

    tensor: Tensor


def save(path: Path, state: Any, previous: Path | None = None) -> None:
    """Write a nested state atomically: a crash at any moment leaves the old file or the new one.

    Args:
        path: the file.
        state: nested dicts (with text or integer keys), lists and tuples of tensors, `Mapped`
            tensors, numbers, text and `None`.
        previous: where to keep the replaced file; `None` discards it.

    Raises:
        DataError: the disk is full or the folder is not writable; the old file is untouched.
    """
    tensors: dict[str, Tensor] = {}
    skeleton = _flatten(state, "", tensors)
    metadata = {"format": CHECKPOINT_FORMAT, "state": json.dumps(skeleton), "sha256": _BLANK}
    try:
        with whole_file(path) as temporary:
            save_file(tensors, temporary, metadata=metadata)
            _seal(temporary)
            if previous is not None and path.exists():
                _keep(path, previous)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path} cannot be written: {error}. The previous checkpoint, if any, is untouched."
        ) from error


def load_checkpoint(path: Path, advice: str = "Use another checkpoint, or train again.") -> Any:
    """Return the nested state of a file that `save` wrote, with its tensors on the CPU.

    `Mapped` tensors are views of the file: copy what is used, and drop the rest.

    Args:
        path: the file.
        advice: last sentence of the error for a damaged file.

    Raises:
        DataError: the file is missing or damaged, or is not a checkpoint.
    """
    if not path.is_file():
        raise DataError(f"There is no checkpoint {path}.")
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        metadata = _verified(content)
        if metadata.get("format") != CHECKPOINT_FORMAT:
            raise DataError(
                f"{path} is not a checkpoint of this program (its format is"
                f" {metadata.get('format', 'unstated')!r})."
            )
        views = '{"mapped": ' in metadata["state"]
        # only `Mapped` tensors need a map of the file, of which a process reads what it uses
        if views:
            tensors = load_file(path)
        else:
            tensors = load_tensors(content[:])
        return _unflatten(json.loads(metadata["state"]), tensors, views)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, KeyError):
            reason = f"it holds no {error}"
        else:
            reason = str(error)
        raise DataError(
            f"{path} is damaged and cannot be read: {reason.rstrip('.')}. {advice}"
        ) from error


def _seal(path: Path) -> None:
    """Write the checksum over the zeros that `save` left in its place, and sync the file."""
    with path.open("rb+") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        match = _CHECKSUM.search(header)
        assert match is not None
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(8 + match.start(1))
        file.write(digest.encode())
        file.flush()
        os.fsync(file.fileno())


def _verified(content: mmap.mmap) -> dict[str, Any]:
    """Check the checksum of a file's content, and return the metadata in its header.

    Raises:
        ValueError: the content has changed since it was written, or is not a safetensors file.
    """
    end = 8 + int.from_bytes(content[:8], "little")
    match = _CHECKSUM.search(content, 8, min(end, len(content)))
    if match is not None:
        digest = hashlib.sha256(memoryview(content)[: match.start(1)])
        digest.update(_BLANK.encode())
        digest.update(memoryview(content)[match.end(1) :])
        if digest.hexdigest().encode() != match[1]:
            raise ValueError("its content does not have the SHA-256 that it was written with")
    header = json.loads(content[8:end])
    if isinstance(header, dict):
        metadata = header.get("__metadata__")
    else:
        metadata = None
    if not isinstance(metadata, dict):
        return {}
    if match is None and "state" in metadata:
        raise ValueError("its checksum is missing or cannot be read")
    return metadata


def _keep(path: Path, previous: Path) -> None:
    """Replace `previous` with the file `path`: by a hard link if possible, else by moving `path`.

    A link leaves `path` in place until the new checkpoint replaces it.
    """
    link = previous.with_name(previous.name + ".tmp")
    try:
        link.unlink(missing_ok=True)
        link.hardlink_to(path)
    except OSError:
        path.replace(previous)
    else:
        link.replace(previous)


def _flatten(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Mapped):
        tensors[key] = value.tensor
        return {"mapped": key}
    if isinstance(value, Tensor):
        # safetensors refuses tensors that share memory, as tied weights do
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {"tensor": key}
    if isinstance(value, dict):
        return {"dict": [[k, _flatten(v, f"{key}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return {
            "list": [_flatten(v, f"{key}/{i}", tensors) for i, v in enumerate(value)],
            "tuple": isinstance(value, tuple),
        }
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"{key} holds a {type(value).__name__}, which a checkpoint cannot hold")


def _unflatten(node: Any, tensors: dict[str, Tensor], views: bool) -> Any:
    """Return the state of a skeleton; `views` says that the tensors are views of the file."""
    if "mapped" in node:
        return tensors[node["mapped"]]
    if "tensor" in node:
        tensor = tensors[node["tensor"]]
        if views:
            return tensor.clone()
        return tensor
    if "dict" in node:
        return {k: _unflatten(v, tensors, views) for k, v in node["dict"]}
    if "list" in node:
        items = [_unflatten(v, tensors, views) for v in node["list"]]
        if node["tuple"]:
            return tuple(items)
        return items
    return node["value"]


def random_state() -> dict[str, Any]:
    """Return the state of every global random generator: torch, each GPU, numpy, Python."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ],
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss_next],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned; skip the GPUs if their number has changed."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(int(word) for word in words), gauss_next))


def seed_everything(seed: int) -> None:
    """Seed torch (every device), numpy and Python."""
    random.seed(seed)
    # numpy accepts seeds of 32 bits alone
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def python_random_kept() -> Iterator[None]:
    """Context manager that restores the state of Python's random generator at its end.

    Some modules (rich, imported by scikit-learn) draw random numbers when they are imported. Only
    a process's first run imports them, so that run would draw other numbers than later runs.
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
