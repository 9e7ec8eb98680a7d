"""Parameters whose rows are divided over processes.

A module with such parameters has an attribute `shards`, which maps the name of each divided
parameter to the rows that this process holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import distributed, nn


@dataclass(frozen=True)
class Shard:
    """Rows `start` to `stop` of a parameter with `whole` rows over all processes."""

    start: int
    stop: int
    whole: int

    @classmethod
    def of(cls, whole: int, rank: int, world: int) -> Self:
        """Return the share of process `rank` of `world`."""
        return cls(whole * rank // world, whole * (rank + 1) // world, whole)


def world_of() -> tuple[int, int]:
    """Return this process's rank and the number of processes."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """Return the shards of a module and its submodules, by the parameter's `state_dict` name."""
    return {
        f"{place}.{name}" if place else name: shard
        for place, submodule in module.named_modules()
        if isinstance(shards := getattr(submodule, "shards", None), dict)
        for name, shard in shards.items()
    }
