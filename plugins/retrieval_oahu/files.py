"""A learner as one safetensors file: its arrays, and its parameters and numbers as JSON beside
them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from retrieval.errors import DataError
from retrieval.host.files import write_bytes
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

T = TypeVar("T")
_KEY = "retrieval_oahu"


def save(learner: Any, path: Path) -> None:
    """Write a fitted learner; the file appears whole or not at all.

    Raises:
        DataError: the file cannot be written.
    """
    arrays, numbers = {}, {}
    for name, value in vars(learner).items():
        if not name.endswith("_") or name.startswith("_"):
            continue
        if isinstance(value, np.ndarray):
            arrays[name] = np.ascontiguousarray(value)
        elif isinstance(value, bool | int | float | str) or value is None:
            numbers[name] = value
    about = {
        "learner": type(learner).__name__,
        "parameters": learner.get_params(),
        "fitted": numbers,
    }
    content = to_bytes(arrays, metadata={_KEY: json.dumps(about)})
    write_bytes(path, content, DataError, shared=True)


def load(kind: type[T], path: Path) -> T:
    """Return the learner in a file.

    Raises:
        DataError: the file is missing, damaged, or holds another learner.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {}).get(_KEY, "{}"))
            arrays = {name: np.array(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.") from None
    except (OSError, SafetensorError, ValueError) as fault:
        raise DataError(
            f"{path} is not a whole safetensors file: {str(fault).rstrip('.')}."
        ) from fault
    if not isinstance(about, dict) or about.get("learner") != kind.__name__:
        held = about.get("learner") if isinstance(about, dict) else None
        raise DataError(f"{path} holds {held or 'no learner of a stream'}, not {kind.__name__}.")
    try:
        learner = kind(**about["parameters"])
        fitted = {**about["fitted"], **arrays}
        if "n_features_in_" not in fitted or "n_triplets_" not in fitted:
            raise KeyError("n_features_in_")
    except (TypeError, KeyError) as fault:
        raise DataError(f"{path} does not hold what {kind.__name__} needs: {fault}.") from fault
    for name, value in fitted.items():
        setattr(learner, name, value)
    return learner
