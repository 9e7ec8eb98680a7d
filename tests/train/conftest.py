from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from retrieval.recipe.read import Recipe, check_recipe

TOOLBOX = str(Path(__file__).with_name("toolbox.py"))

BASE: dict[str, Any] = {
    "name": "test",
    "plugins": [TOOLBOX],
    "data": {"name": "toolbox.digits"},
    "split": {"by": "class"},
    "sampler": {"classes": 4, "items": 4, "batches": 5},
    "backbone": {"name": "toolbox.net"},
    "head": {"embedding_size": 16},
    "loss": {"name": "toolbox.deadly"},
    "train": {"epochs": 2},
}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Recipe]:
    """A checked recipe: the base, changed by tables."""
    monkeypatch.setenv("RETRIEVAL_CACHE", str(tmp_path / "cache"))

    def build(**tables: Any) -> Recipe:
        merged = {**BASE, **tables}
        return check_recipe({k: v for k, v in merged.items() if v is not None})

    return build
