"""What a checkpoint to resume from holds: all that the next step depends on, beside the recipe and
the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from retrieval.errors import DataError
from retrieval.run import checkpoint
from retrieval.run.open import Run
from retrieval.run.position import Position
from retrieval.run.resume import Standing
from retrieval.run.weights import load_weights
from retrieval.training.shards import Shares
from retrieval.training.step import Step


def training_state(run: Run, step: Step, scaler: Any, progress: Position) -> dict[str, Any]:
    """Return the weights, the state of optimisers, schedules, gradient scaler (None without one)
    and random generators.
    """
    return {
        "model": run.model.state_dict(),
        "modules": {name: part.state_dict() for name, part in step.objective.named_children()},
        **step.state_dict(),
        "scaler": scaler.state_dict() if scaler is not None else {},
        "random": checkpoint.random_state(),
        "progress": asdict(progress),
    }


def save(run: Run, step: Step, progress: Position, before: Sequence[str] = ()) -> list[str]:
    """Write the checkpoint to resume from; every process calls it, and each writes the rows that it
    alone has.

    Args:
        run: whose it is.
        step: what trains.
        progress: where training is.
        before: the files of rows that the checkpoint before this one names.

    Returns:
        The files of rows that this one names.
    """
    accelerator, shares = step.accelerator, Shares(run.last.parent, step)
    if not (accelerator.is_main_process or shares):
        return []
    state = training_state(run, step, accelerator.scaler, progress)
    files: list[str] = []
    if shares:
        files = shares.write(state, progress)
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        checkpoint.save(run.last, state, previous=run.previous)
        if shares:
            shares.forget([*files, *before])
    return files


def restore(standing: Standing, run: Run, step: Step, scaler: Any) -> None:
    """Put everything back that `training_state` took, but the random generators and the progress.

    Raises:
        Exception: of several kinds, where the state is of something else: see `fitting`.
    """
    state = standing.state
    if shares := Shares(run.last.parent, step):
        shares.read(state)
    load_weights(run.model, state, standing.file)
    for name, values in state["modules"].items():
        step.objective.get_submodule(name).load_state_dict(values)
    step.load_state_dict(state)
    if state["scaler"] and scaler is not None:
        scaler.load_state_dict(state["scaler"])


@contextmanager
def fitting(file: Path) -> Iterator[None]:
    """Turn what restoring raises where a checkpoint is of something else into a sentence.

    Raises:
        DataError: the checkpoint `file` is of another recipe or plugin.
    """
    try:
        yield
    except (
        KeyError,
        AttributeError,
        TypeError,
        ValueError,
        RuntimeError,
        AssertionError,
        IndexError,
    ) as error:
        raise DataError(
            f"{file} does not fit this recipe ({error}). Resume with the recipe and plugins that"
            " started the run."
        ) from error
