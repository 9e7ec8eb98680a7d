"""What surrounds the training loop: devices and precision, signals, TensorBoard, the log after a crash."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from retrieval.errors import RecipeError, RetrievalError
from retrieval.host.files import write_text
from retrieval.recipe.read import Recipe


class Interrupted(RetrievalError):
    """Training was asked to stop; the last checkpoint holds everything."""

    exit_code = 130


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Return Accelerate's view of this process: device, precision, number of processes.

    Raises:
        RecipeError: the device or precision is not to be had here.
    """
    train = recipe.train
    if train.device == "cuda" and not torch.cuda.is_available():
        raise RecipeError(['[train] device: is "cuda", and torch sees no GPU here. Use "auto" or "cpu".'])
    on_cpu = train.device == "cpu" or not torch.cuda.is_available()
    if train.precision == "fp16" and on_cpu:
        raise RecipeError(['[train] precision: "fp16" needs a GPU. Use "bf16", which gains on a CPU too.'])
    if AcceleratorState._shared_state:
        AcceleratorState._reset_state()  # another run of this process may have had another precision
    return Accelerator(cpu=on_cpu, mixed_precision=train.precision)


@contextlib.contextmanager
def stopping(stop: threading.Event) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM set `stop`; a second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def tensorboard(folder: Path | None, step: int) -> Iterator[Callable[[str, float, int], None]]:
    """Give a function (name, value, step) that writes to TensorBoard, when it is installed and there is a folder."""
    writer: Any = None
    if folder is not None:
        with contextlib.suppress(ImportError):
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder), purge_step=step)

    def write(name: str, value: float, step: int) -> None:
        if writer is not None:
            writer.add_scalar(name, value, step)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


def forget_after(log: Path, step: int) -> None:
    """Drop what a log says of steps after the checkpoint: they are done again."""
    if not log.is_file():
        return
    kept = []
    for line in log.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (json.JSONDecodeError, KeyError, TypeError):
            break  # a line that the crash cut off
    write_text(log, "".join(kept))
