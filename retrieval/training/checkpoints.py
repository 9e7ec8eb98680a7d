"""Write and restore checkpoints: all that the next step needs besides the recipe and the data.

A loss can divide the rows of its parameters over several processes. A checkpoint holds the rows of
all processes, so that another number of processes can resume the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, distributed

from retrieval.errors import DataError
from retrieval.model.loss_division import Shard, shards_of
from retrieval.run import checkpoint_format
from retrieval.run.build import load_weights
from retrieval.run.open import Run
from retrieval.run.resume import Position, ResumePoint
from retrieval.training.build_optimizers import Average
from retrieval.training.step import Step


def save_checkpoint(run: Run, step: Step, average: Average, progress: Position) -> None:
    """Write a run's checkpoint.

    All processes must call this function, because they hold different rows of divided parameters.
    """
    accelerator = step.accelerator
    if not (accelerator.is_main_process or step.divided):
        return
    scaler = accelerator.scaler  # of fp16; else `None`
    state = {
        "model": run.model.state_dict(),
        "modules": {name: part.state_dict() for name, part in step.objective.named_children()},
        "average": average.state_dict(),
        **step.state_dict(),
        "scaler": scaler.state_dict() if scaler is not None else {},
        "random": checkpoint_format.random_state(),
        "threads": torch.get_num_threads(),
        "progress": asdict(progress),
    }
    for entry, key, shard in _divided_rows(state, step):
        entry[key] = _gathered(entry[key], shard, accelerator)
    if accelerator.is_main_process:
        checkpoint_format.save(run.last, state, previous=run.previous)


def restore_checkpoint(standing: ResumePoint, run: Run, step: Step, average: Average) -> None:
    """Restore a checkpoint that `save_checkpoint` wrote; the caller restores the progress.

    Raises:
        DataError: the checkpoint belongs to another recipe or plugin.
    """
    state = standing.state
    scaler = step.accelerator.scaler
    try:
        for entry, key, shard in _divided_rows(state, step):
            if len(entry[key]) != shard.whole:
                raise ValueError(
                    f"{key} has {len(entry[key])} rows in the checkpoint, but {shard.whole} here"
                )
            entry[key] = entry[key][shard.start : shard.stop].clone()
        load_weights(run.model, state, standing.file)
        for name, values in state["modules"].items():
            step.objective.get_submodule(name).load_state_dict(values)
        step.load_state_dict(state)
        average.load_state_dict(state.get("average", {}))
        if state["scaler"] and scaler is not None:
            scaler.load_state_dict(state["scaler"])
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
    # last, so that nothing draws from the generators before the next step does
    checkpoint_format.restore_random_state(state["random"])


def _divided_rows(state: dict[str, Any], step: Step) -> Iterator[tuple[dict[Any, Any], Any, Shard]]:
    """Find the rows of divided parameters in a state: their weights, and the optimiser's state.

    Yields:
        A dictionary of the state, the key of rows in it, and the rows' shard.

    Raises:
        DataError: the optimiser keeps a tensor that is not divided like the parameter.
    """
    for name, shard in shards_of(step.objective).items():
        module, _, name_in_module = name.partition(".")
        yield state["modules"][module], name_in_module, shard
        parameter = step.objective.get_parameter(name)
        for side, optimizer in step.optimizers.items():
            # an optimiser's state names its parameters by their numbers, over all groups
            stepped = [id(p) for group in optimizer.param_groups for p in group["params"]]
            entries = state["optimizers"][side]["state"]
            if id(parameter) not in stepped:
                continue
            number = stepped.index(id(parameter))
            if number not in entries:
                continue  # it has not stepped yet
            # the caller changes the entry, and the optimiser still uses its own dictionary
            entries[number] = entry = dict(entries[number])
            for key, value in entry.items():
                if not isinstance(value, Tensor) or not value.ndim:
                    continue  # such as Adam's number of steps
                if len(value) not in (len(parameter), shard.whole):
                    raise DataError(
                        f"[optimizer]: the rows of {name} are divided over processes, but its state"
                        f" '{key}' in the optimiser has the shape {tuple(value.shape)}, so it"
                        " cannot be saved. Use SGD, Adam or AdamW."
                    )
                yield entry, key, shard


def _gathered(rows: Tensor, shard: Shard, accelerator: Any) -> Any:
    """Return all processes' rows, on the CPU, in the main process; the others only send theirs."""
    if not accelerator.is_main_process:
        distributed.send(rows.contiguous(), 0)
        return rows
    whole = torch.empty(shard.whole, *rows.shape[1:], dtype=rows.dtype)
    whole[: len(rows)] = rows
    for rank in range(1, accelerator.num_processes):
        share = Shard.of(shard.whole, rank, accelerator.num_processes)
        part = rows.new_empty(share.stop - share.start, *rows.shape[1:])
        distributed.recv(part, rank)
        whole[share.start : share.stop] = part
    return checkpoint_format.Mapped(whole)
