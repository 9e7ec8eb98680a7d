"""Runs in the tests of training: their recipes, weights, logs and summaries, and comparisons."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from click.testing import CliRunner
from PIL import Image
from retrieval.cli.app import app
from retrieval.run import checkpoint_format
from retrieval.run.open import Run, build_run
from retrieval.training.trainer import Trainer, train_run
from sklearn.datasets import load_digits

Make = Callable[..., Any]
Weights = dict[str, torch.Tensor]
GENERATOR = {"name": "toolbox.mover"}
STILL = {
    "data": {"name": "toolbox.digits"},
    "backbone": {"name": "toolbox.net", "batch_norm": False, "dropout": 0.0},
}
# one epoch of three batches by plain gradient descent, without dropout and batch norm
STEADY: dict[str, Any] = {
    **STILL,
    "sampler": {"classes": 4, "items": 4, "batches": 3},
    "head": {"embedding_size": 12},
    "optimizer": {"name": "SGD", "lr": 0.05},
    "train": {"epochs": 1},
}
# a recipe of four small batches and two epochs, without a plugin of the tests
SMALL: dict[str, Any] = {
    "name": "small",
    "data": {"name": "core.digits"},
    "split": {"by": "class"},
    "sampler": {"classes": 4, "items": 4, "batches": 4},
    "backbone": {"name": "core.convnet", "size": 8, "width": 2, "depth": 2},
    "head": {"embedding_size": 4},
    "loss": {"name": "pml.contrastive"},
    "train": {"epochs": 2, "device": "cpu"},
}


def retrieval(*words: object) -> Any:
    """Run a command, and return its result with any exception."""
    return CliRunner().invoke(app, [str(word) for word in words])


def ran(*words: object) -> str:
    """Run a command that must succeed, and return its output."""
    result = retrieval(*words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return str(result.output)


def load(folder: Path, name: str = "last") -> Any:
    return checkpoint_format.load_checkpoint(folder / "checkpoints" / f"{name}.safetensors")


def weights(folder: Path, name: str = "last") -> Weights:
    """The weights by part, as `model.head.0.weight`."""
    state = load(folder, name)
    parts = {"model": state["model"], **state.get("modules", {})}
    return {f"{part}.{k}": v for part, values in parts.items() for k, v in values.items()}


def start(tmp_path: Path, recipe: Any) -> Weights:
    """The weights before the first step."""
    checkpoint_format.seed_everything(recipe.seed)
    run = build_run(tmp_path, recipe)
    parts = {name: getattr(run.objective, name) for name in ("loss", "miner", "generator")}
    states = {part: module.state_dict() for part, module in parts.items() if module is not None}
    states["model"] = run.model.state_dict()
    return {f"{part}.{k}": v.clone() for part, state in states.items() for k, v in state.items()}


def moved(before: Weights, after: Weights) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def same(one: Path, other: Path, name: str = "last") -> bool:
    """Whether two runs have the same weights, bit for bit."""
    ours, theirs = weights(one, name), weights(other, name)
    return ours.keys() == theirs.keys() and not moved(ours, theirs)


def same_state(left: Any, right: Any, where: str = "state") -> None:
    """Fail unless two nested states are the same, bit for bit."""
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            same_state(left[key], right[key], f"{where}/{key}")
    elif isinstance(left, list | tuple):
        for number, pair in enumerate(zip(left, right, strict=True)):
            same_state(*pair, f"{where}/{number}")
    else:
        assert left == right, where


def difference(one: Weights, other: Weights) -> float:
    """The largest difference of any weight."""
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def apart(one: Path, other: Path, name: str = "last") -> float:
    return difference(weights(one, name), weights(other, name))


def lines_of(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def log(folder: Path) -> list[dict[str, Any]]:
    """The records of the epochs, without what depends on the clock."""
    lines = lines_of(folder)
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in lines]


def summary(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())


def fit(tmp_path: Path, recipe: Any, name: str = "run") -> Path:
    train_run(tmp_path / name, recipe)
    return tmp_path / name


def reported(folder: Path, recipe: Any) -> tuple[Run, list[str]]:
    """A new run, and the lines that its training reported."""
    lines: list[str] = []
    return train_run(folder, recipe, report=lines.append), lines


def digit_photos(folder: Path, count: int, classes: int = 4) -> Path:
    """Write `count` digits of each class as PNG files, into one folder per class."""
    digits = load_digits()
    for label in range(classes):
        (folder / str(label)).mkdir(parents=True)
        for i, image in enumerate(digits.images[digits.target == label][:count]):
            pixels = Image.fromarray((image * 15.9).astype(np.uint8))
            pixels.save(folder / str(label) / f"{i:02}.png")
    return folder


def trainer_of(tmp_path: Path, recipe: Any) -> Trainer:
    """The trainer of a new run, before its first step."""
    checkpoint_format.seed_everything(0)
    return Trainer(build_run(tmp_path, recipe), Accelerator(cpu=True))
