"""A checkpoint to resume from: all that the next step depends on, beside recipe and data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrieval.errors import DataError
from retrieval.model.shards import Shard, shards_of
from retrieval.run import checkpoint
from retrieval.run.open import Run
from retrieval.run.resume import Position, Standing
from retrieval.run.weights import load_weights
from retrieval.training.step import Step

PATTERN = "shard-*.safetensors"
"""What the files of shares are called, beside the checkpoint."""


class Shares:
    """What a run's checkpoint keeps in files of each process."""

    def __init__(self, folder: Path, step: Step) -> None:
        self.folder, self.step = folder, step
        self.shards = shards_of(step.objective)

    def __bool__(self) -> bool:
        """Whether any parameter is divided."""
        return bool(self.shards)

    def write(self, state: dict[str, Any], progress: Position) -> list[str]:
        """Move this process's rows from a state to a file of their own; return all such files.

        The state says which files there are.
        """
        devices = self.step.devices
        names = [
            f"shard-{progress.phase}-{progress.total}-{rank}of{devices.world}.safetensors"
            for rank in range(devices.world)
        ]
        rows = {place: entry.pop(key) for place, entry, key in self._places(state)}
        checkpoint.save(self.folder / names[devices.rank], {"rows": rows})
        state["shards"] = {
            "files": names,
            "rows": {name: shard.whole for name, shard in self.shards.items()},
        }
        return names

    def read(self, state: dict[str, Any]) -> None:
        """Put this process's rows back into a state, from whichever files hold them.

        Raises:
            DataError: a file is missing or damaged, or the parameters had another number of rows.
        """
        kept = state.get("shards", {"files": [], "rows": {}})
        whole = {name: shard.whole for name, shard in self.shards.items()}
        if kept["rows"] != whole:
            raise DataError(
                f"The checkpoint in {self.folder} has divided parameters of {kept['rows']} rows,"
                f" and the recipe's have {whole}."
            )
        files, world = kept["files"], len(kept["files"])
        parts_of: dict[str, list[Tensor]] = {}
        for rank, file in enumerate(files):
            cuts = {
                name: _cut(shard, Shard.of(shard.whole, rank, world))
                for name, shard in self.shards.items()
            }
            if all(cut is None for cut in cuts.values()):
                continue
            for place, rows in checkpoint.load(self.folder / file)["rows"].items():
                if (cut := cuts[place.split("/")[1]]) is not None:
                    parts_of.setdefault(place, []).append(rows[cut].clone())
        for place, parts in parts_of.items():
            where, name, key = place.split("/")
            if where == "modules":
                module, _, own = name.partition(".")
                state["modules"][module][own] = torch.cat(parts)
            else:
                state["optimizers"][where]["state"][self._number(where, name)][key] = torch.cat(
                    parts
                )

    def forget(self, kept: list[str]) -> None:
        """Remove the files of checkpoints that are gone."""
        for file in self.folder.glob(PATTERN):
            if file.name not in kept:
                file.unlink(missing_ok=True)

    def _places(self, state: dict[str, Any]) -> list[tuple[str, dict[Any, Any], Any]]:
        """Return where the divided rows are in a state: place, dictionary and key."""
        places: list[tuple[str, dict[Any, Any], Any]] = []
        for name in self.shards:
            module, _, own = name.partition(".")
            places.append((f"modules/{name}/", state["modules"][module], own))
            shape = self.step.objective.get_parameter(name).shape
            for optimizer in state["optimizers"]:
                entries, number = (
                    state["optimizers"][optimizer]["state"],
                    self._number(optimizer, name),
                )
                if number not in entries:
                    continue
                entries[number] = entry = dict(
                    entries[number]
                )  # the optimiser goes on with its own
                for key, value in entry.items():
                    if isinstance(value, Tensor) and value.ndim:
                        if value.shape != shape:
                            raise DataError(
                                f"[optimizer]: its state '{key}' of the divided {name} has the"
                                f" shape {tuple(value.shape)} and is not of rows, so it cannot be"
                                " kept. Use SGD, Adam or AdamW."
                            )
                        places.append((f"{optimizer}/{name}/{key}", entry, key))
        return places

    def _number(self, optimizer: str, name: str) -> int:
        """Return a parameter's number in an optimiser's state; −1 where it is not stepped."""
        parameter = self.step.objective.get_parameter(name)
        groups = self.step.optimizers[optimizer].param_groups
        stepped: Iterator[Tensor] = (p for group in groups for p in group["params"])
        return next((number for number, p in enumerate(stepped) if p is parameter), -1)


def _cut(own: Shard, file: Shard) -> slice | None:
    """Return which rows of a file's share are this process's; None: none."""
    start, stop = max(own.start, file.start), min(own.stop, file.stop)
    return slice(start - file.start, stop - file.start) if start < stop else None


def training_state(run: Run, step: Step, scaler: Any, progress: Position) -> dict[str, Any]:
    """Return all that the next step depends on: weights, optimisers, schedules, generators."""
    return {
        "model": run.model.state_dict(),
        "modules": {name: part.state_dict() for name, part in step.objective.named_children()},
        **step.state_dict(),
        "scaler": scaler.state_dict() if scaler is not None else {},
        "random": checkpoint.random_state(),
        "progress": asdict(progress),
    }


def save(run: Run, step: Step, progress: Position, before: Sequence[str] = ()) -> list[str]:
    """Write the checkpoint to resume from; every process calls it and writes its own rows.

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
