"""What the training loop needs of devices, processes, signals, validation and the log."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object

from retrieval.base.files import write_text
from retrieval.base.machine import keep_large_blocks
from retrieval.data.datasets import Dataset
from retrieval.data.encode import encode
from retrieval.data.loading import RawInputs
from retrieval.data.texts import EncodedTexts
from retrieval.errors import DataError, Interrupted, RecipeError, RetrievalError
from retrieval.evaluation.evaluate_run import Protocol, text_sides
from retrieval.evaluation.evaluation import evaluate, resolve_metrics
from retrieval.evaluation.intervals import difference_over_classes
from retrieval.model.checked_parts import CheckedMetric
from retrieval.model.model import Model
from retrieval.recipe.read import Recipe
from retrieval.recipe.tables import Train
from retrieval.run.build import Objective
from retrieval.run.checkpoint_format import python_random_kept
from retrieval.run.open import Run
from retrieval.run.resume import ClassSums, Position, ResumePoint, changes, standing

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def place(run: Run, objective: Objective, device: torch.device) -> None:
    """Move model and objective to a device; apply `channels_last` and `compile` of `[train]`.

    On a CPU, this process no longer returns large blocks of memory to the system; see
    `keep_large_blocks`.
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


@contextlib.contextmanager
def repeating(train: Train) -> Iterator[None]:
    """Context manager in which torch uses deterministic algorithms if `[train]` asks for them."""
    if not train.deterministic:
        yield
        return
    memory: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark = torch.backends.cudnn.benchmark
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # torch would also fill new memory, which takes time; uninitialised memory is never read here
    torch.backends.cudnn.benchmark = False
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        memory.fill_uninitialized_memory = fill


def has_bf16(on_cpu: bool) -> bool:
    """Return whether the processor or GPU has bf16 instructions; without them torch emulates bf16.

    Releases of torch before 2.10 do not say so of a processor; such a processor counts as without.
    """
    if not on_cpu:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    # of Intel and AMD, then of ARM
    names = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16")
    return any(capabilities.get(name) for name in names)


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Return an `Accelerator` with the recipe's device and precision.

    Raises:
        RecipeError: the device, the precision or a compiler is not available.
    """
    train = recipe.train
    if train.device == "cuda" and not torch.cuda.is_available():
        raise RecipeError(
            '[train] device is "cuda", but torch finds no GPU on this machine. Use "auto" or "cpu".'
        )
    on_cpu = train.device == "cpu" or not torch.cuda.is_available()
    if train.precision == "fp16" and on_cpu:
        raise RecipeError('[train] precision: "fp16" needs a GPU. On a CPU use "bf16" or "no".')
    if train.precision == "bf16" and not has_bf16(on_cpu):
        log.warning(
            '[train] precision: this %s has no bf16 instructions, so "bf16" is several times slower'
            ' than "no".',
            "processor" if on_cpu else "GPU",
        )
    # as torch chooses it
    compilers = {"darwin": "clang++", "win32": "cl"}
    compiler = os.environ.get("CXX") or compilers.get(sys.platform, "g++")
    if train.compile and on_cpu and shutil.which(compiler) is None:
        raise RecipeError(
            f"[train] compile: on a CPU, torch.compile needs a C++ compiler, but {compiler} is not"
            " installed. Install it, or remove `compile`."
        )
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is first used
    if AcceleratorState._shared_state:
        # an earlier run in this process may have used another precision
        AcceleratorState._reset_state()
    return Accelerator(cpu=on_cpu, mixed_precision=train.precision)


def together(accelerator: Accelerator, do: Callable[[], Result]) -> Result:
    """Call `do` in every process, and wait for all processes. If one fails, all raise an error.

    Raises:
        RetrievalError: the error of `do`, if it failed in this process; otherwise a `DataError`
            with the message of the first process that failed.
    """
    if accelerator.num_processes == 1:
        return do()
    try:
        result = do()
    except RetrievalError as error:
        gather_object([str(error)])  # the other processes wait for an answer
        raise
    for message in gather_object([None]):
        if message is not None:
            raise DataError(message)
    return result


def going_on(
    path: Path, recipe: Recipe, report: Callable[[str], None]
) -> tuple[ResumePoint | None, list[str]]:
    """Return the checkpoint from which a run resumes, and the changes of its recipe; report these.

    Raises:
        DataError: the recipe has changes that are not allowed.
    """
    last = standing(path)
    changed = changes(path, recipe, None if last is None else last.progress)
    if last is None and recipe.learner is None:
        report(f"{path} has no checkpoint yet: training starts from the beginning.")
    for line in changed:
        report(line)
    return last, changed


@contextlib.contextmanager
def interruptible(file: Path, resume: bool) -> Iterator[None]:
    """Context manager that turns Ctrl-C into `Interrupted`, even before the first step.

    The work has begun if it is resumed or has written `file`. Resuming what has not begun would
    resume an old run that `replace` has not removed yet.
    """
    written = _last_modified(file)
    try:
        yield
    except KeyboardInterrupt:
        interrupted = Interrupted("Interrupted.")
        interrupted.begun = resume or _last_modified(file) != written
        raise interrupted from None


def _last_modified(file: Path) -> int | None:
    """Return when a file was last modified, in nanoseconds; `None` if it is missing."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None


@contextlib.contextmanager
def same_threads(
    last: ResumePoint | None, device: torch.device, report: Callable[[str], None]
) -> Iterator[None]:
    """Context manager in which torch uses as many threads as before a run was stopped.

    On a CPU the number of threads decides the order of sums, and so the weights' last bits.
    """
    before = torch.get_num_threads()
    threads = before
    if last is not None:
        # checkpoints of early versions do not say
        threads = last.state.get("threads", before)
    if threads == before or device.type != "cpu":
        yield
        return
    report(
        f"note: the run goes on with {threads} threads of torch, as it began, not with {before},"
        " so that its weights stay the same."
    )
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def signals(handle: Callable[..., None]) -> Iterator[None]:
    """Context manager in which SIGINT and SIGTERM call `handle`, if this is the main thread."""
    # Python refuses handlers in other threads
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def forget_after(log: Path, step: int) -> None:
    """Drop a log's records of steps after `step`, because a resumed run repeats these steps."""
    if not log.is_file():
        return
    earlier = []
    for line in log.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                earlier.append(line)
        except (json.JSONDecodeError, KeyError, TypeError):
            break  # a crash cut off this line
    write_text(log, "".join(earlier))


@python_random_kept()
def validate(
    run: Run,
    dataset: Dataset,
    from_features: bool,
    warn: Callable[[str], None],
    raw: RawInputs | None = None,
    model: Model | None = None,
    texts: EncodedTexts | None = None,
) -> tuple[dict[str, float], ClassSums]:
    """Return the recipe's metrics, the monitored metric and MAP@R on the validation part.

    The monitored metric's sums over classes come with them.

    The queries are `Splits.validation_sides`. A metric that is NaN or infinite for a
    query is left out.

    Args:
        run: the run.
        dataset: the run's items or, with `from_features`, their backbone features.
        from_features: whether `dataset` holds backbone features.
        warn: called with a sentence for each metric that is left out.
        raw: the dataset's decoded images, so that they are not decoded again.
        model: the model to validate; `None` means the run's model.
        texts: the items' texts. The queries are then the texts of the validation part, and the
            images of that part the gallery.
    """
    model = model or run.model
    recipe = run.recipe
    labels = run.splits.labels
    indices = run.splits.validation
    query, gallery = run.splits.validation_sides
    codes = encode(
        model,
        dataset,
        indices,
        batch_size=recipe.evaluate.batch_size,
        device=run.device,
        from_features=from_features,
        raw=raw,
    )
    # the monitored metric need not be among those of [evaluate]
    metrics = resolve_metrics(
        recipe.evaluate.metrics, run.plugins, (recipe.train.monitor, "map_at_r")
    )
    # NaN of a plugin's metric must not end a long training
    for metric in metrics.values():
        if isinstance(metric, CheckedMetric):
            metric.finite = False
    if texts is not None:
        assert model.text is not None
        sides = text_sides(texts.texts, indices, codes, partial(texts.codes, part=model.text))
        evaluation = evaluate(**sides["text to image"], metrics=metrics)
        classes = np.arange(len(evaluation.per_query[Monitor(recipe).name]))
    else:
        classes = labels[query]
        evaluation = evaluate(
            codes[np.searchsorted(indices, query)],
            labels[query],
            gallery=None if gallery is None else codes[np.searchsorted(indices, gallery)],
            gallery_labels=None if gallery is None else labels[gallery],
            metrics=metrics,
            distance=None if model.combiner is None else model.combiner.compute_mat,
            **Protocol(run, query, gallery).arguments(query, gallery),
        )
    measured: dict[str, float] = {}
    for name, value in evaluation.values.items():
        if math.isfinite(value):
            measured[name] = value
        else:
            warn(f"the metric {name} gave NaN or infinite values, so it was not measured.")
    monitored = evaluation.per_query[Monitor(recipe).name]
    answered = ~np.isnan(monitored)
    _, classes = np.unique(classes[answered], return_inverse=True)
    sums = np.bincount(classes, monitored[answered])
    return measured, (sums.tolist(), np.bincount(classes).tolist())


_FEW_CLASSES = 5
"""With fewer validation classes, the verdict warns.

An epoch that beats the start on so few classes may be worse on other classes
(benchmarks/recipes.py, digits).
"""


_SENTENCES = {
    "better": "{what} ({value:.4f}) beat {other} ({reference:.4f}) by {apart}.",
    "worse": "{what} ({value:.4f}) is worse than {other} ({reference:.4f}) by {apart}.",
    "undecided": "{what} ({value:.4f}) and {other} ({reference:.4f}) differ by {apart}: undecided.",
}
"""What the last lines of a training say of each verdict."""


@dataclass(frozen=True)
class EpochVerdict:
    """How the best epoch of one kind compares with that of another.

    Attributes:
        epochs: field of `Position` with the value, "with_frozen" or "with_trained".
        against: field of `Position` with the value that is subtracted.
        difference: difference of the two values.
        half: half the width of its 95 % interval over classes; `None` for a single class.
        verdict: "better" or "worse" if the interval excludes 0, otherwise "undecided". The interval
            does not cover that both are the best of several epochs.
    """

    epochs: str
    against: str
    difference: float
    half: float | None
    verdict: str


class Monitor:
    """The metric of `[train] monitor`.

    Attributes:
        name: the metric's key in the validation metrics.
        larger: whether larger values are better.
    """

    def __init__(self, recipe: Recipe) -> None:
        ((self.name, metric),) = resolve_metrics([recipe.train.monitor], recipe.loaded).items()
        self.larger: bool = getattr(metric, "larger_is_better", True)

    def better(self, value: float, other: float | None) -> bool:
        """Return whether a value is better than another; any number is better than `None`."""
        if other is None:
            # NaN as the best could never be beaten
            return not math.isnan(value)
        if self.larger:
            return value > other
        return value < other

    def verdicts(self, progress: Position) -> list[EpochVerdict]:
        """Return how the trained epochs compare with the start, and the backbone's with the head's.

        A run that was resumed from a checkpoint without sums over classes has no verdicts.
        """
        epochs = progress.kept
        if epochs == "start":
            epochs = "with_frozen"
            if progress.with_trained is not None:
                epochs = "with_trained"
        pairs = [(epochs, "start"), ("with_trained", "with_frozen")]
        sums = progress.by_class
        return [
            self._verdict(epochs, against, sums[epochs], sums[against])
            for epochs, against in pairs
            if epochs in sums and against in sums
        ]

    def _verdict(
        self, epochs: str, against: str, of: ClassSums, reference: ClassSums
    ) -> EpochVerdict:
        difference = difference_over_classes(of[0], reference[0], of[1])
        verdict = "undecided"
        if abs(difference.value) > difference.half:
            verdict = "worse"
            if self.better(difference.value, 0.0):
                verdict = "better"
        half = None
        if math.isfinite(difference.half):
            half = difference.half
        return EpochVerdict(epochs, against, difference.value, half, verdict)

    def sentences(self, progress: Position, suggests_frozen: bool, classes: int) -> list[str]:
        """Return sentences that say which epoch was kept, and whether training was worth it.

        Args:
            progress: progress of a run that was validated.
            suggests_frozen: whether to suggest measuring the frozen backbone with a trained head,
                if the run has not measured it.
            classes: number of validation classes.
        """
        best = progress.best
        assert best is not None
        kept_epoch = "the start (epoch 0)"
        if progress.best_epoch:
            kept_epoch = f"epoch {progress.best_epoch}"
        lines = [f"Kept: {kept_epoch}, validation {self.name} {best:.4f}."]
        if progress.start is not None and not progress.best_epoch:
            lines.append("No epoch has a better value: the run keeps its initial weights.")
        for verdict in self.verdicts(progress):
            what = "Training"
            other = "the start"
            if verdict.against == "with_frozen":
                what = "Training the backbone"
                other = "the frozen backbone with a trained head"
            apart = f"{abs(verdict.difference):.4f} (one class, so no interval)"
            if verdict.half is not None:
                apart = f"{abs(verdict.difference):.4f} ± {verdict.half:.4f} (95 % over classes)"
            sentence = _SENTENCES[verdict.verdict].format(
                what=what,
                value=getattr(progress, verdict.epochs),
                other=other,
                reference=getattr(progress, verdict.against),
                apart=apart,
            )
            lines.append(sentence)
        if suggests_frozen:
            lines.append(
                "The frozen backbone with a trained head was not measured. To measure it, begin"
                ' with a [[phase]] that sets train = ["head", "loss"]. If that phase gives the best'
                " weights, the run keeps them."
            )
        if classes < _FEW_CLASSES:
            lines.append(
                f"The validation part has only {classes} classes, so another epoch may be better"
                " for other classes. With so few, compare runs on several splits."
            )
        return lines

    def note(
        self,
        progress: Position,
        validation: dict[str, Any],
        trains_backbone: bool,
        by_class: ClassSums | None = None,
    ) -> bool:
        """Record an epoch's validation metrics in `progress`; return whether the run keeps it.

        The run keeps the best epoch. The first epoch that trains the backbone replaces one with a
        trained head unless it is worse by more than chance (`EpochVerdict`): validation cannot tell
        them apart, and the later phase has learned more. An epoch whose monitored metric was not
        measured is never kept, and does not count for `[train] patience`.

        Args:
            progress: progress of the run.
            validation: the epoch's metrics.
            trains_backbone: whether this phase or an earlier phase trains the backbone.
            by_class: the monitored metric's sums over classes.
        """
        # a run that never measures its metric still reports the others of its last epoch
        if progress.best is None:
            progress.best_metrics = dict(validation)
        if self.name not in validation:
            return False
        value = float(validation[self.name])
        field = "with_frozen"
        if trains_backbone:
            field = "with_trained"
        # no step has been taken: these are the initial weights, which count as neither
        if progress.start is None and progress.total == 0:
            field = "start"
        best_of_field = self.better(value, getattr(progress, field))
        if best_of_field:
            setattr(progress, field, value)
            if by_class is not None:
                progress.by_class[field] = by_class
        keeps = self.better(value, progress.best)
        frozen = progress.by_class.get("with_frozen")
        if field == "with_trained" and progress.kept == "with_frozen" and frozen and by_class:
            verdict = self._verdict(field, "with_frozen", by_class, frozen)
            keeps = best_of_field and verdict.verdict != "worse"
        if not keeps:
            progress.stale += 1
            return False
        progress.best = value
        progress.kept = field
        progress.stale = 0
        progress.best_metrics = dict(validation)
        return True
