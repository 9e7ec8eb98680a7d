"""What surrounds the training loop: devices and precision, what processes settle first, signals,
TensorBoard, the log after a crash.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object

from retrieval.errors import DataError, RecipeError, RetrievalError
from retrieval.host.files import write_text
from retrieval.recipe.read import Recipe
from retrieval.run.resume import Standing, changes, standing
from retrieval.training.placing import make_repeatable, refuse_uncompiled

Found = TypeVar("Found")


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Return Accelerate's view of this process: device, precision, number of processes.

    Raises:
        RecipeError: the device, the precision or a compiler is not to be had here.
    """
    train = recipe.train
    if train.device == "cuda" and not torch.cuda.is_available():
        raise RecipeError(
            ['[train] device: is "cuda", and torch sees no GPU here. Use "auto" or "cpu".']
        )
    on_cpu = train.device == "cpu" or not torch.cuda.is_available()
    if train.precision == "fp16" and on_cpu:
        raise RecipeError(
            ['[train] precision: "fp16" needs a GPU. Use "bf16", which gains on a CPU too.']
        )
    if AcceleratorState._shared_state:
        AcceleratorState._reset_state()  # another run of this process may have had another precision
    refuse_uncompiled(train, on_cpu)
    make_repeatable(train)
    return Accelerator(cpu=on_cpu, mixed_precision=train.precision)


def together(accelerator: Accelerator, do: Callable[[], Found]) -> Found:
    """Do something on every process, and go on only once all have done it; what refuses one of them
    refuses all.

    So no process sees what another changes afterwards, and none waits for one that was refused and
    left.

    Args:
        accelerator: Hugging Face Accelerate's, which knows the processes.
        do: what to do. The processes must not wait for one another in it.

    Raises:
        RetrievalError: what this process raised, or, as a DataError, what the first other one did.
    """
    if accelerator.num_processes == 1:
        return do()
    refused: RetrievalError | None = None
    try:
        found = do()
    except RetrievalError as error:
        refused = error
    said = gather_object([None if refused is None else str(refused)])
    if refused is not None:
        raise refused
    for sentence in said:
        if sentence is not None:
            raise DataError(sentence)
    return found


def going_on(
    path: Path, recipe: Recipe, report: Callable[[str], None]
) -> tuple[Standing | None, list[str]]:
    """Return where a run stands and what the recipe changes of it, and say both.

    Raises:
        DataError: there is no run, or the recipe is not of it.
    """
    stands = standing(path)
    changed = changes(path, recipe, None if stands is None else stands.progress)
    if stands is None and recipe.learner is None:
        report(f"{path} has no checkpoint yet: training begins again.")
    for line in changed:
        report(line)
    return stands, changed


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
def ending_as_interrupted() -> Iterator[None]:
    """Inside, SIGTERM interrupts as Ctrl-C does, so that whoever runs others can end them in good
    order.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def tensorboard(folder: Path | None, step: int) -> Iterator[Callable[[str, float, int], None]]:
    """Give a function (name, value, step) that writes to TensorBoard, when it is installed and
    there is a folder.
    """
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
