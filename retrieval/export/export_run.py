"""Export a run's best weights as a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from torch import nn

from retrieval.base.arrays import Array, Ints
from retrieval.base.folder_kinds import StrPath
from retrieval.base.progress import Progress, shows_progress
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.encoder import BundleEncoder
from retrieval.data.loading import inputs
from retrieval.data.stored_inputs import (
    StoredInputs,
    by_class,
    evenly_spaced,
    held_out_texts,
)
from retrieval.data.texts import ItemTexts
from retrieval.errors import BundleError, valid_text
from retrieval.export.agreement import is_normalized
from retrieval.export.export_model import ExportOptions, export_model
from retrieval.model.graph import ready
from retrieval.model.model import Model, Normalise, Prefix, TextPart
from retrieval.run.open import ItemCodes, Run

MANY = 10_000
"""The codes of at most this many held-out items decide the rescorer's number of candidates."""


@shows_progress
def export(
    run: Run,
    output: StrPath | None = None,
    *,
    dimensions: int | None = None,
    progress: Progress = True,
    **options: Unpack[ExportOptions],
) -> BundleEncoder:
    """Write the bundle of a run, and open it.

    The run's held-out items verify the bundle; its training items calibrate the int8 variant.

    Args:
        run: a run. If it was opened without its data, the inputs stored in it verify the bundle.
        output: the folder to create, by default `bundle` in the run's folder.
        dimensions: keep only the first `dimensions` numbers of the embedding. They are scaled to
            unit length if the whole embedding has unit length. The loss core.matryoshka trains for
            such a cut; with other losses quality drops more.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).
        variants: further precisions of the encoder: "fp16", "int8"; by default none.
        split: write the encoder as two graphs, backbone and head, so that an index can keep
            features and apply other heads to them.
        allow_drift: write a variant even if its vectors differ from the encoder's by more than
            `variants.DRIFT` allows.
        tolerance: largest difference between torch and ONNX Runtime, on vectors of length 1; by
            default 0.0001.
        replace: whether a bundle at `output` may be replaced.

    Returns:
        The encoder of the bundle, on the CPU.

    Raises:
        BundleError: the run has no items to verify or calibrate with, its embedding cannot be cut
            to `dimensions`, or `export_model` raises a BundleError.
        DataError: an item cannot be read.
    """
    if output is None:
        folder = run.path / "bundle"
    else:
        folder = Path(output)
    splits = run.splits
    chosen = by_class(splits.held_out, splits.labels)
    quantised = "int8" in options.get("variants", ())
    if quantised and isinstance(run.dataset, StoredInputs):
        raise BundleError(
            "The int8 variant is calibrated on training items, but there are none."
            f" {splits.notes[0]}"
        )
    items = _load(run, chosen)
    calibration = None
    if quantised:
        calibration = _load(run, evenly_spaced(splits.train))
    model = run.model
    evaluation = None
    if dimensions is not None:
        model = _cut(run.model, items, dimensions)
    if model is run.model:
        # the metrics in the run's folder are those of the whole embedding
        evaluation = _evaluation(run.path)
    codes = None
    if run.model.combiner is not None and not run.model.combiner.exact:
        encode = ItemCodes(run, torch.device("cpu"))
        codes = encode(evenly_spaced(splits.held_out, MANY))
    export_model(
        model,
        items,
        folder,
        name=valid_text(run.path.resolve().name),
        labels=splits.labels[chosen],
        calibration=calibration,
        codes=codes,
        evaluation=evaluation,
        texts=_texts(run),
        **options,
    )
    return BundleEncoder(Bundle.open(folder, device="cpu"))


def _cut(model: Model, items: Array, dimensions: int) -> Model:
    """Return a model whose vectors are the first `dimensions` numbers of `model`'s."""
    if model.combiner is not None:
        raise BundleError(
            f"The run's combiner {type(model.combiner).__name__} compares whole codes, which cannot"
            " be cut. Export without dimensions."
        )
    with ready(model), torch.inference_mode():
        _, codes = model(torch.from_numpy(items[:32]))
    width = codes.shape[1]
    if not 1 <= dimensions <= width:
        raise BundleError(
            f"{dimensions:,} dimensions are not available: the run's embedding has {width:,}."
            f" Choose 1 to {width:,}."
        )
    if dimensions == width:
        return model
    if is_normalized(codes.numpy()):
        unit = [Normalise()]
    else:
        unit = []
    text = None
    if model.text is not None:
        text_head = nn.Sequential(model.text.head, Prefix(dimensions), *unit)
        text = TextPart(model.text.encoder, text_head, model.text.frozen)
    cut = Model(model.backbone, nn.Sequential(model.head, Prefix(dimensions), *unit), text=text)
    cut.channels_last = model.channels_last
    return cut


def _texts(run: Run) -> list[str]:
    """Return texts of held-out items, on which a part for texts is compared with torch."""
    if run.recipe.text is None:
        return []
    if isinstance(run.dataset, StoredInputs):
        return run.dataset.texts
    return held_out_texts(ItemTexts(run.dataset, run.recipe.text), run.splits)


def _load(run: Run, indices: Ints) -> Array:
    if isinstance(run.dataset, StoredInputs):
        return run.dataset.inputs[indices]
    chunks = list(inputs(run.dataset, indices, run.model.preprocessing, 64))
    if not chunks:
        raise BundleError(f"{run.path} has no items on which to compare torch and ONNX Runtime.")
    return torch.cat(chunks).numpy()


def _evaluation(path: Path) -> dict[str, float] | None:
    """Return the metrics that `retrieval evaluate` wrote, if it was run."""
    try:
        text = (path / "evaluation-test.json").read_text(encoding="utf-8")
        metrics = json.loads(text)["metrics"]["trained"]
        # the manifest is strict JSON, which has no NaN
        return {name: float(value) for name, value in metrics.items() if np.isfinite(value)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
