"""`retrieval.train`, and `retrieval.Run`, which it returns."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from retrieval.base.arrays import Ints
from retrieval.base.display_tables import html_table
from retrieval.base.folder_kinds import StrPath
from retrieval.base.progress import Progress, showing, shows_progress
from retrieval.bundle.encoder import Embeddings, Encoder
from retrieval.bundle.text import checked_texts
from retrieval.data.encode import encode_images, index_vectors
from retrieval.data.texts import BATCH as TEXTS, codes_of
from retrieval.errors import DataError, Interrupted, RecipeError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.evaluation.verify_run import verify
from retrieval.export.export_run import export
from retrieval.host.processes import exit_if_imported
from retrieval.host.values import toml_value
from retrieval.model.contracts import BatchSampler, Combiner, Generator, Learner
from retrieval.model.model import evaluation_mode
from retrieval.recipe.read import Recipe, naming, read_recipe
from retrieval.run.build import code_size
from retrieval.run.folder import objects_of
from retrieval.run.open import ItemCodes, Run as OpenedRun
from retrieval.run.resume import read_given
from retrieval.training.process import interruptible
from retrieval.training.tracking import tracking
from retrieval.training.trainer import train_run as train_run

_SIDES = ("train", "validation", "test", "gallery")


class Run(OpenedRun, Encoder):
    """A trained run: its folder, recipe, data and model.

    Attributes:
        path: the folder.
        recipe: the checked recipe.
        dataset: all items.
        splits: the training, validation, test and gallery items.
        model: the model, with its best weights.
    """

    evaluate = evaluate
    verify = verify
    export = export

    def __getstate__(self) -> dict[str, Any]:
        # as in a reopened run; a plugin may define the loss's class inside a function
        return vars(self) | {"objective": None}

    def encode(self, images: Any, *, batch_size: int = 32, progress: Progress = True) -> Embeddings:
        """Return the embeddings (N, D) of N images, or of the run's own items.

        Args:
            images: what `Encoder.encode` takes; or "train", "validation", "test" or "gallery" for
                the items of that side, in the order of `labels`.
            batch_size: number of items that go through the model at once.
            progress: True shows a bar, False nothing; a function is called with (what, done,
                total).

        Raises:
            DataError: an image cannot be used; the message names it.
        """
        if isinstance(images, str) and images in _SIDES:
            with showing(progress):
                codes = ItemCodes(self, torch.device("cpu"))(self._items(images))
            return index_vectors(self.model, codes)
        return encode_images(self.model, images, batch_size, progress)

    def encode_text(self, texts: Sequence[str]) -> Embeddings:
        """Return the embeddings (N, D) of N texts; see `Encoder.encode_text`."""
        part = self.model.text
        if part is None:
            return super().encode_text(texts)
        listed = checked_texts(texts)
        codes = []
        with evaluation_mode(part), torch.inference_mode():
            for start in range(0, len(listed), TEXTS):
                tokens = part.tokens(listed[start : start + TEXTS]).to(self.model.device)
                codes.append(codes_of(part, tokens).float().cpu())
        if not codes:
            return np.empty((0, code_size(self.model)), np.float32)
        return torch.cat(codes).numpy()

    def labels(self, side: str = "test") -> NDArray[np.str_]:
        """Return the labels (N,) of a side's items: "train", "validation", "test" or "gallery".

        Raises:
            DataError: the side does not exist.
        """
        return np.asarray(self.splits.classes)[self.splits.labels[self._items(side)]]

    def _items(self, side: str) -> Ints:
        """Return the indices of a side's items."""
        self.require_data()
        splits = self.splits
        sides = {
            "train": splits.train,
            "validation": splits.validation,
            "test": splits.query,
            "gallery": splits.query if splits.gallery is None else splits.gallery,
        }
        if side not in sides:
            raise DataError(f"There is no side {side!r}. A run has the sides {', '.join(sides)}.")
        return sides[side]

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record per epoch, counted from 1: losses, rates and validation metrics."""
        if not self.metrics_file.is_file():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    @contextmanager
    def exported(self) -> Iterator[Path]:
        """Context manager that exports a temporary bundle and yields its folder."""
        with tempfile.TemporaryDirectory() as folder:
            yield self.export(Path(folder) / "bundle", progress=False).path

    def _repr_html_(self) -> str:
        history = self.history
        values = (item for epoch in history for item in epoch.items())
        names = list(dict.fromkeys(k for k, v in values if isinstance(v, float | int | str)))
        rows = [names, *([_short(epoch.get(name)) for name in names] for epoch in history)]
        return html_table(rows, [repr(self)])


@shows_progress
def train(
    recipe: StrPath | Mapping[str, Any] | Recipe,
    output: StrPath | None = None,
    *,
    epochs: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    resume: bool = False,
    replace: bool = False,
    replace_plugins: bool = False,
    dataset: Any = None,
    sampler: Iterable[int] | Iterable[Sequence[int]] | BatchSampler | None = None,
    augmentation: Callable[[Tensor], Tensor] | None = None,
    backbone: nn.Module | None = None,
    combiner: Combiner | None = None,
    loss: Callable[..., Any] | None = None,
    miner: Callable[..., Any] | None = None,
    generator: Generator | None = None,
    learner: Learner | None = None,
    track: Sequence[str] = (),
    progress: Progress = True,
    report: Callable[[str], None] | None = None,
) -> Run:
    """Train a recipe into a run's folder, and return the run with its best weights.

    A Python object can replace a part that the recipe names, or add a part. Training uses copies of
    the objects. To resume or load a run with objects, pass the same objects again. Its export is
    the same as for any other run.

    Args:
        recipe: a TOML file, a dictionary of its tables, or a `Recipe`.
        output: the run's folder, by default `runs/NAME` of the recipe.
        epochs: replaces `[train] epochs`.
        seed: replaces `seed`.
        device: replaces `[train] device`: "auto", "cpu" or "cuda".
        overrides: changes to the recipe, such as `"loss.margin=0.2"`.
        plugins: further plugin files or modules.
        resume: continue from the run's last checkpoint, or begin if there is no run yet. A larger
            `epochs` extends the run.
        replace: replace an existing run.
        replace_plugins: with `resume`, use the current plugin files instead of the run's copies.
        dataset: replaces `[data]`; anything that `retrieval.as_dataset` takes.
        sampler: replaces `[sampler]`: a sampler of torch or pytorch-metric-learning, which yields
            positions among the training items or batches of positions, or a
            `retrieval.plugin.BatchSampler`. Positions are divided into batches of the sampler's own
            `batch_size`, or else of the recipe's classes × items.
        augmentation: a transform of torchvision, or any function of an image, uint8 (channels, H,
            W); applied after the changes of `[augmentation]`.
        backbone: replaces `[backbone]`: a `retrieval.plugin.Backbone`, or any module from images
            (B, channels, H, W) or vectors (B, F') to features (B, F). The number of features is
            measured. Images are preprocessed according to the module's attribute `preprocessing`, a
            `retrieval.plugin.Preprocessing`. Without this attribute, images become RGB, 224 × 224,
            normalised as for ImageNet.
        combiner: replaces `[combiner]`. A loss or miner that has this object as its `distance`
            shares the combiner's copy.
        loss: replaces `[loss]`; called like a loss of pytorch-metric-learning.
        miner: replaces `[miner]`.
        generator: replaces `[generator]`.
        learner: replaces `[learner]` with an unfitted estimator.
        track: trackers that log the run: "tensorboard", "wandb", "mlflow", or a plugin's. If a
            tracker fails, the run reports it and continues.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).
        report: called with one line per epoch. By default the lines are printed if `progress` is
            True.

    Raises:
        RecipeError: the recipe is wrong; the message lists every problem.
        PluginError: a part breaks its contract.
        DataError: the folder is taken or in use, its run does not fit the recipe, or the loss
            became NaN.
        Interrupted: Ctrl-C or SIGTERM stopped training; the checkpoint is written, if training had
            begun.
    """
    # a script without a guard is imported by the processes that it starts, and would train again
    exit_if_imported()
    objects = objects_of(
        dataset=dataset,
        sampler=sampler,
        augmentation=augmentation,
        backbone=backbone,
        combiner=combiner,
        loss=loss,
        miner=miner,
        generator=generator,
        learner=learner,
    )
    keywords = {"train.epochs": epochs, "seed": seed, "train.device": device}
    changes = [f"{key}={toml_value(value)}" for key, value in keywords.items() if value is not None]
    overrides = [*overrides, *changes]
    tell = report or (print if progress is True else lambda line: None)
    with naming(recipe) if isinstance(recipe, str | PathLike) else nullcontext():
        if resume:
            folder, checked = read_given(
                output,
                recipe,
                overrides,
                plugins,
                replace_plugins=replace_plugins,
                report=tell,
                objects=objects,
            )
        else:
            checked = read_recipe(recipe, overrides, plugins, objects=objects)
            # the name is known only after the overrides
            if output:
                folder = Path(output)
            else:
                folder = Path("runs") / checked.name
        if epochs is not None and checked.phase:
            raise RecipeError(
                "epochs has no effect in a recipe with [[phase]]. Set the epochs of a phase, with"
                f' overrides=["phase.{len(checked.phase) - 1}.epochs={epochs}"].'
            )
        try:
            with interruptible(folder / "recipe.toml", resume), tracking(track, checked, tell):
                return _whole(
                    train_run(
                        folder,
                        checked,
                        resume=resume,
                        replace=replace,
                        replace_plugins=replace_plugins,
                        report=tell,
                    )
                )
        except Interrupted as stopped:
            advice = "Call it again."
            if stopped.begun:
                advice = f"Continue in {folder} with resume=True."
            raise Interrupted(f"{stopped} {advice}") from None


def _whole(run: OpenedRun) -> Run:
    return Run(**{field.name: getattr(run, field.name) for field in fields(run)})


def _short(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
