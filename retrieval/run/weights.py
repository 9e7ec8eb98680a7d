"""A checkpoint's weights, put into a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrieval.errors import DataError
from retrieval.model.model import Model


def load_weights(model: Model, state: Mapping[str, Any], path: Path) -> None:
    """Put a checkpoint's weights into a model.

    Raises:
        DataError: the weights are of another model.
    """
    try:
        model.load_state_dict(state["model"])
    except (KeyError, RuntimeError) as error:
        first = (str(error).splitlines() or ["?"])[-1].strip()
        raise DataError(
            f"{path} holds the weights of another model: {first} The recipe beside it was changed,"
            " or a plugin was."
        ) from error
