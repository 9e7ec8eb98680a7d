"""The checkpoint to resume from: everything that the next step needs besides recipe and data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from retrieval.training.optim import Average
from retrieval.training.step import Step

PATTERN = "shard-*.safetensors"
"""Names of the files of divided parameters, next to the checkpoint."""


class Shares:
    """The rows of divided parameters, which each process keeps in a file of its own."""

    def __init__(self, folder: Path, step: Step) -> None:
        self.folder, self.step = folder, step
        self.shards = shards_of(step.objective)

    def __bool__(self) -> bool:
        """Return whether any parameter is divided."""
        return bool(self.shards)

    def write(self, state: dict[str, Any], progress: Position) -> list[str]:
        """Move this process's rows from a state to a file; return the files of all processes.

        The state records the names of the files.
        """
        accelerator = self.step.accelerator
        names = [
            f"shard-{progress.phase}-{progress.total}-{rank}of{accelerator.num_processes}.safetensors"
            for rank in range(accelerator.num_processes)
        ]
        rows = {place: entry.pop(key) for place, entry, key in self._places(state)}
        checkpoint.save(self.folder / names[accelerator.process_index], {"rows": rows})
        state["shards"] = {
            "files": names,
            "rows": {name: shard.whole for name, shard in self.shards.items()},
        }
        return names

    def read(self, state: dict[str, Any]) -> None:
        """Put this process's rows back into a state, from the files that hold them.

        Raises:
            DataError: a file is missing or damaged, or a parameter had another number of rows.
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
        """Remove all files of rows but `kept`."""
        for file in self.folder.glob(PATTERN):
            if file.name not in kept:
                file.unlink(missing_ok=True)

    def _places(self, state: dict[str, Any]) -> list[tuple[str, dict[Any, Any], Any]]:
        """Return the place, dictionary and key of each tensor of divided rows in a state."""
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
                # a copy, because the optimiser keeps using its own dictionary
                entries[number] = entry = dict(entries[number])
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
        """Return a parameter's number in an optimiser's state, or −1 if it has none."""
        parameter = self.step.objective.get_parameter(name)
        groups = self.step.optimizers[optimizer].param_groups
        stepped: Iterator[Tensor] = (p for group in groups for p in group["params"])
        return next((number for number, p in enumerate(stepped) if p is parameter), -1)


def _cut(own: Shard, file: Shard) -> slice | None:
    """Return the rows of a file that belong to this process, or `None`."""
    start, stop = max(own.start, file.start), min(own.stop, file.stop)
    return slice(start - file.start, stop - file.start) if start < stop else None


def save(
    run: Run, step: Step, average: Average, progress: Position, before: Sequence[str] = ()
) -> list[str]:
    """Write the checkpoint to resume from; every process calls it and writes its own rows.

    Args:
        run: the run.
        step: the current phase's optimisers and schedules.
        average: the current phase's average of the weights.
        progress: how far training has come.
        before: the files of rows of the previous checkpoint, which are kept.

    Returns:
        The files of rows of this checkpoint.
    """
    accelerator, shares = step.accelerator, Shares(run.last.parent, step)
    if not (accelerator.is_main_process or shares):
        return []
    scaler = accelerator.scaler
    state = {
        "model": run.model.state_dict(),
        "modules": {name: part.state_dict() for name, part in step.objective.named_children()},
        "average": average.state_dict(),
        **step.state_dict(),
        "scaler": scaler.state_dict() if scaler is not None else {},
        "random": checkpoint.random_state(),
        "progress": asdict(progress),
    }
    files: list[str] = []
    if shares:
        files = shares.write(state, progress)
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        checkpoint.save(run.last, state, previous=run.previous)
        if shares:
            shares.forget([*files, *before])
    return files


def restore(standing: Standing, run: Run, step: Step, average: Average) -> list[str]:
    """Restore a checkpoint that `save` wrote, except for the progress.

    Returns:
        The files of rows of the checkpoint.

    Raises:
        DataError: the checkpoint belongs to another recipe or plugin.
    """
    state, scaler = standing.state, step.accelerator.scaler
    try:
        if shares := Shares(run.last.parent, step):
            shares.read(state)
        load_weights(run.model, state, standing.file)
        for name, values in state["modules"].items():
            step.objective.get_submodule(name).load_state_dict(values)
        step.load_state_dict(state)
        average.load_state_dict(state.get("average", {}))
        if state["scaler"] and scaler is not None:
            scaler.load_state_dict(state["scaler"])
        files = list(state.get("shards", {}).get("files", []))
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
            f"{standing.file} does not fit this recipe ({error}). Resume with the recipe and"
            " plugins that started the run."
        ) from error
    checkpoint.restore_random_state(state["random"])
    return files
