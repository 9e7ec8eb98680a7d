"""Evaluate a run on its held-out items: the trained model, the raw inputs beside it, and a bundle
as a server uses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.data.encode import pixels
from retrieval.data.loading import inputs
from retrieval.errors import DataError
from retrieval.evaluation.evaluation import Evaluation, grid
from retrieval.evaluation.neighbors import exact_neighbors
from retrieval.evaluation.protocol import Measured, Protocol
from retrieval.host.values import toml_value
from retrieval.model.metrics import metric
from retrieval.model.products import CheckedMetric
from retrieval.run.folder import write_json
from retrieval.run.open import ItemCodes, Run, load_run
from retrieval.serving.files.places import StrPath
from retrieval.serving.merging import merged, spans_of
from retrieval.serving.progress import Progress, shown

if TYPE_CHECKING:
    from retrieval.host.plugins import Plugins
    from retrieval.model.contracts import Metric
    from retrieval.serving.bundle import Bundle
    from retrieval.serving.manifest import Manifest, SubspaceEntry

Floats = NDArray[np.floating[Any]]
Rows = NDArray[np.int64]

OVERLAP_AT = 10
OVERLAP_QUERIES = 1000
"""At most so many queries say what the candidate step of a rescorer costs."""


@dataclass(frozen=True)
class CandidateStep:
    """What a rescorer's candidate step costs.

    Attributes:
        overlap_at_10: by number of candidates, the share of the exhaustive ranking's first ten that
            they keep.
        default: how many candidates the bundle takes.
    """

    overlap_at_10: dict[str, float]
    default: int


@dataclass(frozen=True, repr=False)
class RunEvaluation:
    """What `evaluate_run` found.

    Attributes:
        run: the run's folder.
        split: "test" or "validation".
        queries: how many queries the means are taken over.
        gallery: how many items were searched.
        singletons: how many queries were left out because no other item has their label.
        figures: by contestant ("trained", "raw pixels" or "raw vectors", "bundle"), each metric's
            mean.
        candidates: with a bundle that rescores, what its candidate step costs.
        spread: by contestant, each figure's standard deviation over random galleries, with
            `[evaluate] gallery_items`.
        groups: by contestant and group, each metric's mean and the number of queries, with
            `[evaluate] by`.
        milliseconds: by contestant, of a query's search, with `[evaluate] latency`.
    """

    run: str
    split: str
    queries: int
    gallery: int
    singletons: int
    figures: dict[str, dict[str, float]]
    candidates: CandidateStep | None = None
    spread: dict[str, dict[str, float]] = field(default_factory=dict)
    groups: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.table()

    def as_dict(self) -> dict[str, Any]:
        """Return what `evaluation-SIDE.json` holds: what nothing was asked of is left out."""
        found = asdict(self)
        for name in ("candidates", "spread", "groups", "milliseconds"):
            if not found[name]:
                del found[name]
        return found

    def to_json(self) -> str:
        """Return the same as JSON."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False)

    def table(self) -> str:
        """Return a table: one row per metric, one column per contestant."""
        note = f"{self.queries:,} queries among {self.gallery:,} items ({self.split})"
        if self.singletons:
            note += f"; {self.singletons:,} left out: no other item of their class"
        lines = [*grid(self.figures), note]
        for row, groups in self.groups.items():
            lines += ["", f"{row}, by group:", *grid(groups)]
        for row, spread in self.spread.items():
            said = ", ".join(f"{name} {value:.4f}" for name, value in spread.items())
            lines.append(f"{row}, standard deviation over random galleries: {said}")
        if self.milliseconds:
            said = ", ".join(f"{row} {value:.3g}" for row, value in self.milliseconds.items())
            lines.append(f"milliseconds a query, search alone: {said}")
        if self.candidates is not None:
            kept = ", ".join(
                f"{value:.3f} at {count}" for count, value in self.candidates.overlap_at_10.items()
            )
            lines.append(
                f"first ten shared with the exhaustive ranking, by number of candidates: {kept}"
            )
        return "\n".join(lines)


def resolve_metrics(
    wanted: Sequence[str | Mapping[str, Any]], plugins: Plugins, always: Sequence[str] = ()
) -> dict[str, Metric]:
    """Return metrics by the names of their figures.

    Args:
        wanted: short names of built-in metrics, `PLUGIN.NAME`, or tables `{name = …, parameters}`;
            a table's figure is called `NAME(parameter=value, …)`, as in `core.recall_at(k=5)`.
        plugins: where to find them.
        always: further short names.

    Raises:
        RetrievalError: there is no such metric, or its parameters do not fit.
    """
    found: dict[str, Metric] = {}
    for each in [*wanted, *always]:
        if isinstance(each, str) and "." not in each:
            found[each] = metric(each)
        else:
            table = {"name": each} if isinstance(each, str) else each
            name = _figure(table)
            found[name] = CheckedMetric(plugins.build("metrics", table), name)
    return found


def _figure(table: Mapping[str, Any]) -> str:
    """Return what a metric's figure is called: its name and the parameters that are set."""
    said = ", ".join(f"{key}={toml_value(value)}" for key, value in table.items() if key != "name")
    return f"{table.get('name')}({said})" if said else str(table.get("name"))


def refuse_side(side: str) -> None:
    """Refuse a side that is neither "test" nor "validation".

    Raises:
        DataError: it is neither.
    """
    if side not in ("test", "validation"):
        raise DataError(f'A run is measured on its side "test" or "validation", not on {side!r}.')


@shown
def evaluate_run(
    run: Run | StrPath,
    *,
    side: str = "test",
    metrics: Sequence[str | Mapping[str, Any]] = (),
    clusters: bool = False,
    baseline: bool = False,
    bundle: StrPath | None = None,
    progress: Progress = True,
) -> RunEvaluation:
    """Evaluate a run's model, and write the figures into `evaluation-SIDE.json` in its folder.

    Args:
        run: a run, or its folder.
        side: "test" or "validation".
        metrics: figures as in `[evaluate] metrics`; by default the recipe's.
        clusters: also NMI and F1 of k-means clusters.
        baseline: also the raw inputs, unit length, Euclidean.
        bundle: also a bundle's answers, searched as a server does: candidates by vector, then the
            rescorer if it has one.
        progress: True shows a bar, False nothing; a function is told (what, done, total).

    Returns:
        The figures of each contestant; with a rescorer also how much of the exhaustive ranking's
            first ten its candidates keep.

    Raises:
        DataError: there is no such side, or the run has no items there.
    """
    refuse_side(side)
    run = run if isinstance(run, Run) else load_run(run)
    names = (
        [metrics] if isinstance(metrics, str) else list(metrics)
    ) or run.recipe.evaluate.metrics
    chosen = resolve_metrics(names, run.plugins)
    clusters = clusters or run.recipe.evaluate.clusters
    query, gallery = (
        (run.splits.query, run.splits.gallery) if side == "test" else (run.splits.validation, None)
    )
    if not len(query):
        raise DataError(f"{run.path} has no {side} items: its [split] keeps none.")
    device = torch.device(
        "cuda" if torch.cuda.is_available() and run.recipe.train.device != "cpu" else "cpu"
    )
    model = run.model.to(device)

    protocol = Protocol(run, query, gallery)
    if bundle is not None:
        protocol.refuse_bundle()
    codes = ItemCodes(run, device)
    distance = None if model.combiner is None else model.combiner.compute_mat
    rows: dict[str, Measured] = {}

    def measure(name: str, ours: Any, others: Any, distance: Any = None) -> Evaluation:
        measured = protocol.measure(ours, others, distance, metrics=chosen, clusters=clusters)
        rows.update((name + change, row) for change, row in measured)
        return rows[name].first

    trained = measure(
        "trained", codes(query), None if gallery is None else codes(gallery), distance
    )
    if baseline:
        raw = [
            None if items is None else pixels(run.dataset, items, model)
            for items in (query, gallery)
        ]
        measure("raw vectors" if run.dataset.kind == "features" else "raw pixels", *raw)
    figures = {name: row.values for name, row in rows.items()}
    candidates = None
    if bundle is not None:
        figures["bundle"], candidates = _served(run, bundle, query, gallery, chosen)
    if device.type != "cpu":
        model.to("cpu")
    results = RunEvaluation(
        str(run.path),
        side,
        trained.queries,
        trained.gallery,
        trained.singletons,
        figures,
        candidates,
        {row: one.spread for row, one in rows.items() if one.spread},
        {row: one.groups for row, one in rows.items() if one.groups},
        {row: one.milliseconds for row, one in rows.items() if run.recipe.evaluate.latency},
    )
    write_json(run.path / f"evaluation-{side}.json", results.as_dict())
    return results


def _served(
    run: Run,
    path: StrPath,
    query: Rows,
    gallery: Rows | None,
    metrics: dict[str, Metric],
) -> tuple[dict[str, float], CandidateStep | None]:
    """Return what a bundle gives, and what its candidate step costs."""
    from retrieval.serving.bundle import Bundle

    bundle = Bundle.open(path)
    labels = run.splits.labels
    ours = encoded(bundle, run, query)
    others = ours if gallery is None else encoded(bundle, run, gallery)
    theirs = labels[query if gallery is None else gallery]
    exclude = np.arange(len(query)) if gallery is None else None
    rescorer = bundle.manifest.rescorer
    deepest = max(
        (m.depth for m in metrics.values() if isinstance(m.depth, int)), default=OVERLAP_AT
    )
    k = min(len(theirs) - (exclude is not None), max(deepest, OVERLAP_AT))
    step = None
    if rescorer is None:
        rows = served_neighbors(ours["query"], others["vector"], k, bundle.manifest, exclude)
    else:
        rows, overlaps = _rescored(bundle, ours, others, exclude, k, rescorer.candidates)
        step = CandidateStep(overlaps, rescorer.candidates)
    relevant = np.bincount(theirs, minlength=int(labels.max()) + 1)[labels[query]] - int(
        gallery is None
    )
    asked = relevant > 0
    matches = (theirs[rows] == labels[query][:, None]) & (rows >= 0)
    figures = {
        name: float(m(matches[asked], relevant[asked]).mean())
        for name, m in metrics.items()
        if isinstance(m.depth, int)
    }
    return figures, step


def encoded(bundle: Bundle, run: Run, indices: Rows) -> dict[str, Any]:
    """Return a bundle's "vector", "query" and "code" (None without a rescorer) of items of a run,
    (N, P) and (N, C).
    """
    parts = [
        bundle.encode(chunk.numpy())
        for chunk in inputs(run.dataset, indices, run.model.preprocessing, 256)
    ]
    vectors = np.concatenate([p.vector for p in parts])
    return {
        "vector": vectors,
        "query": np.concatenate([p.query for p in parts])
        if parts[0].query is not None
        else vectors,
        "code": np.concatenate([p.code for p in parts if p.code is not None])
        if bundle.has_code
        else None,
    }


def _rescored(
    bundle: Bundle,
    ours: dict[str, Any],
    others: dict[str, Any],
    exclude: Rows | None,
    k: int,
    candidates: int,
) -> tuple[Rows, dict[str, float]]:
    """Return rows (Q, k) after rescoring the candidates, and the overlap of their first ten with
    the exhaustive ten.

    The exhaustive ranking costs as many distances as there are items: it is made for
    `OVERLAP_QUERIES` of the queries.
    """
    size, asked = len(others["vector"]), len(ours["query"])
    counts = sorted({min(c, size) for c in (50, 200, 500, candidates)})
    deepest = min(counts[-1], size - (exclude is not None))
    proposed = nearest_in_each(
        ours["query"], others["vector"], deepest, bundle.manifest.subspaces, exclude
    )
    rows = np.full((asked, k), -1, dtype=np.int64)
    kept = dict.fromkeys(counts, 0.0)
    sampled = np.linspace(0, asked - 1, min(asked, OVERLAP_QUERIES)).round().astype(np.int64)
    for i in range(asked):
        code, some = ours["code"][i : i + 1], np.unique(proposed[:, i, :candidates])
        ordered = some[np.argsort(bundle.rescore(code, others["code"][some])[0], kind="stable")][:k]
        rows[i, : len(ordered)] = ordered
    for i in sampled:
        distances = np.concatenate(
            [
                bundle.rescore(ours["code"][i : i + 1], others["code"][start : start + 4096])[0]
                for start in range(0, size, 4096)
            ]
        )
        if exclude is not None:
            distances[exclude[i]] = np.inf
        truth = np.argsort(distances, kind="stable")[: min(OVERLAP_AT, k)]
        for c in counts:
            mine = np.unique(proposed[:, i, :c])
            ordered = mine[np.argsort(distances[mine], kind="stable")][: len(truth)]
            kept[c] += len(np.intersect1d(ordered, truth)) / len(truth)
    return rows, {str(c): value / len(sampled) for c, value in kept.items()}


def nearest_in_each(
    query: Floats,
    vector: Floats,
    k: int,
    subspaces: Sequence[SubspaceEntry],
    exclude: Rows | None = None,
) -> Rows:
    """Return each sub-space's exact k nearest rows (S, Q, k); without sub-spaces the whole vector
    is the one.

    Args:
        query: (Q, P) vectors that are asked with.
        vector: (N, P) vectors that are stored.
        k: how many; at most N, less one with `exclude`.
        subspaces: ranges of columns.
        exclude: (Q,) the row to leave out for each query.
    """
    found = [
        exact_neighbors(query[:, span], vector[:, span], k, exclude=exclude)[0]
        for span in spans_of(subspaces)
    ]
    return np.stack(found)


def served_neighbors(
    query: Floats, vector: Floats, k: int, manifest: Manifest, exclude: Rows | None = None
) -> Rows:
    """Return rows (Q, k), nearest first, as a server that is asked for k answers orders them.

    With merge "score" an answer's place depends on how many are asked for, so that a figure among
    the first ten is here that of a list of k.

    Args:
        query: see `nearest_in_each`, as the next ones.
        vector: likewise.
        k: likewise.
        manifest: a bundle's, without a rescorer.
        exclude: likewise.
    """
    proposed = nearest_in_each(query, vector, k, manifest.subspaces, exclude)
    if len(proposed) == 1 and manifest.merge == "min":
        only: Rows = proposed[0]
        return only
    found = np.empty(proposed.shape[1:], dtype=np.int64)
    for number, asked in enumerate(query):
        rows = np.unique(proposed[:, number])
        distances = merged(asked, vector[rows], k, manifest.subspaces, manifest.merge)
        found[number] = rows[np.argsort(distances, kind="stable")[:k]]
    return found
