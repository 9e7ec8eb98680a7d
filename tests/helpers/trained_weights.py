"""The weights of a run before its first step and after its last, by part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from retrieval.run import checkpoint
from retrieval.training.trainer import train

Make = Callable[..., Any]


def weights(folder: Path, name: str = "last") -> dict[str, torch.Tensor]:
    state = checkpoint.load(folder / "checkpoints" / f"{name}.safetensors")
    return {f"model.{k}": v for k, v in state["model"].items()} | {
        f"{module}.{k}": v
        for module, values in state.get("modules", {}).items()
        for k, v in values.items()
    }


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def fit(tmp_path: Path, made: Any, name: str = "run") -> Path:
    train(tmp_path / name, made)
    return tmp_path / name


def start(tmp_path: Path, made: Any) -> dict[str, torch.Tensor]:
    """The weights before the first step."""
    from retrieval.run.open import build_run

    checkpoint.seed_everything(made.seed)
    run = build_run(tmp_path, made)
    modules = {
        "loss": run.objective.loss,
        "miner": run.objective.miner,
        "generator": run.objective.generator,
    }
    return {f"model.{k}": v.clone() for k, v in run.model.state_dict().items()} | {
        f"{n}.{k}": v.clone()
        for n, m in modules.items()
        if m is not None
        for k, v in m.state_dict().items()
    }


GENERATOR = {"name": "toolbox.mover"}
STILL = {
    "data": {"name": "toolbox.digits"},
    "backbone": {"name": "toolbox.net", "batch_norm": False, "dropout": 0.0},
}
