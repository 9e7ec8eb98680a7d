"""The trainer: phases, epochs and steps, validation, early stopping, checkpoints, exact resuming.

All random numbers follow from the seed, the epoch and the state in the last checkpoint. A run that
is killed at any step and then resumed ends with the same weights, bit for bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from retrieval.base.arrays import Ints
from retrieval.base.files import write_json
from retrieval.base.progress import Meter
from retrieval.data.augment import Labels, built_transforms
from retrieval.data.datasets import Dataset
from retrieval.data.encode import encode
from retrieval.data.features import backbone_features
from retrieval.data.loading import RawInputs, TrainBatches
from retrieval.data.texts import EncodedTexts
from retrieval.errors import DataError, Diverged, Interrupted, RetrievalError
from retrieval.evaluation.evaluate_run import refuse_unanswerable
from retrieval.host.values import shown
from retrieval.model.loss import reads_at_once
from retrieval.model.model import combiner_warnings
from retrieval.recipe.read import Recipe
from retrieval.recipe.tables import Augmentation, Phase
from retrieval.run import checkpoint_format
from retrieval.run.build import Objective, build_sampler, drawn_at_random, load_weights
from retrieval.run.folder import (
    absolute_paths,
    claimed,
    is_complete,
    is_run,
    record_changes,
    refuse_taken,
)
from retrieval.run.lora import merge, without_additions
from retrieval.run.open import Run, begin_folder, build_run, texts_of
from retrieval.run.resume import ClassSums, Position, ResumePoint
from retrieval.training.build_optimizers import Average
from retrieval.training.check import look_ahead
from retrieval.training.checkpoints import restore_checkpoint, save_checkpoint
from retrieval.training.distributed import NOT_SYNCHRONISED, trains_batch_norm
from retrieval.training.fit_learner import fit_learner, nothing_to_train, write_untrained
from retrieval.training.process import (
    Monitor,
    forget_after,
    going_on,
    make_accelerator,
    place,
    repeating,
    same_threads,
    signals,
    together,
    validate,
)
from retrieval.training.step import OWN_STATISTICS, Losses, Step, refuse_not_finite

NO_TRIPLETS = (
    "no batch had a triplet, so the generator made no samples. Set [sampler] items to 2 or more,"
    " and use a [miner] that finds triplets."
)
"""Warning at the end of an epoch without triplets."""
EVERY = 50
"""Number of steps between two calls of `retrieval_steps_end`; on a GPU, also between two readings
of the metrics."""


class Trainer:
    """Trains a run, which has been built after seeding the random generators.

    The accelerator sets device, precision and number of processes. `report` is called with one line
    per epoch. `progress` is the progress of a resumed run.
    """

    def __init__(
        self,
        run: Run,
        accelerator: Accelerator,
        report: Callable[[str], None] = lambda line: None,
        progress: Position | None = None,
    ) -> None:
        self.run = run
        self.recipe: Recipe = run.recipe
        self.accelerator = accelerator
        self.report = report
        self.main = bool(accelerator.is_main_process)
        assert run.objective is not None
        self.objective: Objective = run.objective
        place(run, self.objective, accelerator.device)
        self.monitor = Monitor(self.recipe)
        self._source: tuple[bool, Dataset, RawInputs] | None = None
        self.texts: EncodedTexts | None = None
        if run.model.text is not None:
            self.texts = texts_of(run)
        self.progress = progress or Position()
        self.validates = len(run.splits.validation) > 0
        self._stop = threading.Event()
        self.warnings: list[str] = []
        if trains_batch_norm(run.model, self.recipe):
            processes = accelerator.num_processes
            chunk = self.recipe.train.chunk
            if processes > 1 and not self.recipe.train.sync_batch_norm:
                self.warnings.append(NOT_SYNCHRONISED.format(processes=processes))
            if chunk and chunk < self.recipe.batch_size // processes:
                self.warnings.append(OWN_STATISTICS.format(chunk=chunk))
        # on a GPU, reading a number waits for all steps so far
        if reads_at_once(run.device):
            every = 1
        else:
            every = EVERY
        self.tally = Tally(self.progress, every, self._stopped)
        self._enter_phase()

    # --- phases

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self.recipe.phases[self.progress.phase]

    def _enter_phase(self) -> None:
        """Start a phase with its inputs, fresh optimisers and a fresh average of the weights."""
        run = self.run
        recipe = self.recipe
        self.from_features = recipe.from_features(self.progress.phase)
        if self.from_features:
            preprocessing = None
        else:
            preprocessing = run.model.preprocessing
        if self._source is None or self._source[0] != self.from_features:
            dataset: Dataset = run.dataset
            if self.from_features:
                # LoRA's additions are zero until the backbone trains
                plain = without_additions(run.model)
                dataset = backbone_features(plain, dataset, run.device, recipe.evaluate.batch_size)
            # validation uses the same inputs, so it does not decode images again
            self._source = self.from_features, dataset, RawInputs(dataset, preprocessing)
        _, self.dataset, self.raw = self._source
        # features are computed once, of images as they are
        augments = self.phase.augment and not self.from_features
        self.batches = TrainBatches(
            self.dataset,
            run.splits.train,
            run.splits.train_labels,
            preprocessing,
            sampler=recipe.sampler,
            batch_sampler=build_sampler(recipe),
            augmentation=recipe.augmentation if augments else Augmentation(),
            transforms=built_transforms(recipe) if augments else (),
            seed=recipe.seed,
            workers=recipe.train.workers,
            raw=self.raw,
            texts=self.texts,
        )
        self.step = Step(
            run.model,
            self.objective,
            recipe,
            self.phase,
            len(self.batches),
            self.accelerator,
            from_features=self.from_features,
        )
        self.average = Average(run.model, recipe.train, self.phase)

    def close(self) -> None:
        """End the processes that load batches, if there are any."""
        self.batches.close()

    def _begin_phase(self) -> None:
        """Report the length of a phase's warm-up, and write a checkpoint of its start."""
        warmup = self.recipe.schedule.warmup
        steps = len(self.batches)
        rises = self.recipe.schedule.warmup_steps(self.phase.epochs, steps)
        if rises:
            whole = self.phase.epochs * steps
            if isinstance(warmup, str):
                unit = ""
            else:
                unit = ", a share of the phase's steps"
            self.report(
                f"note: in phase '{self.phase.name}' the learning rate rises for {rises:,} of"
                f" {whole:,} steps (warmup = {shown(warmup)}{unit})."
            )
        self.save()

    # --- the loop

    def fit(self) -> dict[str, float]:
        """Train to the end.

        Returns:
            The best validation metrics; empty without a validation part.

        Raises:
            Interrupted: SIGINT or SIGTERM arrived; the checkpoint is written.
            DataError: the loss became NaN or infinite, or the disk is full. The last good
                checkpoint remains.
        """
        self.run.plugins.notify("retrieval_run_start", run=self.run)
        for note in self.run.splits.notes:
            self.report(f"note: {note}")
        for warning in self.warnings:
            self.report(f"warning: {warning}")
        with closing(self), signals(self._signalled), repeating(self.recipe.train):
            if self.progress.total == 0:
                if self.validates and self.progress.start is None:
                    self._validate_start()
                self._begin_phase()
            while self.progress.phase < len(self.recipe.phases):
                with self._meter() as meter:
                    while self.progress.phase_epoch < self.phase.epochs and not self._exhausted():
                        self._end_epoch(self._epoch(meter))
                self.progress.phase += 1
                self.progress.phase_epoch = self.progress.stale = 0
                if self.progress.phase < len(self.recipe.phases):
                    self.close()
                    self._enter_phase()
                    self._begin_phase()
        return self._finish()

    def _meter(self) -> Meter:
        """Return a meter of the phase: phases take so different times that one rate misleads."""
        phases = len(self.recipe.phases)
        what = "training"
        if phases > 1:
            what = f"training, phase {self.progress.phase + 1} of {phases}"
        batches = len(self.batches)
        done = self.progress.phase_epoch * batches + self.progress.step
        return Meter(what, self.phase.epochs * batches, "batches", done=done, show=self.main)

    def _signalled(self, number: int, frame: Any) -> None:
        """Handle a signal: stop after the current step, or at once if it is the second signal."""
        if self._stop.is_set():
            raise KeyboardInterrupt  # a step may take long, or hang
        self._stop.set()

    def _validate(
        self, epoch: int, warn: Callable[[str], None]
    ) -> tuple[dict[str, float], ClassSums]:
        return validate(
            self.run,
            self.dataset,
            self.from_features,
            lambda line: warn(f"in epoch {epoch}, {line}"),
            self.raw,
            self.average.model,
            self.texts,
        )

    def _validate_start(self) -> None:
        """Validate the initial weights as epoch 0, the first candidate for the best."""
        validation, by_class = self._validate(0, lambda line: self.report(f"warning: {line}"))
        improved = self.monitor.note(self.progress, validation, False, by_class)
        if improved and self.main:
            self._save_best()
        self.report(f"epoch 0 (the start): {self._main_metrics(validation)}")

    def _main_metrics(self, validation: dict[str, float]) -> str:
        names = (self.monitor.name, "map_at_r", "recall_at_1")
        return ", ".join(
            f"validation_{name} {value:.4f}" for name, value in validation.items() if name in names
        )

    def _epoch(self, meter: Meter) -> dict[str, float]:
        progress = self.progress
        world = int(self.accelerator.num_processes)
        rank = int(self.accelerator.process_index)
        every = self.recipe.train.checkpoint_every
        started = time.perf_counter()
        self._step_sums = dict(progress.sums), dict(progress.counts)
        self.step.set_modes()
        rows = 0
        for inputs, labels in self.batches.epoch(
            progress.epoch, start=progress.step, rank=rank, world=world, drawn=self._drawn()
        ):
            rows += len(inputs) * world
            self._train_batch(*moved(inputs, labels, self.run.device))
            progress.step += 1
            progress.total += 1
            loss = progress.sums.get("loss", 0.0) / progress.counts.get("loss", 1)
            meter.update(epoch=str(progress.epoch + 1), loss=f"{loss:.4f}")
            if progress.total % EVERY == 0 or progress.step == len(self.batches):
                self._end_steps()
            # only between steps, where the state is that of a whole number of steps
            if self._stop.is_set():
                self.save()
                raise Interrupted(f"Stopped after step {progress.total}.")
            # the end of the epoch saves anyway
            if every and progress.total % every == 0 and progress.step < len(self.batches):
                self.save()
        self.tally.read()
        self._average_buffers()
        seconds = time.perf_counter() - started
        metrics = {name: value / progress.counts[name] for name, value in progress.sums.items()}
        metrics["images_per_second"] = rows / max(seconds, 1e-9)
        return metrics

    def _drawn(self) -> list[Ints] | None:
        """Return the epoch's batches if the sampler uses embeddings, else `None`.

        Such batches depend on the weights at the start of the epoch, so checkpoints keep them.
        """
        if not self.batches.batch_sampler.uses_embeddings:
            return None
        if self.progress.drawn is None:
            # one process draws for all, so that all divide the same batches
            def draw() -> list[Ints] | None:
                if not self.main:
                    return None
                embeddings = encode(
                    self.run.model,
                    self.dataset,
                    self.run.splits.train,
                    batch_size=self.recipe.evaluate.batch_size,
                    device=self.run.device,
                    from_features=self.from_features,
                    raw=self.raw,
                )
                return self.batches.draw(self.progress.epoch, embeddings.numpy())

            drawn: list[Any] = broadcast_object_list([together(self.accelerator, draw)])
            self.progress.drawn = [torch.from_numpy(batch) for batch in drawn[0]]
        return [batch.numpy() for batch in self.progress.drawn]

    def _train_batch(self, inputs: Tensor, labels: Labels) -> dict[str, Tensor | int]:
        """Train on one batch, and return its metrics without waiting for the device."""
        try:
            losses = self.step(inputs, labels)
        except RetrievalError as error:
            self.tally.read()  # raises its own error if NaN of an earlier step is the cause
            if isinstance(error, DataError):
                raise self._stopped(self.progress.total + 1, str(error)) from error
            raise
        self.tally.add(losses)
        if self.average.ema is not None:
            self.average.step()
        return losses.all_metrics()

    def _end_steps(self) -> None:
        """Pass the metrics' means since the last call, and the learning rates, to plugins."""
        self.tally.read()
        progress = self.progress
        sums, counts = self._step_sums
        self._step_sums = dict(progress.sums), dict(progress.counts)
        metrics: dict[str, float] = {}
        for name, total in progress.sums.items():
            count = progress.counts[name] - counts.get(name, 0)
            # the miner may have found nothing in these steps
            if count:
                metrics[name] = (total - sums.get(name, 0.0)) / count
        for name, rate in self.step.rates().items():
            metrics[f"lr_{name}"] = rate
        self.run.plugins.notify(
            "retrieval_steps_end", run=self.run, step=progress.total, metrics=metrics
        )

    def _stopped(self, step: int, reason: str) -> Diverged:
        return Diverged(
            f"Training stopped at step {step} (epoch {self.progress.epoch + 1}):"
            f" {reason.rstrip('.')}. The last good checkpoint is "
            f'{self.run.last}. Try a smaller learning rate, [train] clip_norm, or precision = "no".'
        )

    def _average_buffers(self) -> None:
        """Average batch statistics over the processes, which see different images."""
        if self.accelerator.num_processes > 1:
            buffers = [*self.run.model.buffers()]
            if self.average.model is not self.run.model:
                buffers += self.average.model.buffers()
            for buffer in buffers:
                if buffer.is_floating_point():
                    buffer.copy_(self.accelerator.reduce(buffer, reduction="mean"))

    def _exhausted(self) -> bool:
        """Return whether `patience` ends the phase.

        A phase that trains only the generator never ends early, as validation does not measure it.
        """
        patience = self.recipe.train.patience
        if patience is None or not self.step.trains_metric:
            return False
        return self.progress.stale >= patience

    def _end_epoch(self, metrics: dict[str, float]) -> None:
        """Validate, log and save at the end of an epoch."""
        progress = self.progress
        train = self.recipe.train
        self._refuse_nan()  # before validation, which may save the weights as the best
        self.average.epoch_end(progress.phase_epoch + 1)
        improved = False
        validation: dict[str, float] = {}
        warnings: list[str] = []
        last_of_phase = progress.phase_epoch + 1 == self.phase.epochs
        if self.validates and ((progress.epoch + 1) % train.validate_every == 0 or last_of_phase):
            validation, by_class = self._validate(progress.epoch + 1, warnings.append)
            metrics |= {f"validation_{name}": value for name, value in validation.items()}
            phases = self.recipe.phases[: progress.phase + 1]
            trains_backbone = any("backbone" in phase.train for phase in phases)
            if self.recipe.backbone.frozen:
                trains_backbone = False
            improved = self.monitor.note(progress, validation, trains_backbone, by_class)
            if improved:
                progress.best_epoch = progress.epoch + 1
        self.step.end_epoch(validation.get(self.monitor.name))
        record: dict[str, Any] = {
            "phase": self.phase.name,
            "epoch": progress.epoch + 1,
            "step": progress.total,
            "lr": self.step.rates(),
            **metrics,
        }
        if validation:
            record["best"] = improved
        warnings += combiner_warnings(
            self.run.model.combiner, metrics, f"The {self.step.who['combiner']}"
        )
        if metrics.get("triplets") == 0:
            warnings.append(NO_TRIPLETS)
        # the warnings of the start are reported already; the log has them in its first record
        logged = [*self.warnings, *warnings]
        self.warnings = []
        if logged:
            record["warnings"] = logged
        self.run.plugins.notify(
            "retrieval_epoch_end", run=self.run, epoch=progress.epoch + 1, metrics=metrics
        )
        if self.main:
            for warning in warnings:
                self.report(f"warning: {warning}")
            self.run.log(record)
            values = [
                f"{name} {value:.4f}"
                for name, value in metrics.items()
                if name in ("loss", "generator_loss")
            ]
            if validation:
                values.append(self._main_metrics(validation))
            if improved:
                mark = " (best)"
            else:
                mark = ""
            self.report(
                f"epoch {progress.epoch + 1}: {', '.join(values)},"
                f" {metrics['images_per_second']:.0f} images/s{mark}"
            )
        progress.epoch += 1
        progress.phase_epoch += 1
        progress.step = 0
        progress.sums = {}
        progress.counts = {}
        progress.drawn = None
        # the best first: a checkpoint that says so must find its file after a kill
        if improved and self.main:
            self._save_best()
        self.save()

    def _finish(self) -> dict[str, float]:
        progress = self.progress
        # nothing was validated: the run keeps its last weights
        if self.main and progress.best is None:
            self._save_best()
        merge(self.run.model)
        if self.main:
            if progress.best is None:
                best_epoch = progress.epoch
            else:
                best_epoch = progress.best_epoch
            summary = {
                "validation": progress.best_metrics,
                "monitor": self.monitor.name,
                "best_epoch": best_epoch,
                "start": progress.start,
                "with_frozen": progress.with_frozen,
                "with_trained": progress.with_trained,
                "verdicts": [asdict(verdict) for verdict in self.monitor.verdicts(progress)],
                "epochs": progress.epoch,
                "steps": progress.total,
            }
            if progress.best is not None:
                splits = self.run.splits
                classes = len(np.unique(splits.labels[splits.validation]))
                for line in self.monitor.sentences(progress, self._suggests_frozen(), classes):
                    self.report(line)
            elif self.validates:
                self.report(
                    f"Kept: the last epoch ({progress.epoch}), because validation"
                    f" {self.monitor.name} could not be measured in any epoch."
                )
            write_json(self.run.path / "summary.json", summary, DataError)
        self.accelerator.wait_for_everyone()
        load_weights(
            self.run.model, checkpoint_format.load_checkpoint(self.run.best), self.run.best
        )
        # undo torch.compile; the weights stay as they are
        self.run.model.backbone._compiled_call_impl = None
        self.run.model.eval()
        self.run.plugins.notify("retrieval_run_end", run=self.run, metrics=progress.best_metrics)
        return progress.best_metrics

    def _suggests_frozen(self) -> bool:
        """Return whether to suggest measuring the frozen backbone with a trained head."""
        recipe = self.recipe
        if recipe.backbone.frozen or self.progress.with_frozen is not None:
            return False
        if not any(True for _ in self.run.model.backbone.parameters()):
            return False
        # random weights are no features worth measuring; last, because this builds them twice
        return not drawn_at_random(recipe, self.run.dataset)

    # --- checkpoints

    def save(self) -> None:
        """Write the checkpoint to resume from.

        Raises:
            DataError: weights are NaN or infinite.
        """
        self.tally.read()
        self._refuse_nan()
        save_checkpoint(self.run, self.step, self.average, self.progress)

    def _refuse_nan(self) -> None:
        for name, parameters in self.step.parts.items():
            wrong = not all_finite(parameters)
            devices = self.step.devices
            if self.step.divided and devices is not None:
                # all processes stop if the rows of any of them have NaN
                wrong = bool(devices.total(torch.tensor(int(wrong), device=self.run.device)))
            if wrong:
                raise self._stopped(
                    self.progress.total, f"weights of the {name} became NaN or infinite"
                )

    def _save_best(self) -> None:
        checkpoint_format.save(
            self.run.best,
            {
                "model": without_additions(self.average.model).state_dict(),
                "metrics": self.progress.best_metrics,
            },
        )

    def resume(self, standing: ResumePoint) -> None:
        """Resume from a run's checkpoint.

        Raises:
            DataError: the checkpoint belongs to another recipe or plugin.
        """
        restore_checkpoint(standing, self.run, self.step, self.average)
        if self.main:
            forget_after(self.run.metrics_file, self.progress.total)


def moved(inputs: Tensor, labels: Labels, device: torch.device) -> tuple[Tensor, Labels]:
    """Return a batch on a device; copies to a GPU go through pinned memory and do not block."""
    if device.type == "cuda":
        inputs = inputs.pin_memory()
        labels = labels.pin_memory()
    return inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all numbers are finite; waits for the device once."""
    finite = [torch.isfinite(tensor).all() for tensor in tensors]
    return not finite or bool(torch.stack(finite).all())


class Tally:
    """Sums the metrics of an epoch and checks for NaN, but waits for the device only now and then.

    Args:
        progress: progress of the run, whose sums and counts grow.
        every: number of steps after which the kept numbers are read. The sums do not depend on it,
            because they add Python floats in the order of the steps.
        stopped: makes the error for a step, from its number and a message.
    """

    def __init__(
        self, progress: Position, every: int, stopped: Callable[[int, str], DataError]
    ) -> None:
        self._progress = progress
        self._every = every
        self._stopped = stopped
        self._unread: list[tuple[int, list[str], list[str], list[Tensor]]] = []

    def add(self, losses: Losses) -> None:
        """Keep copies of a step's numbers, because its tensors may change before `read`.

        Raises:
            DataError: see `read`.
        """
        metrics = losses.all_metrics()
        watched = [number for number, _ in losses.watched]
        sentences = [sentence for _, sentence in losses.watched]
        numbers = [
            torch.as_tensor(value).detach().reshape(()).to(torch.float64, copy=True)
            for value in (*watched, *metrics.values())
        ]
        self._unread.append((self._progress.total + 1, sentences, list(metrics), numbers))
        if len(self._unread) >= self._every:
            self.read()

    def read(self) -> None:
        """Wait for the device, and add the kept metrics to the sums.

        Raises:
            DataError: a loss or a synthetic feature was NaN or infinite; the message names the
                first step where it was.
        """
        unread = self._unread
        self._unread = []  # also if an error is raised, which must not be raised again
        if not unread:
            return
        numbers = [number for *_, of_step in unread for number in of_step]
        # "cuda" > "cpu": one transfer from the GPU reads all numbers
        device = max((number.device for number in numbers), key=lambda device: device.type)
        values = iter(torch.stack([number.to(device) for number in numbers]).tolist())
        sums = self._progress.sums
        counts = self._progress.counts
        for step, sentences, names, _ in unread:
            watched = [next(values) for _ in sentences]
            for name in names:
                sums[name] = sums.get(name, 0.0) + next(values)
                counts[name] = counts.get(name, 0) + 1
            try:
                for number, sentence in zip(watched, sentences, strict=True):
                    refuse_not_finite(number, sentence)
            except DataError as error:
                raise self._stopped(step, str(error)) from error


def train_run(
    path: Path,
    recipe: Recipe,
    *,
    resume: bool = False,
    replace: bool = False,
    replace_plugins: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Run:
    """Train a recipe into a folder, which is locked against other processes meanwhile.

    Args:
        path: the run's folder, which must be empty unless `resume` or `replace` is set.
        recipe: a checked recipe. To resume a run, only the keys in `run.resume.MAY_CHANGE` may
            differ from the recipe that started it.
        resume: continue from the folder's last checkpoint, or start over if it has none, or begin
            if the folder is missing or empty.
        replace: replace an existing run.
        replace_plugins: with `resume`, replace the run's copies with the recipe's plugin files.
        report: called in the main process with one line per epoch.

    Returns:
        The run with the best weights, in evaluation mode.

    Raises:
        DataError: the folder is taken or in use, or its run does not fit the recipe.
    """
    accelerator = make_accelerator(recipe)
    main = bool(accelerator.is_main_process)
    report = report if main else (lambda line: None)
    with ExitStack() as locks:

        def claim() -> tuple[ResumePoint | None, list[str], bool]:
            nonlocal resume
            if main:
                locks.enter_context(claimed(path))
            if resume and is_run(path):
                standing, changed = going_on(path, recipe, report)
                return standing, changed, is_complete(path)
            refuse_taken(path, replace)
            if resume:
                report(f"note: {path} holds no run yet: training starts from the beginning.")
                resume = False
            return None, [], False

        standing, changed, complete = together(accelerator, claim)
        locks.enter_context(same_threads(standing, accelerator.device, report))
        if complete and not (changed or replace_plugins):
            report(f"{path} is complete already.")
            return Run.open(path)
        recipe = absolute_paths(recipe)  # the run can then be resumed from another folder
        checkpoint_format.seed_everything(recipe.seed)

        def create(run: Run) -> None:
            if not resume:
                begin_folder(run, report, replace=replace)

        if recipe.learner is not None:
            return fit_learner(path, recipe, accelerator.device, report, create)
        run = build_run(path, recipe, standing)
        refuse_unanswerable(run)
        if nothing_to_train(run):
            return write_untrained(run, report, create)
        # a resumed run has trained with this recipe already
        if not resume and accelerator.num_processes == 1:
            _, warnings = look_ahead(run, accelerator)
            run.splits.notes.extend(warnings)
        trainer = Trainer(run, accelerator, report, standing.progress if standing else None)

        def begin() -> None:
            if standing is not None:
                trainer.resume(standing)
            if main:
                create(run)
            if main and resume and (changed or replace_plugins):
                sentences = [*changed]
                if replace_plugins:
                    sentences.append("the plugins were replaced")
                step = trainer.progress.total
                record_changes(path, recipe, sentences, step, replace_plugins=replace_plugins)

        together(accelerator, begin)
        trainer.fit()
    return run
