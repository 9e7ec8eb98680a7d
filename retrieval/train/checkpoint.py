"""Checkpoints: one safetensors file, whole or not at all, and nothing pickled.

Any nesting of dicts and lists with tensors and plain values becomes named tensors, and a JSON skeleton in the file's
header that says where each belongs.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from retrieval.errors import DataError

FORMAT = "retrieval checkpoint 1"


def save(path: Path, state: Any) -> None:
    """Write a nested state atomically: a crash at any moment leaves the old file or the new one.

    Args:
        path: the file.
        state: dicts (with text or integer keys), lists, tuples, tensors, numbers, text, None.

    Raises:
        DataError: the disk is full or the folder cannot be written; the old file is untouched.
    """
    tensors: dict[str, Tensor] = {}
    skeleton = _flatten(state, "", tensors)
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file(tensors, temporary, metadata={"format": FORMAT, "state": json.dumps(skeleton)})
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise DataError(
            f"{path} cannot be written: {error}. The previous checkpoint, if any, is untouched."
        ) from error


def load(path: Path) -> Any:
    """Return the nested state of a file that `save` wrote, on the CPU.

    Raises:
        DataError: it is missing, damaged or no checkpoint.
    """
    if not path.is_file():
        raise DataError(f"There is no checkpoint {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise DataError(
                    f"{path} is no checkpoint of this program (its format is {metadata.get('format', 'unstated')!r})."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _unflatten(json.loads(metadata["state"]), tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged and cannot be read: {error}. Use another checkpoint, or train again."
        ) from error


def _flatten(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[place] = value.detach().cpu().contiguous().clone()
        return {"tensor": place}
    if isinstance(value, dict):
        return {"dict": [[k, _flatten(v, f"{place}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return {
            "list": [_flatten(v, f"{place}/{i}", tensors) for i, v in enumerate(value)],
            "tuple": isinstance(value, tuple),
        }
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"{place} holds a {type(value).__name__}, which a checkpoint cannot keep")


def _unflatten(node: Any, tensors: dict[str, Tensor]) -> Any:
    if "tensor" in node:
        return tensors[node["tensor"]]
    if "dict" in node:
        return {k: _unflatten(v, tensors) for k, v in node["dict"]}
    if "list" in node:
        made = [_unflatten(v, tensors) for v in node["list"]]
        return tuple(made) if node["tuple"] else made
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
    """Put every global random generator back to `random_state()`."""
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
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
