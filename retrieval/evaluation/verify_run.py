"""Verify pairs ("are these two the same?") with a run's model."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrieval.base.arrays import Floats64, Ints
from retrieval.base.csv_table import csv_text
from retrieval.base.files import whole_file, write_json
from retrieval.base.folder_kinds import StrPath
from retrieval.base.progress import Progress, shows_progress
from retrieval.data.encode import evaluating
from retrieval.data.loading import inputs
from retrieval.data.pairs import LabelledPairs, read_pairs
from retrieval.errors import DataError
from retrieval.evaluation.evaluate_run import device_of, items_of, raw_name, refuse_side
from retrieval.evaluation.evaluation import ByContestant
from retrieval.evaluation.verification import (
    Roc,
    Verification,
    draw_pairs,
    make_folds,
    verification,
)
from retrieval.model.model import Model
from retrieval.run.open import ItemCodes, Run

_NUMBERS_PER_CALL = 2**22  # size of the arrays of codes whose distances are computed at once


@dataclass(frozen=True, repr=False)
class RunVerification(ByContestant):
    """The result of `Run.verify`.

    Attributes:
        run: the run's folder.
        split: "test" or "validation".
        pairs: the numbers of "same" and "different" pairs, "items" and "folds", and the origin of
            the pairs ("drawn_from" or "file", "folds_drawn", "seed").
        metrics: by contestant ("trained", "raw pixels" or "raw vectors"), each metric.
        folds: by contestant, the "accuracy" on each fold and the "threshold" for it, which is
            chosen on the other folds.
        notes: caveats for readers of the metrics.
        files: names in the run's folder of "roc.csv", "roc.svg" and "pairs.csv".
    """

    run: str
    split: str
    pairs: dict[str, Any]
    metrics: dict[str, dict[str, float]]
    folds: dict[str, dict[str, dict[str, float]]]
    notes: list[str]
    files: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `verification-SIDE.json`."""
        return {"protocol": "verification"} | asdict(self)

    def _notes(self) -> list[str]:
        pairs = self.pairs
        if "file" in pairs:
            origin = f"from {pairs['file']}"
        else:
            origin = f"drawn from the {self.split} items"
        return [
            (
                f"{pairs['same']:,} same and {pairs['different']:,} different pairs of"
                f" {pairs['items']:,} items, {origin}, in {pairs['folds']} folds"
            ),
            *self.notes,
            f"ROC curve: {Path(self.run, self.files['roc.svg'])}",
        ]


@shows_progress
def verify(
    run: Run,
    *,
    side: str = "test",
    pairs: StrPath | None = None,
    draw: int | None = None,
    seed: int = 0,
    baseline: bool = False,
    progress: Progress = True,
) -> RunVerification:
    """Verify pairs with a run's model, and write metrics, ROC curve and pairs into its folder.

    `verification-SIDE.json` holds the result, `verification-SIDE-roc.csv` and `.svg` the ROC
    curves, and `verification-SIDE-pairs.csv` the pairs with their folds and the trained model's
    distances.

    Args:
        run: a run.
        side: "test" or "validation", the side to draw pairs from. For pairs of a file, a note
            counts the pairs with items that were used before this side: training items and, for
            "test", validation items.
        pairs: a file with pairs of any of the data's items (see
            `retrieval.data.pairs.read_pairs`); `None` draws pairs.
        draw: largest number of pairs to draw (see `retrieval.evaluation.verification.draw_pairs`).
        seed: seed of the drawn pairs, or of the folds for a file without folds.
        baseline: also evaluate the raw inputs, scaled to unit length, by Euclidean distance.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).

    Returns:
        Each contestant's metrics, over all pairs and by fold, and the names of the files.

    Raises:
        DataError: the run has no items on that side, the file is wrong, or pairs cannot be drawn.
    """
    refuse_side(side)
    if pairs is not None and draw is not None:
        raise DataError(f"Pairs are either read or drawn: leave out {pairs} or the number to draw.")
    if pairs is None:
        file = None
    else:
        file = Path(pairs)
    chosen, origin = _pairs(run, side, file, draw, seed)
    items, rows = np.unique(np.stack([chosen.first, chosen.second]), return_inverse=True)
    first, second = rows.reshape(2, -1)
    device = device_of(run)
    codes = ItemCodes(run, device)
    distances = {"trained": pair_distances(run.model, codes(items), first, second)}
    if baseline:
        # pixels remain bytes until a distance is computed, because floats take four times as much
        chunks = inputs(run.dataset, items, run.model.preprocessing, codes.batch_size)
        raw = torch.cat([chunk.flatten(1) for chunk in chunks])
        distances[raw_name(run)] = pair_distances(None, raw, first, second)
    if device.type != "cpu":
        run.model.to("cpu")
    assert chosen.fold is not None
    verified = {
        name: verification(column, chosen.same, chosen.fold) for name, column in distances.items()
    }
    results = RunVerification(
        run=str(run.path),
        split=side,
        pairs={
            "same": int(chosen.same.sum()),
            "different": int((~chosen.same).sum()),
            "items": len(items),
            "folds": len(chosen.folds),
            **origin,
        },
        metrics={name: outcome.values for name, outcome in verified.items()},
        folds={
            name: {
                "accuracy": dict(zip(chosen.folds, outcome.accuracy.tolist(), strict=True)),
                "threshold": dict(zip(chosen.folds, outcome.threshold.tolist(), strict=True)),
            }
            for name, outcome in verified.items()
        },
        notes=_notes(run, side, chosen),
        files={name: f"verification-{side}-{name}" for name in ("roc.csv", "roc.svg", "pairs.csv")},
    )
    _write(run, results, chosen, verified, distances["trained"])
    return results


def pair_distances(model: Model | None, codes: Tensor, first: Ints, second: Ints) -> Floats64:
    """Return distances (P,) between the rows `first` and `second` (P,) of codes (N, C).

    A model with a combiner measures by the combiner, with the first item as the query. A model
    without one measures by Euclidean distance in float64. Without a model, the distance is the
    Euclidean distance of the rows scaled to unit length.
    """
    if model is None:
        combiner = None
    else:
        combiner = model.combiner
    distances = np.empty(len(first))
    size = max(1, _NUMBERS_PER_CALL // max(1, codes.shape[1]))
    with contextlib.nullcontext() if model is None else evaluating(model):
        for start in range(0, len(first), size):
            part = slice(start, start + size)
            a = codes[torch.from_numpy(first[part])]
            b = codes[torch.from_numpy(second[part])]
            if model is not None and combiner is not None:
                device = next((p.device for p in model.parameters()), torch.device("cpu"))
                values = combiner.pairwise_distance(a.to(device), b.to(device))
            else:
                a = a.double()
                b = b.double()
                if model is None:
                    a = torch.nn.functional.normalize(a, dim=1)
                    b = torch.nn.functional.normalize(b, dim=1)
                values = (a - b).square().sum(1).sqrt()
            distances[part] = values.cpu().double().numpy()
    return distances


def _pairs(
    run: Run, side: str, file: Path | None, draw: int | None, seed: int
) -> tuple[LabelledPairs, dict[str, Any]]:
    """Return pairs with folds, and their origin."""
    run.require_data()
    if file is None:
        held, gallery = items_of(run, side)
        if gallery is not None:
            held = np.union1d(held, gallery)
        drawn = draw_pairs(held, run.splits.labels[held], count=draw, seed=seed)
        return drawn, {"drawn_from": side, "seed": seed}
    read = read_pairs(file, run.dataset.keys)
    if read.fold is not None:
        return read, {"file": str(file)}
    fold, names = make_folds(read.same, seed)
    read = LabelledPairs(read.first, read.second, read.same, fold, names)
    return read, {"file": str(file), "folds_drawn": True, "seed": seed}


def _notes(run: Run, side: str, pairs: LabelledPairs) -> list[str]:
    """Return caveats: pairs that contradict labels, and pairs with items used before `side`."""
    splits = run.splits
    notes = []
    same_label = splits.labels[pairs.first] == splits.labels[pairs.second]
    if wrong := int((same_label != pairs.same).sum()):
        notes.append(
            f"The list contradicts the data's labels for {wrong:,} of {len(pairs):,} pairs."
        )
    seen = splits.train
    if side == "test":  # validation chose the weights, so its items are not held out from the test
        seen = np.concatenate([splits.train, splits.validation])
    is_seen = np.isin(pairs.first, seen) | np.isin(pairs.second, seen)
    if is_seen.any():
        clean = [name for k, name in enumerate(pairs.folds) if not is_seen[pairs.fold == k].any()]
        notes.append(
            f"{int(is_seen.sum()):,} of {len(pairs):,} pairs have an item by which this model was"
            " trained or chosen, so these are not metrics of held-out items; folds without such"
            f" pairs: {', '.join(clean) or 'none'}."
        )
    return notes


def _write(
    run: Run,
    results: RunVerification,
    pairs: LabelledPairs,
    verified: Mapping[str, Verification],
    trained: Floats64,
) -> None:
    """Write the curves, the pairs with the trained model's distances, and then the metrics."""
    points: list[tuple[Any, ...]] = [("contestant", "threshold", "far", "tar")]
    for name, outcome in verified.items():
        roc = outcome.roc
        for point in zip(roc.threshold, roc.far, roc.tar, strict=True):
            points.append((name, *map(float, point)))
    keys = run.dataset.keys
    fold = pairs.fold
    assert fold is not None
    columns = zip(pairs.first, pairs.second, pairs.same, fold, trained.tolist(), strict=True)
    table: list[tuple[Any, ...]] = [("first", "second", "same", "fold", "distance")]
    for first, second, same, number, distance in columns:
        table.append((keys[first], keys[second], int(same), pairs.folds[number], distance))
    picture = draw_roc(
        {name: (outcome.roc, outcome.values["auc"]) for name, outcome in verified.items()}
    )
    contents = {
        "roc.csv": csv_text(points).encode(),
        "roc.svg": picture,
        "pairs.csv": csv_text(table).encode(),
    }
    # each file gets its name only after all of them are written
    with contextlib.ExitStack() as stack:
        for name, content in contents.items():
            path = run.path / results.files[name]
            stack.enter_context(whole_file(path, DataError)).write_bytes(content)
    write_json(run.path / f"verification-{results.split}.json", results.as_dict(), DataError)


def draw_roc(curves: Mapping[str, tuple[Roc, float]]) -> bytes:
    """Draw the contestants' ROC curves and AUCs as SVG; equal curves give equal bytes."""
    from retrieval.evaluation.plot import Picture, svg

    figure = Picture(5.2, 5.0)
    axis = figure.subplots()
    for style, (name, (roc, auc)) in zip(("-", "--"), curves.items(), strict=False):
        axis.plot(roc.far, roc.tar, linestyle=style, label=f"{name} (AUC {auc:.4f})")
    # this line crosses each curve at its equal error rate
    axis.plot([0, 1], [1, 0], color="0.8", linewidth=0.8, zorder=0)
    axis.set(xlabel="false accept rate (FAR)", ylabel="true accept rate (TAR)")
    axis.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    axis.set_aspect("equal")
    axis.legend(loc="lower right", frameon=False)
    return svg(figure)
