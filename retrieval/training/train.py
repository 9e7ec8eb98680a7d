"""`train`, and what it and `load` return: a `Run`, and the encoder of a backbone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor, nn

from retrieval.data.datasets import ArrayDataset
from retrieval.data.encode import encode
from retrieval.data.loading import RawInputs
from retrieval.errors import DataError, Interrupted, at_least_one
from retrieval.evaluation.evaluate_run import evaluate_run
from retrieval.evaluation.verify_run import verify_run
from retrieval.export.export_backbone import export_backbone, named_backbone
from retrieval.export.export_run import export_run
from retrieval.host.plugins import load_plugins
from retrieval.model.contracts import Combiner, Dataset, Generator, Learner
from retrieval.model.model import Model
from retrieval.recipe.read import Recipe, naming, read_recipe
from retrieval.run.folder import objects_of
from retrieval.run.open import ItemCodes
from retrieval.run.open import Run as OpenedRun
from retrieval.run.resume import read_given
from retrieval.serving.bundle import is_image
from retrieval.serving.encoder import BundleEncoder, Embeddings, Encoder, as_rows
from retrieval.serving.files.places import StrPath
from retrieval.serving.images import as_list, decode, from_pixels
from retrieval.serving.progress import Progress, showing, shown
from retrieval.training.tracking import tracking
from retrieval.training.trainer import train as train_run

_SIDES = ("train", "validation", "test", "gallery")


class BackboneEncoder(Encoder):
    """A pretrained backbone: its features are the embeddings.

    Args:
        name: the backbone's name, as `PLUGIN.name`.
        parameters: the backbone's own.
        plugins: further plugin files or modules.
        random_weights: whether the backbone's weights may be random.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, Any],
        plugins: Sequence[str],
        random_weights: bool,
    ) -> None:
        self.name = name
        self._settings: dict[str, Any] = {
            "parameters": parameters,
            "plugins": plugins,
            "random_weights": random_weights,
        }
        backbone = named_backbone(load_plugins(plugins), name, parameters, random_weights)
        self.model = Model(backbone, nn.Identity())

    def __repr__(self) -> str:
        assert self.model.preprocessing is not None
        shape = " × ".join(map(str, self.model.preprocessing.shape))
        width = self.model.backbone.features
        return f"Encoder {self.name}: images of {shape} to vectors of {width}"

    def encode(self, images: Any, *, batch: int = 32, progress: Progress = True) -> Embeddings:
        """Return the embeddings (N, D) of N images; see `Encoder.encode`."""
        return _encoded(self.model, images, batch, progress)

    def export(self, output: StrPath, **options: Any) -> BundleEncoder:
        """Write the bundle of the backbone, and open it.

        Args:
            output: folder to make.
            options: `whiten`, `dimensions`, `photos`, `variants`, `split` and the others of
                `retrieval.export.export_backbone.export_backbone`.

        Raises:
            BundleError: something is in the way, or torch and ONNX Runtime disagree.
            DataError: photos are missing or cannot be read.
        """
        return BundleEncoder(export_backbone(self.name, output, **self._settings, **options))

    @contextmanager
    def exported(self) -> Iterator[Path]:
        """Give the folder of a bundle that is removed at the end."""
        with tempfile.TemporaryDirectory() as folder:
            yield self.export(Path(folder) / "bundle", progress=False).path


class Run(OpenedRun, Encoder):
    """A trained run: its folder, and everything built from its recipe.

    Attributes:
        path: the folder.
        recipe: the checked recipe.
        dataset: all items.
        splits: which of them train, validate and test.
        model: the model, with its best weights.
    """

    evaluate = evaluate_run
    verify = verify_run

    def encode(self, images: Any, *, batch: int = 32, progress: Progress = True) -> Embeddings:
        """Return the embeddings (N, D) of N images, or of the run's own items.

        Args:
            images: as `Encoder.encode` takes them; or "train", "validation", "test" or "gallery",
                which stands for the items of that side, in the order of `labels`.
            batch: how many items go through the model at once.
            progress: True shows a bar, False nothing; a function is told (what, done, total).

        Raises:
            DataError: an image cannot be used, which the message names.
        """
        if isinstance(images, str) and images in _SIDES:
            with showing(progress):
                codes = ItemCodes(self, torch.device("cpu"))(self._items(images))
            return _vectors(self.model, codes)
        return _encoded(self.model, images, batch, progress)

    def labels(self, side: str = "test") -> NDArray[np.str_]:
        """Return the labels (N,) of a side's items: "train", "validation", "test" or "gallery".

        Raises:
            DataError: there is no such side.
        """
        return np.asarray(self.splits.classes)[self.splits.labels[self._items(side)]]

    def _items(self, side: str) -> NDArray[np.int64]:
        """Return which items a side has."""
        splits = self.splits
        sides = {
            "train": splits.train,
            "validation": splits.validation,
            "test": splits.query,
            "gallery": splits.query if splits.gallery is None else splits.gallery,
        }
        if side not in sides:
            raise DataError(f"A run has the sides {', '.join(sides)}, and no side {side!r}.")
        return sides[side]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The metrics of each epoch, oldest first: losses, rates and validation metrics."""
        if not self.metrics_file.is_file():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def export(self, output: StrPath | None = None, **options: Any) -> BundleEncoder:
        """Write the run's bundle, and open it.

        Args:
            output: folder to make; by default `bundle` in the run's folder.
            options: `dimensions`, `variants`, `split`, `replace` and the others of
                `retrieval.export.export_run.export_run`.

        Raises:
            BundleError: something is in the way, or torch and ONNX Runtime disagree.
        """
        return BundleEncoder(export_run(self, output, **options))

    @contextmanager
    def exported(self) -> Iterator[Path]:
        """Give the folder of a bundle that is removed at the end."""
        with tempfile.TemporaryDirectory() as folder:
            yield self.export(Path(folder) / "bundle", progress=False).path

    def _repr_html_(self) -> str:
        shown = [
            {name: value for name, value in epoch.items() if isinstance(value, float | int | str)}
            for epoch in self.history
        ]
        names = list(dict.fromkeys(name for epoch in shown for name in epoch))
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        rows = "".join(
            f"<tr>{''.join(f'<td>{_short(epoch.get(name))}</td>' for name in names)}</tr>"
            for epoch in shown
        )
        return f"<p>{escape(repr(self))}</p><table><tr>{head}</tr>{rows}</table>"


@shown
def train(
    recipe: StrPath | Mapping[str, Any] | Recipe,
    output: StrPath | None = None,
    *,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    resume: bool = False,
    replace: bool = False,
    replace_plugins: bool = False,
    dataset: Dataset | None = None,
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

    An object may take the place of a part that the recipe names, or does not name at all. Training
    works on a copy; yours stays as it is. Such a run is resumed and loaded only with the same
    objects, and exported like any other.

    Args:
        recipe: a TOML file, a dictionary of its tables, or a `Recipe`.
        output: the run's folder; by default `runs/NAME`, with the recipe's name.
        overrides: changes to the recipe, as `"loss.margin=0.2"`.
        plugins: further plugin files or modules.
        resume: go on from the run's last checkpoint; with `overrides=["train.epochs=N"]` also for
            longer.
        replace: put a new run in the place of the one that is there.
        replace_plugins: with `resume`, go on with the plugin files as they are now, not with the
            run's copies.
        dataset: instead of `[data]`.
        backbone: instead of `[backbone]`: a `retrieval.plugin.Backbone`, or any module from images
            (B, channels, H, W) or vectors (B, F') to features (B, F). The width of its features is
            measured. What its attribute `preprocessing`, a `retrieval.plugin.Preprocessing`, says
            is done to images before; without one they become RGB, 224 × 224, normalised as for
            ImageNet.
        combiner: instead of `[combiner]`. A loss or miner that has it as `distance` keeps it.
        loss: instead of `[loss]`, called as pytorch-metric-learning's.
        miner: instead of `[miner]`.
        generator: instead of `[generator]`.
        learner: instead of `[learner]`: an estimator, not fitted.
        track: trackers that are told how it goes: "wandb", "mlflow", or a plugin's. One that fails
            is told in a sentence, and stops nothing.
        progress: True shows a bar, False nothing; a function is told (what, done, total).
        report: is told a line for each epoch; by default it is printed where bars are shown.

    Raises:
        RecipeError: with every problem of the recipe.
        PluginError: a part breaks its contract.
        DataError: the folder is taken or in use, what is there does not fit, or the loss became
            NaN.
        Interrupted: training was asked to stop (Ctrl-C); the checkpoint is written.
    """
    objects = objects_of(
        dataset=dataset,
        backbone=backbone,
        combiner=combiner,
        loss=loss,
        miner=miner,
        generator=generator,
        learner=learner,
    )
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
            folder = Path(output) if output else Path("runs") / checked.name
        try:
            with tracking(track, checked, tell):
                return whole(
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
            raise Interrupted(f"{stopped} Go on with resume=True, into {folder}.") from None


def whole(run: OpenedRun) -> Run:
    """Return an opened run with its verbs."""
    return Run(**{field.name: getattr(run, field.name) for field in fields(run)})


class _Images(Dataset):
    """Images from memory, as items."""

    def __init__(self, images: Sequence[Any]) -> None:
        self.images = images
        self.keys = [f"images[{number}]" for number in range(len(images))]
        self.labels = [""] * len(images)

    def __getitem__(self, index: int) -> Image | NDArray[Any]:
        """Return an image, decoded."""
        image = self.images[index]
        try:
            if isinstance(image, np.ndarray):
                return from_pixels(image)
            return image if isinstance(image, Image) else decode(image)
        except DataError as fault:
            raise DataError(f"{self.keys[index]}: {fault}") from fault


def _encoded(model: Model, images: Any, batch: int, progress: Progress) -> Embeddings:
    """Return the vectors (N, D) that a bundle of the model would give of images, or of rows."""
    dataset: Dataset
    if model.preprocessing is None:
        rows = as_rows(images)
        dataset = ArrayDataset(rows, [""] * len(rows), kind="features")
    else:
        listed = as_list(images)
        for number, image in enumerate(listed):
            if not is_image(image):
                raise DataError(
                    f"images[{number}]: an image is a path, bytes, a Pillow image, pixels or a"
                    f" tensor, not an object of type {type(image).__name__}."
                )
        dataset = _Images(listed)
    before = next((p.device for p in model.parameters()), torch.device("cpu"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with showing(progress):
            codes = encode(
                model.to(device),
                dataset,
                np.arange(len(dataset)),
                batch=at_least_one("batch", batch),
                device=device,
                progress="encoding",
                raw=RawInputs(dataset, model.preprocessing, budget=0),
            )
    finally:
        model.to(before)
    return _vectors(model, codes)


def _vectors(model: Model, codes: Tensor) -> Embeddings:
    """Return what an index stores of codes."""
    with torch.inference_mode():
        vectors = codes if model.combiner is None else model.combiner.index_vectors(codes)
    return cast(Embeddings, vectors.float().numpy())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
