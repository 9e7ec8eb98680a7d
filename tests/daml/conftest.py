from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from retrieval.recipe.read import Recipe, check_recipe
from sklearn.datasets import load_digits


@pytest.fixture(scope="session")
def make(tmp_path_factory) -> Callable[..., Recipe]:
    """Make a checked recipe of DAML and DAMML on digits as vectors, with other tables."""
    digits, file = load_digits(), tmp_path_factory.mktemp("data") / "digits.npz"
    np.savez(
        file, features=(digits.data[:600] / 16.0).astype(np.float32), labels=digits.target[:600]
    )

    def build(**tables: Any) -> Recipe:
        base: dict[str, Any] = {
            "data": {"name": "core.features", "file": str(file)},
            "split": {"by": "item", "validation": 0.0},
            "sampler": {"classes": 4, "items": 4, "batches": 4},
            "backbone": {"name": "core.features"},
            "head": {"embedding_size": 12},
            "combiner": {"name": "daml.discriminator", "metrics": 3, "hidden": 6, "start": 1.0},
            "generator": {"name": "daml.hard_negative"},
            "loss": {"name": "daml.triplet"},
            "optimizer": {"lr": 0.01},
            "train": {"epochs": 2, "device": "cpu"},
        }
        return check_recipe({k: v for k, v in (base | tables).items() if v is not None})

    return build
