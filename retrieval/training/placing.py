"""A run's parts on their device: memory format, compiled kernels, and algorithms that give the same
bits each time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import torch

from retrieval.errors import RecipeError
from retrieval.recipe.tables import Train
from retrieval.run.build import Objective
from retrieval.run.open import Run
from retrieval.serving.memory import keep_large_blocks


def place(run: Run, objective: Objective, device: torch.device) -> None:
    """Put model and objective on a device, as `[train]` says; kernels are compiled when they are
    first called.

    On a CPU the process keeps its large blocks of memory from then on; see `keep_large_blocks`.
    """
    train = run.recipe.train
    if device.type == "cpu":
        keep_large_blocks()
    run.device = device
    run.model.to(device)
    run.model.channels_last = train.channels_last
    if train.channels_last:
        run.model.backbone.to(memory_format=torch.channels_last)
    objective.to(device)
    if train.compile:
        run.model.backbone.compile()


def plain(run: Run) -> None:
    """Run the backbone's own code again; its weights are the same ones."""
    run.model.backbone._compiled_call_impl = None


def refuse_uncompiled(train: Train, on_cpu: bool) -> None:
    """Refuse `[train] compile` where torch could not compile.

    Raises:
        RecipeError: it needs a C++ compiler (`CXX`, or the platform's own), and there is none.
    """
    if not train.compile or not on_cpu:
        return
    compiler = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(
        sys.platform, "g++"
    )
    if shutil.which(compiler) is None:
        raise RecipeError(
            [
                f"[train] compile: on a CPU torch.compile needs a C++ compiler, and {compiler} is"
                " not here. Install it, or remove compile."
            ]
        )


def make_repeatable(train: Train) -> None:
    """Tell cuBLAS, before it is first used, to give the same bits each time."""
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def repeating(train: Train) -> Iterator[None]:
    """Inside, torch takes algorithms that give the same bits each time, where `[train]
    deterministic` asks for them.
    """
    if not train.deterministic:
        yield
        return
    memory: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark, fill = torch.backends.cudnn.benchmark, memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # memory that nobody has written is not read either: to fill it would only take time
    torch.backends.cudnn.benchmark, memory.fill_uninitialized_memory = False, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark, memory.fill_uninitialized_memory = benchmark, fill
