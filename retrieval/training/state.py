"""Checkpoints to resume from: all that the next step needs besides the recipe and the data.

A loss can divide parameters over several processes, so that each process holds only some of their
rows. A checkpoint stores these rows in one extra file per process.
"""

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
"""Names of the files that hold the rows of divided parameters, next to the checkpoint."""


class Shares:
    """Moves rows of divided parameters between a checkpoint's state and one file per process."""

    def __init__(self, folder: Path, step: Step) -> None:
        self.folder, self.step = folder, step
        self.shards = shards_of(step.objective)

    def __bool__(self) -> bool:
        """Return whether any parameter is divided."""
        return bool(self.shards)

    def write(self, state: dict[str, Any], progress: Position) -> list[str]:
        """Move this process's rows from a state to a file, and return all processes' file names.

        The state records the file names, too.
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

        The files may have been written by another number of processes.

        Raises:
            DataError: a file is missing or damaged, or a parameter had another number of rows.
        """
        kept = state.get("shards", {"files": [], "rows": {}})
        whole = {name: shard.whole for name, shard in self.shards.items()}
        if kept["rows"] != whole:
            raise DataError(
                f"The checkpoint in {self.folder} does not fit the recipe. Rows of divided"
                f" parameters in the checkpoint: {kept['rows']}; in the recipe: {whole}."
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
        """Remove all files of rows except those named in `kept`."""
        for file in self.folder.glob(PATTERN):
            if file.name not in kept:
                file.unlink(missing_ok=True)

    def _places(self, state: dict[str, Any]) -> list[tuple[str, dict[Any, Any], Any]]:
        """Return where a state holds each tensor of divided rows.

        A tensor's entry is its path in the file of rows, and the dictionary and key in the state
        that hold it.
        """
        places: list[tuple[str, dict[Any, Any], Any]] = []
        for name in self.shards:
            module, _, own = name.partition(".")
            places.append((f"modules/{name}/", state["modules"][module], own))
            shape = self.step.objective.get_parameter(name).shape
            for optimizer in state["optimizers"]:
                entries = state["optimizers"][optimizer]["state"]
                number = self._number(optimizer, name)
                if number not in entries:
                    continue
                # a copy, because the optimiser keeps using its own dictionary
                entries[number] = entry = dict(entries[number])
                for key, value in entry.items():
                    if isinstance(value, Tensor) and value.ndim:
                        if value.shape != shape:
                            raise DataError(
                                f"[optimizer]: the rows of {name} are divided over processes, but"
                                f" its state '{key}' in the optimiser has the shape"
                                f" {tuple(value.shape)}, so it cannot be saved. Use SGD, Adam or"
                                " AdamW."
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
    """Return which rows of a file belong to this process, or `None` if none do."""
    start, stop = max(own.start, file.start), min(own.stop, file.stop)
    return slice(start - file.start, stop - file.start) if start < stop else None


def save(
    run: Run, step: Step, average: Average, progress: Position, before: Sequence[str] = ()
) -> list[str]:
    """Write the checkpoint to resume from.

    Every process must call this function, because each writes its own rows of divided parameters.

    Args:
        run: the run.
        step: the current phase's optimisers and schedules.
        average: the current phase's average of the weights.
        progress: how far training has come.
        before: the previous checkpoint's files of rows, which are kept; older files are removed.

    Returns:
        The names of this checkpoint's files of rows.
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
        The names of the checkpoint's files of rows.

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
        LookupError,
        AttributeError,
        TypeError,
        ValueError,
        RuntimeError,
        AssertionError,
    ) as error:
        raise DataError(
            f"{standing.file} does not fit this recipe ({error}). Resume with the recipe and"
            " plugins that started the run."
        ) from error
    checkpoint.restore_random_state(state["random"])
    return files
