"""`train`, and the encoders that `train` and `load` return: `Run` and `BackboneEncoder`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from retrieval.model.contracts import BatchSampler, Combiner, Dataset, Generator, Learner
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
    """A pretrained backbone whose features are the embeddings.

    Args:
        name: the backbone's name, as `PLUGIN.name`.
        parameters: the backbone's parameters.
        plugins: further plugin files or modules.
        random_weights: allow a backbone whose weights are random.
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
            output: the folder to create.
            options: `whiten`, `dimensions`, `photos`, `variants`, `split` and the others of
                `retrieval.export.export_backbone.export_backbone`.

        Raises:
            BundleError: the folder exists already, or torch and ONNX Runtime disagree.
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
        splits: the items that train, validate and test.
        model: the model, with its best weights.
    """

    evaluate = evaluate_run
    verify = verify_run

    def encode(self, images: Any, *, batch: int = 32, progress: Progress = True) -> Embeddings:
        """Return the embeddings (N, D) of N images, or of the run's own items.

        Args:
            images: the same as for `Encoder.encode`; or "train", "validation", "test" or "gallery"
                for the items of that side, in the order of `labels`.
            batch: number of items that go through the model at once.
            progress: True shows a bar, False nothing; a function is called with (what, done,
                total).

        Raises:
            DataError: an image cannot be used; the message names it.
        """
        if isinstance(images, str) and images in _SIDES:
            with showing(progress):
                codes = ItemCodes(self, torch.device("cpu"))(self._items(images))
            return _vectors(self.model, codes)
        return _encoded(self.model, images, batch, progress)

    def labels(self, side: str = "test") -> NDArray[np.str_]:
        """Return the labels (N,) of a side's items: "train", "validation", "test" or "gallery".

        Raises:
            DataError: the side does not exist.
        """
        return np.asarray(self.splits.classes)[self.splits.labels[self._items(side)]]

    def _items(self, side: str) -> NDArray[np.int64]:
        """Return the indices of a side's items."""
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
        """One record per epoch, oldest first: losses, learning rates and validation metrics."""
        if not self.metrics_file.is_file():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def export(self, output: StrPath | None = None, **options: Any) -> BundleEncoder:
        """Write the run's bundle, and open it.

        Args:
            output: the folder to create, by default `bundle` in the run's folder.
            options: `dimensions`, `variants`, `split`, `replace` and the others of
                `retrieval.export.export_run.export_run`.

        Raises:
            BundleError: the folder exists already, or torch and ONNX Runtime disagree.
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
    sampler: Iterable[Sequence[int]] | BatchSampler | None = None,
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

    Objects can replace parts that the recipe names, or add parts that it does not name. Training
    works on a copy of each object. To resume or load such a run, pass the same objects again. It is
    exported like any other run.

    Args:
        recipe: a TOML file, a dictionary of its tables, or a `Recipe`.
        output: the run's folder, by default `runs/NAME` with the recipe's name.
        overrides: changes to the recipe, such as `"loss.margin=0.2"`.
        plugins: further plugin files or modules.
        resume: continue from the run's last checkpoint. With `overrides=["train.epochs=N"]` the run
            can be extended.
        replace: replace an existing run.
        replace_plugins: with `resume`, use the current plugin files instead of the run's copies.
        dataset: replaces `[data]`.
        sampler: replaces `[sampler]`: a batch sampler of torch, which yields positions among the
            items that train, or a `retrieval.plugin.BatchSampler`.
        backbone: replaces `[backbone]`: a `retrieval.plugin.Backbone`, or any module from images
            (B, channels, H, W) or vectors (B, F') to features (B, F). The number of features is
            measured. Images are preprocessed according to the module's attribute `preprocessing`, a
            `retrieval.plugin.Preprocessing`; without it they become RGB, 224 × 224, normalised as
            for ImageNet.
        combiner: replaces `[combiner]`. A loss or miner with this object as `distance` keeps it.
        loss: replaces `[loss]`; called like a loss of pytorch-metric-learning.
        miner: replaces `[miner]`.
        generator: replaces `[generator]`.
        learner: replaces `[learner]` by an unfitted estimator.
        track: trackers that log the run: "wandb", "mlflow", or a plugin's. If a tracker fails, the
            run reports it and continues.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).
        report: called with one line per epoch. By default the lines are printed if `progress` is
            True.

    Raises:
        RecipeError: the recipe is wrong; the message lists every problem.
        PluginError: a part breaks its contract.
        DataError: the folder is taken or in use, its run does not fit the recipe, or the loss
            became NaN.
        Interrupted: Ctrl-C or SIGTERM stopped training; the checkpoint is written.
    """
    objects = objects_of(
        dataset=dataset,
        sampler=sampler,
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
    """Return an opened run as a `Run`, with its methods."""
    return Run(**{field.name: getattr(run, field.name) for field in fields(run)})


class _Images(Dataset):
    """A dataset of images in memory."""

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
    """Return the vectors (N, D) of images or rows, as a bundle of the model would return them."""
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
    """Return the vectors that an index stores for codes."""
    with torch.inference_mode():
        vectors = codes if model.combiner is None else model.combiner.index_vectors(codes)
    return cast(Embeddings, vectors.float().numpy())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
