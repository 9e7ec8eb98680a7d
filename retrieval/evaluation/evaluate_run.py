"""Evaluate a run on its held-out items.

The contestants are the trained model and, on request, the raw inputs and a bundle. A bundle is
searched as a server searches it: if it has a rescorer, the nearest vectors are candidates, and the
rescorer orders the candidates by their codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from retrieval.base.arrays import Floats, Ints
from retrieval.base.files import write_json
from retrieval.base.places import StrPath
from retrieval.base.progress import Progress, shows_progress
from retrieval.bundle.distances import bundle_distances, columns_of_subspaces
from retrieval.data.encode import pixels
from retrieval.data.loading import inputs
from retrieval.errors import DataError
from retrieval.evaluation.evaluation import (
    ByContestant,
    Evaluation,
    Metrics,
    class_sizes,
    grid,
    left_out,
    resolve_metrics,
)
from retrieval.evaluation.neighbors import exact_neighbors
from retrieval.evaluation.protocol import (
    Protocol,
    device_of,
    items_of,
    refuse_side,
    unanswerable,
)
from retrieval.run.open import ItemCodes, Run

if TYPE_CHECKING:
    from retrieval.bundle.bundle import Bundle
    from retrieval.bundle.manifest import SubspaceEntry
    from retrieval.model.contracts import Metric


@dataclass(frozen=True)
class CandidateStep:
    """How many of the nearest items are among a rescorer's candidates, measured by the export.

    Attributes:
        overlap_at_10: by number of candidates, the share of the ten nearest items, by the
            rescorer's distance, that are candidates.
        default: the bundle's number of candidates.
    """

    overlap_at_10: dict[str, float]
    default: int


@dataclass(frozen=True, repr=False)
class RunEvaluation(ByContestant):
    """The result of `Run.evaluate`.

    Attributes:
        run: the run's folder.
        split: "test" or "validation".
        queries: number of queries in the means.
        gallery: number of items in the gallery.
        singletons: number of queries left out because no other item has their label.
        metrics: by contestant ("trained", "raw pixels" or "raw vectors", "bundle"), the mean of
            each metric.
        candidates: for a bundle with a rescorer, how many of the nearest items are candidates.
        spread: with `[evaluate] gallery_items`, by contestant, the standard deviation of each
            metric over random galleries.
        groups: with `[evaluate] by`, by contestant and group, the mean of each metric and the
            number of queries.
    """

    run: str
    split: str
    queries: int
    gallery: int
    singletons: int
    metrics: dict[str, dict[str, float]]
    candidates: CandidateStep | None = None
    spread: dict[str, dict[str, float]] = field(default_factory=dict)
    groups: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float]:
        """The mean of each metric of the trained model."""
        return self.metrics["trained"]

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `evaluation-SIDE.json`, which omits keys without content."""
        table = asdict(self)
        for name in ("candidates", "spread", "groups"):
            if not table[name]:
                del table[name]
        return table

    def _notes(self) -> list[str]:
        note = f"{self.queries:,} queries among {self.gallery:,} items ({self.split})"
        lines = [note + left_out(self)]
        for contestant, groups in self.groups.items():
            lines += ["", f"{contestant}, by group:", *grid(groups)]
        for contestant, spread in self.spread.items():
            text = ", ".join(f"{name} {value:.4f}" for name, value in spread.items())
            lines.append(f"{contestant}, standard deviation over random galleries: {text}")
        if self.candidates is not None:
            shares = self.candidates.overlap_at_10.items()
            text = ", ".join(f"{share:.3f} with {count}" for count, share in shares)
            lines.append(f"share of the ten nearest items among the candidates: {text} candidates")
        return lines


@shows_progress
def evaluate(
    run: Run,
    *,
    side: str = "test",
    metrics: Metrics = (),
    clusters: bool = False,
    baseline: bool = False,
    bundle: StrPath | None = None,
    progress: Progress = True,
) -> RunEvaluation:
    """Evaluate a run's model, and write the metrics into `evaluation-SIDE.json` in its folder.

    To evaluate on other data, use `data = retrieval.as_dataset(…)` and
    `retrieval.evaluate(run.encode(data), data.labels)`.

    Args:
        run: a run.
        side: "test" or "validation".
        metrics: one or more metrics, as for `retrieval.evaluate`; by default the recipe's.
        clusters: also return NMI and F1 of k-means clusters.
        baseline: also evaluate the raw inputs, scaled to unit length, by Euclidean distance.
        bundle: also evaluate a bundle, as a server searches it.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).

    Returns:
        The metrics of each contestant.

    Raises:
        DataError: the side does not exist, the run has no items there, or no query has a right
            answer.
    """
    refuse_side(side)
    chosen = resolve_metrics(metrics or run.recipe.evaluate.metrics, run.plugins)
    clusters = clusters or run.recipe.evaluate.clusters
    query, gallery = items_of(run, side)
    protocol = Protocol(run, query, gallery)
    if bundle is not None:
        protocol.refuse_bundle()
    device = device_of(run)
    model = run.model.to(device)
    codes = ItemCodes(run, device)

    def measure(encode: Callable[[Ints], Any], distance: Any = None) -> Evaluation:
        sides = encode(query), None if gallery is None else encode(gallery)
        return protocol.measure(*sides, distance, metrics=chosen, clusters=clusters)

    contestants = {"trained": measure(codes, model.combiner and model.combiner.compute_mat)}
    if not contestants["trained"].queries:
        raise DataError(unanswerable(run, side))
    if baseline:
        if run.dataset.kind == "features":
            raw = "raw vectors"
        else:
            raw = "raw pixels"
        contestants[raw] = measure(lambda items: pixels(run.dataset, items, model))
    values = {name: contestant.values for name, contestant in contestants.items()}
    trained = contestants["trained"]
    candidates = None
    if bundle is not None:
        values["bundle"], candidates = _served(run, bundle, query, gallery, chosen)
    if device.type != "cpu":
        model.to("cpu")
    results = RunEvaluation(
        run=str(run.path),
        split=side,
        queries=trained.queries,
        gallery=trained.gallery,
        singletons=trained.singletons,
        metrics=values,
        candidates=candidates,
        spread={name: row.spread for name, row in contestants.items() if row.spread},
        groups={name: row.groups for name, row in contestants.items() if row.groups},
    )
    write_json(run.path / f"evaluation-{side}.json", results.as_dict(), DataError)
    return results


def _served(
    run: Run, path: StrPath, query: Ints, gallery: Ints | None, metrics: dict[str, Metric]
) -> tuple[dict[str, float], CandidateStep | None]:
    """Return a bundle's metrics, and how many of the nearest items are its rescorer's candidates.

    Metrics of the whole ranking are left out, because a server returns only the first results.
    """
    from retrieval.bundle.bundle import Bundle

    bundle = Bundle.open(path)
    itself = gallery is None
    queries = encoded(bundle, run, query)
    if gallery is None:
        items = queries
    else:
        items = encoded(bundle, run, gallery)
    query_class = run.splits.labels[query]
    if gallery is None:
        item_class = query_class
    else:
        item_class = run.splits.labels[gallery]
    metrics = {name: m for name, m in metrics.items() if isinstance(m.depth, int)}
    deepest = max((int(m.depth) for m in metrics.values()), default=1)
    if itself:
        exclude = np.arange(len(query))
    else:
        exclude = None
    rows = served_rows(bundle, queries, items, min(deepest, len(item_class) - itself), exclude)
    relevant = class_sizes(query_class, item_class) - int(itself)
    matches = (item_class[rows] == query_class[:, None]) & (rows >= 0)
    kept = relevant > 0
    values = {name: float(m(matches[kept], relevant[kept]).mean()) for name, m in metrics.items()}
    rescorer = bundle.manifest.rescorer
    if rescorer is None or not rescorer.overlap:
        return values, None
    return values, CandidateStep(rescorer.overlap, rescorer.candidates)


def encoded(bundle: Bundle, run: Run, indices: Ints) -> dict[str, Any]:
    """Return a bundle's arrays of items.

    "vector" is to be indexed, "query" is to be searched for, and "code" is what the rescorer
    compares, or `None` without a rescorer.
    """
    chunks = inputs(run.dataset, indices, run.model.preprocessing, 256)
    parts = [bundle.encode(chunk.numpy()) for chunk in chunks]
    vectors = np.concatenate([p.vector for p in parts])
    queries = [p.query for p in parts if p.query is not None]
    codes = [p.code for p in parts if p.code is not None]
    return {
        "vector": vectors,
        "query": np.concatenate(queries) if queries else vectors,
        "code": np.concatenate(codes) if bundle.has_code else None,
    }


def served_rows(
    bundle: Bundle, queries: dict[str, Any], items: dict[str, Any], k: int, exclude: Ints | None
) -> Ints:
    """Return the rows (Q, k) of a server's k results, nearest first, padded with −1.

    If the manifest's `merge` is "score", the order of the first results depends on k.
    """
    rescorer = bundle.manifest.rescorer
    vectors = items["vector"]
    size = len(vectors) - (exclude is not None)
    count = min(k if rescorer is None else rescorer.candidates, size)
    subspaces = bundle.manifest.subspaces
    proposed = nearest_in_each(queries["query"], vectors, count, subspaces, exclude)
    rows = np.full((len(queries["query"]), k), -1, dtype=np.int64)
    for i, query in enumerate(queries["query"]):
        near = np.unique(proposed[:, i])
        code = codes = None
        if rescorer is not None:
            code = queries["code"][i]
            codes = items["code"][near]
        distances = bundle_distances(bundle, query, code, vectors[near], codes, k)
        ordered = near[np.argsort(distances, kind="stable")][:k]
        rows[i, : len(ordered)] = ordered
    return rows


def nearest_in_each(
    query: Floats,
    vector: Floats,
    k: int,
    subspaces: Sequence[SubspaceEntry],
    exclude: Ints | None = None,
) -> Ints:
    """Return the exact k nearest rows (S, Q, k) in each of S sub-spaces, which are column ranges.

    `exclude` (Q,) is the row that is left out for each query.
    """
    spans = columns_of_subspaces(subspaces)
    columns = [(query[:, span], vector[:, span]) for span in spans]
    return np.stack([exact_neighbors(*pair, k, exclude=exclude)[0] for pair in columns])
