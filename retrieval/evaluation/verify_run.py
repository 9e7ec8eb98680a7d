"""Verify pairs ("are these two the same?") with a run's model, baselines and a bundle."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.data.encode import evaluating
from retrieval.data.loading import inputs
from retrieval.data.pairs import LabelledPairs, read_pairs
from retrieval.errors import DataError
from retrieval.evaluation.evaluate_run import encoded
from retrieval.evaluation.evaluation import grid
from retrieval.evaluation.protocol import device_of, items_of, refuse_side
from retrieval.evaluation.verification import (
    Roc,
    Verification,
    draw_pairs,
    make_folds,
    verification,
)
from retrieval.host.files import whole_file, write_json
from retrieval.model.model import Model
from retrieval.run.build import build_model
from retrieval.run.open import ItemCodes, Run
from retrieval.serving.files.places import StrPath
from retrieval.serving.progress import Progress, shown

Rows = NDArray[np.int64]
Floats = NDArray[np.float64]

_NUMBERS_PER_CALL = 2**22  # numbers of codes for which distances are computed at once
_SHARED = {
    "nothing": "which share no class",
    "classes": "which share classes but no item",
    "items": "which share items",
}


@dataclass(frozen=True, repr=False)
class RunVerification:
    """The result of `Run.verify`.

    Attributes:
        run: the run's folder.
        split: "test" or "validation".
        pairs: the numbers of "same" and "different" pairs, "items" and "folds"; what two folds
            share ("folds_share": "nothing", "classes" or "items"); and the origin of the pairs
            ("drawn_from" or "file", "folds_drawn", "seed").
        metrics: by contestant ("trained", the untrained baselines, "bundle"), each metric.
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

    def __repr__(self) -> str:
        return self.table()

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `verification-SIDE.json`."""
        return {"protocol": "verification"} | asdict(self)

    def table(self) -> str:
        """Return a table: one row per metric, one column per contestant."""
        pairs = self.pairs
        origin = (
            f"from {pairs['file']}" if "file" in pairs else f"drawn from the {self.split} items"
        )
        lines = [
            *grid(self.metrics),
            (
                f"{pairs['same']:,} same and {pairs['different']:,} different pairs of"
                f" {pairs['items']:,} items, {origin}, in {pairs['folds']} folds"
                f" {_SHARED[pairs['folds_share']]}"
            ),
            *self.notes,
            f"ROC curve: {Path(self.run, self.files['roc.svg'])}",
        ]
        return "\n".join(lines)


@shown
def verify(
    run: Run,
    *,
    side: str = "test",
    pairs: StrPath | None = None,
    draw: int | None = None,
    folds: int | None = None,
    seed: int = 0,
    baseline: bool = False,
    bundle: StrPath | None = None,
    progress: Progress = True,
) -> RunVerification:
    """Verify pairs with a run's model, and write metrics, ROC curve and pairs into its folder.

    `verification-SIDE.json` holds the result, `verification-SIDE-roc.csv` and `.svg` the ROC
    curves, and `verification-SIDE-pairs.csv` the pairs with their folds and the trained model's
    distances.

    Args:
        run: a run.
        side: "test" or "validation", the side to draw pairs from. For pairs of a file, a note
            counts those with items that were used before this side: training items and, for
            "test", validation items.
        pairs: a file with pairs of any of the data's items (see
            `retrieval.data.pairs.read_pairs`); `None` draws pairs.
        draw: number of pairs to draw (see `retrieval.evaluation.verification.draw_pairs`).
        folds: number of folds, for drawn pairs or a file without folds.
        seed: seed of the drawn pairs or folds.
        baseline: also evaluate the raw inputs (unit length, Euclidean) and the untrained model or,
            for a learner, the backbone's features (Euclidean).
        bundle: also evaluate a bundle's distances: its rescorer's if it has one, else those of its
            vectors.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).

    Returns:
        Each contestant's metrics, over all pairs and by fold, and the names of the files.

    Raises:
        DataError: the run has no items on that side, the file is wrong, or pairs cannot be drawn.
    """
    refuse_side(side)
    chosen, origin = _pairs(run, side, None if pairs is None else Path(pairs), draw, folds, seed)
    items, rows = np.unique(np.stack([chosen.first, chosen.second]), return_inverse=True)
    first, second = rows.reshape(2, -1)
    device = device_of(run)
    codes = ItemCodes(run, device)

    def measured(other: Model) -> Floats:
        return pair_distances(other, codes(items, other), first, second)

    distances = {"trained": measured(run.model)}
    if baseline:
        raw = "raw vectors" if run.dataset.kind == "features" else "raw pixels"
        distances[raw] = _raw(run, items, first, second, codes.batch)
        if run.recipe.learner is None:
            distances["untrained"] = measured(_untrained(run))
        else:
            assert codes.source.arrays is not None
            features = torch.from_numpy(np.asarray(codes.source.arrays[items]))
            distances["backbone features"] = _euclidean(features, first, second)
    if bundle is not None:
        distances["bundle"] = _bundle(run, bundle, items, first, second)
    if device.type != "cpu":
        run.model.to("cpu")
    assert chosen.fold is not None
    verified = {
        name: verification(column, chosen.same, chosen.fold) for name, column in distances.items()
    }
    results = _results(run, side, chosen, origin, len(items), verified)
    write(run, side, chosen, verified, distances["trained"], results.as_dict())
    return results


def pair_distances(model: Model, codes: Tensor, first: Rows, second: Rows) -> Floats:
    """Return the model's distances (P,) between the rows `first` and `second` (P,) of codes (N, C).

    With a combiner, the first item is the query. Without one, the distance is Euclidean, in
    float64.
    """
    combiner = model.combiner
    if combiner is None:
        return _euclidean(codes, first, second)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with evaluating(model):
        return _in_parts(
            lambda a, b: combiner.pairwise_distance(a.to(device), b.to(device)).cpu(),
            codes,
            first,
            second,
        )


def _euclidean(codes: Tensor, first: Rows, second: Rows, unit: bool = False) -> Floats:
    def distance(a: Tensor, b: Tensor) -> Tensor:
        a, b = a.double(), b.double()
        if unit:
            a, b = torch.nn.functional.normalize(a, dim=1), torch.nn.functional.normalize(b, dim=1)
        return (a - b).square().sum(1).sqrt()

    return _in_parts(distance, codes, first, second)


def _in_parts(
    distance: Callable[[Tensor, Tensor], Tensor], codes: Tensor, first: Rows, second: Rows
) -> Floats:
    out = np.empty(len(first))
    size = max(1, _NUMBERS_PER_CALL // max(1, codes.shape[1]))
    for start in range(0, len(first), size):
        part = slice(start, start + size)
        a, b = codes[torch.from_numpy(first[part])], codes[torch.from_numpy(second[part])]
        out[part] = distance(a, b).double().numpy()
    return out


def _raw(run: Run, items: Rows, first: Rows, second: Rows, batch: int) -> Floats:
    # pixels remain bytes until a distance is computed, because floats take four times the memory
    chunks = inputs(run.dataset, items, run.model.preprocessing, batch)
    raw = torch.cat([chunk.flatten(1) for chunk in chunks])
    return _euclidean(raw, first, second, unit=True)


def _untrained(run: Run) -> Model:
    """Return the model as before training; its weights follow from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.recipe.seed)
        model = build_model(run.recipe, run.dataset)
    if run.recipe.backbone.frozen:
        model.backbone = run.model.backbone
    return model.eval()


def _bundle(run: Run, path: StrPath, items: Rows, first: Rows, second: Rows) -> Floats:
    """Return a bundle's distances: by its rescorer or, without one, by the manifest's distance."""
    from retrieval.serving.bundle import Bundle
    from retrieval.serving.merging import of_products, spans_of

    opened = Bundle.open(path)
    arrays = encoded(opened, run, items)
    if opened.manifest.rescorer is not None:
        codes, out = arrays["code"], np.empty(len(first))
        order = np.argsort(first, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(first[order])) + 1):
            query = first[group[0]]
            out[group] = opened.rescore(codes[query : query + 1], codes[second[group]])[0]
        return out
    vectors, queries = (torch.from_numpy(arrays[name]).double() for name in ("vector", "query"))
    both = torch.cat([queries, vectors])
    if opened.manifest.distance.measure == "inner":
        products = _in_parts(lambda a, b: (a * b).sum(1), both, first, second + len(items))
        return of_products(products)
    spans = spans_of(opened.manifest.subspaces)
    by_span = [_euclidean(both[:, span], first, second + len(items)) for span in spans]
    nearest: Floats = np.minimum.reduce(by_span)
    return nearest


def _pairs(
    run: Run, side: str, file: Path | None, draw: int | None, folds: int | None, seed: int
) -> tuple[LabelledPairs, dict[str, Any]]:
    """Return pairs with folds, and their origin."""
    labels = run.splits.labels
    if file is not None and draw is not None:
        raise DataError(
            f"Pairs are either read or drawn: give either {file} or the number {draw:,}."
        )
    if file is None:
        held, gallery = items_of(run, side)
        if gallery is not None:
            held = np.union1d(held, gallery)
        drawn = draw_pairs(held, labels[held], count=draw, folds=folds, seed=seed)
        return drawn, {"drawn_from": side, "seed": seed}
    read = read_pairs(file, run.dataset.keys)
    if read.fold is None:
        fold, names = make_folds(read.same, folds, seed)
        read = LabelledPairs(read.first, read.second, read.same, fold, names)
        return read, {"file": str(file), "folds_drawn": True, "seed": seed}
    if folds is not None:
        raise DataError(
            f"{file} states its own {len(read.folds)} folds: give a number of folds only for"
            " files without folds."
        )
    return read, {"file": str(file)}


def _results(
    run: Run,
    side: str,
    pairs: LabelledPairs,
    origin: dict[str, Any],
    items: int,
    verified: dict[str, Verification],
) -> RunVerification:
    labels, fold = run.splits.labels, pairs.fold
    assert fold is not None
    same_label = labels[pairs.first] == labels[pairs.second]
    notes = []
    if wrong := int((same_label != pairs.same).sum()):
        notes.append(
            f"The list contradicts the data's labels for {wrong:,} of {len(pairs):,} pairs."
        )
    seen = (
        run.splits.train
        if side == "validation"
        else np.union1d(run.splits.train, run.splits.validation)
    )
    known = np.isin(pairs.first, seen) | np.isin(pairs.second, seen)
    if known.any():
        clean = [name for k, name in enumerate(pairs.folds) if not known[fold == k].any()]
        notes.append(
            f"{int(known.sum()):,} of {len(pairs):,} pairs have an item by which this model was"
            " trained or chosen, so these are not metrics of held-out items; folds without such"
            f" pairs: {', '.join(clean) or 'none'}."
        )
    used = {
        "same": int(pairs.same.sum()),
        "different": int((~pairs.same).sum()),
        "items": items,
        "folds": len(pairs.folds),
        "folds_share": _shared(pairs, labels),
        **origin,
    }
    by_fold = {
        name: {
            "accuracy": dict(zip(pairs.folds, outcome.accuracy.tolist(), strict=True)),
            "threshold": dict(zip(pairs.folds, outcome.threshold.tolist(), strict=True)),
        }
        for name, outcome in verified.items()
    }
    return RunVerification(
        run=str(run.path),
        split=side,
        pairs=used,
        metrics={name: outcome.values for name, outcome in verified.items()},
        folds=by_fold,
        notes=notes,
        files={name: f"verification-{side}-{name}" for name in ("roc.csv", "roc.svg", "pairs.csv")},
    )


def _shared(pairs: LabelledPairs, labels: NDArray[np.int64]) -> str:
    """Return what folds share: "nothing", "classes" or "items" (and classes)."""

    def disjoint(first: Rows, second: Rows) -> bool:
        both = np.stack([np.concatenate([first, second]), np.tile(pairs.fold, 2)], axis=1)  # type: ignore[arg-type]
        values = np.unique(both, axis=0)[:, 0]  # once for each fold that has the value
        return len(np.unique(values)) == len(values)

    if disjoint(labels[pairs.first], labels[pairs.second]):
        return "nothing"
    return "classes" if disjoint(pairs.first, pairs.second) else "items"


def write(
    run: Run,
    side: str,
    pairs: LabelledPairs,
    measured: Mapping[str, Verification],
    trained: NDArray[np.float64],
    results: Mapping[str, Any],
) -> None:
    """Write the curves, the pairs and then the metrics of a verification."""
    points = _csv(
        ("contestant", "threshold", "far", "tar"),
        (
            (row, *map(float, point))
            for row, verified in measured.items()
            for point in zip(
                verified.roc.threshold, verified.roc.far, verified.roc.tar, strict=True
            )
        ),
    )
    keys, fold = run.dataset.keys, pairs.fold
    assert fold is not None
    columns = zip(pairs.first, pairs.second, pairs.same, fold, trained.tolist(), strict=True)
    used = _csv(
        ("first", "second", "same", "fold", "distance"),
        ((keys[a], keys[b], int(same), pairs.folds[k], d) for a, b, same, k, d in columns),
    )
    picture = draw_roc(
        {row: (verified.roc, verified.values["auc"]) for row, verified in measured.items()}
    )
    contents = {"roc.csv": points.encode(), "roc.svg": picture, "pairs.csv": used.encode()}
    try:
        # each file gets its name only after all of them are written
        with contextlib.ExitStack() as stack:
            for name, content in contents.items():
                path = run.path / results["files"][name]
                stack.enter_context(whole_file(path)).write_bytes(content)
    except OSError as error:
        raise DataError(
            f"{run.path} cannot be written into: {error.strerror or error}. Free some space, or"
            " make the folder writable."
        ) from error
    write_json(run.path / f"verification-{side}.json", results, DataError)


def _csv(header: tuple[str, ...], rows: Any) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def draw_roc(curves: Mapping[str, tuple[Roc, float]]) -> bytes:
    """Draw the contestants' ROC curves and AUCs as SVG; equal curves give equal bytes."""
    from retrieval.evaluation.plot import Picture, svg

    figure = Picture(5.2, 5.0)
    axis = figure.subplots()
    styles = ("-", "--", ":", "-.")  # distinguishable without colours
    for i, (name, (roc, auc)) in enumerate(curves.items()):
        label = f"{name} (AUC {auc:.4f})"
        axis.plot(roc.far, roc.tar, linestyle=styles[i % len(styles)], label=label)
    # this line crosses each curve at its equal error rate
    axis.plot([0, 1], [1, 0], color="0.8", linewidth=0.8, zorder=0)
    axis.set(xlabel="false accept rate (FAR)", ylabel="true accept rate (TAR)")
    axis.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    axis.set_aspect("equal")
    axis.legend(loc="lower right", frameon=False)
    return svg(figure)
