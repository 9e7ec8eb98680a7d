"""A backbone by name → a bundle: nothing is trained, and no label is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from retrieval.data.kept import ITEMS
from retrieval.errors import BundleError, RecipeError
from retrieval.export.export_model import export_model
from retrieval.export.output import refuse_existing
from retrieval.export.photos import Photos, example_photos
from retrieval.export.variants import VariantName
from retrieval.export.whitening import affordable, features_of, whitening_head
from retrieval.host.plugins import Plugins, load_plugins
from retrieval.model.contracts import Backbone
from retrieval.model.graph import OPSET, TOLERANCE, Exporter
from retrieval.model.model import Model
from retrieval.model.products import check_backbone
from retrieval.recipe.read import naming
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.places import StrPath
from retrieval.serving.progress import Meter, Progress, shown

Places = StrPath | Sequence[StrPath]

MOST_PHOTOS = 20_000
"""Whitening is fitted on so many photos at most."""
_ASKING = ("pretrained", "weights")
"""What backbones call the parameter that asks for their pretrained weights."""


@shown
def export_backbone(
    model: str,
    output: StrPath,
    *,
    parameters: Mapping[str, Any] | None = None,
    whiten: Places = (),
    dimensions: int | None = None,
    photos: Places = (),
    most_photos: int = MOST_PHOTOS,
    seed: int = 0,
    random_weights: bool = False,
    plugins: Sequence[str] = (),
    variants: VariantName | Sequence[VariantName] = (),
    split: bool = False,
    allow_drift: bool = False,
    tolerance: float = TOLERANCE,
    opset: int = OPSET,
    exporter: Literal["auto"] | Exporter = "auto",
    replace: bool = False,
    progress: Progress = True,
) -> Bundle:
    """Write the bundle of a pretrained backbone, and open it: vectors are its features, or those
    whitened by photos without labels.

    torch and ONNX Runtime are compared on up to 512 of the photos; where none are named, on crops
    of the two photographs that come with scikit-learn. Photos that cannot be read are left out, and
    the log names them.

    Args:
        model: the backbone's name, as `PLUGIN.name`: "core.efficientnet_lite0".
        output: folder to make.
        parameters: the backbone's own, as in a recipe: `{"size": 160}`.
        whiten: files and folders of photos that PCA whitening is fitted on; without any, vectors
            are the features.
        dimensions: width of whitened vectors; by default 128, or the backbone's own where that is
            less.
        photos: files and folders of photos that verify the bundle and calibrate int8 (one half
            each); by default those of `whiten`.
        most_photos: of more photos than these, so many are drawn.
        seed: of that draw.
        random_weights: whether a backbone may be exported whose weights are random: a floor to
            compare with.
        plugins: further plugin files or modules, as from `--plugin`.
        variants: further precisions of the encoder: "fp16", "int8".
        split: write the encoder as two graphs, backbone and head, so that features can be kept and
            other heads applied to them.
        allow_drift: see `export_run`, as the next ones.
        tolerance: likewise.
        opset: likewise.
        exporter: likewise.
        replace: whether a bundle at `output` may be replaced.
        progress: True shows a bar, False nothing; a function is told (what, done, total).

    Returns:
        The bundle, on the CPU.

    Raises:
        PluginError: there is no such backbone.
        RecipeError: its parameters do not fit.
        DataError: photos are missing, cannot be read, are too few for the dimensions, or all alike.
        BundleError: the backbone's weights are random, or it takes vectors; something is in the
            way, torch cannot export the model, or the graph disagrees with it; see `export_model`.
    """
    wanted: Sequence[VariantName] = (variants,) if isinstance(variants, str) else variants
    refuse_existing(Path(output), replace)
    fitted = _photos(whiten, seed)
    checked = _photos(photos, seed) or fitted
    if dimensions is not None and fitted is None:
        raise BundleError(
            "Dimensions are those of whitened vectors: name photos to whiten by, too (--whiten)."
        )
    if most_photos < 1:
        raise BundleError(f"At least 1 photo is needed, not {most_photos}.")
    if "int8" in wanted and checked is None:
        raise BundleError(
            "The int8 variant is calibrated on photos, and none are named (--photos, or --whiten)."
        )
    backbone = named_backbone(load_plugins(plugins), model, parameters or {}, random_weights)
    built = Model(backbone, nn.Identity())
    if fitted is not None:
        built.head = _whitening(built, fitted, most_photos, dimensions)
    items, calibration = _items(built, checked, "int8" in wanted)
    with Meter("export", 0, "steps") as meter:
        export_model(
            built,
            items,
            Path(output),
            name=model,
            calibration=calibration,
            variants=wanted,
            split=split,
            allow_drift=allow_drift,
            tolerance=tolerance,
            opset=opset,
            exporter=exporter,
            replace=replace,
            progress=lambda step, number, of: meter.reach(number, of, step),
        )
    return Bundle.open(output, device="cpu")


def _photos(places: Places, seed: int) -> Photos | None:
    """Return the photos in places; None where no place is named."""
    listed = [places] if isinstance(places, str | os.PathLike) else list(places)
    return Photos(listed, seed) if listed else None


def _whitening(model: Model, photos: Photos, most: int, dimensions: int | None) -> nn.Module:
    assert model.preprocessing is not None
    width = model.backbone.features
    batches = photos.batches(model.preprocessing, affordable(width, most))
    return whitening_head(features_of(model, batches), dimensions)


def _items(
    model: Model, photos: Photos | None, calibrated: bool
) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """Return what verifies the bundle, and what calibrates int8 if it is asked for; no photo does
    both.

    Raises:
        DataError: the photos cannot be read.
        BundleError: there is one photo, and two are needed.
    """
    assert model.preprocessing is not None
    if photos is None:
        return example_photos(model.preprocessing), None
    read = np.concatenate(list(photos.batches(model.preprocessing, (1 + calibrated) * ITEMS)))
    if not calibrated:
        return read, None
    if len(read) < 2:
        raise BundleError(
            "The int8 variant needs at least 2 photos: one to calibrate it, one to measure it."
        )
    return read[::2], read[1::2]


def named_backbone(
    plugins: Plugins, name: str, parameters: Mapping[str, Any], random_weights: bool
) -> Backbone:
    """Return a backbone of images, built by its name.

    It is built from two seeds: a weight that differs was drawn at random, and is not pretrained. A
    factory that seeds torch itself cannot be seen through.

    Args:
        plugins: where the name is looked for.
        name: `PLUGIN.name`.
        parameters: the backbone's own.
        random_weights: whether weights may be random; the seed is 0 then.

    Raises:
        PluginError: there is no such backbone, or it breaks its contract.
        RecipeError: the parameters do not fit.
        BundleError: it takes vectors, or its weights are random.
    """
    factory = plugins.find("backbones", name)
    if factory.takes("features"):
        raise BundleError(
            f"{name} takes vectors, not images: it has no features of photos to export."
        )
    if "name" in parameters:
        raise RecipeError(["[backbone] name: the backbone is named already; leave this out."], name)
    table = {**parameters, "name": name}
    if problems := plugins.check("backbones", table, "[backbone]"):
        raise RecipeError(problems, name)

    def build(seed: int) -> Backbone:
        with naming(name), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return check_backbone(plugins.build("backbones", table), name)

    backbone = build(0)
    if backbone.preprocessing is None:
        raise BundleError(
            f"{name} takes vectors, not images: it has no features of photos to export."
        )
    if not random_weights and (drawn := _differing(backbone, build(1))):
        asking = next((p.name for p in factory.parameters if p.name in _ASKING), None)
        advice = (
            f"Ask for its pretrained weights by its parameter '{asking}', which `retrieval plugins"
            f" show {name}` explains"
            if asking
            else "Train it (retrieval train), or name another backbone"
        )
        raise BundleError(
            f"The weights of {name} are random: {len(drawn)} of its {len(backbone.state_dict())}"
            f" tensors differ from one build to the next, as '{drawn[0]}' does. {advice}. To export"
            " it as it is, say --random-weights (in Python random_weights=True)."
        )
    return backbone


def _differing(one: Backbone, other: Backbone) -> list[str]:
    """Return the names of the tensors in which two builds differ."""
    theirs = other.state_dict()
    return [
        name
        for name, value in one.state_dict().items()
        if name not in theirs or not torch.equal(value, theirs[name])
    ]
