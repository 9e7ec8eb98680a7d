"""Evaluate a run on its held-out items, as its recipe's `[evaluate]` says.

`[evaluate]` decides the gallery, what is relevant, which items a query does not see, the groups of
queries, and whether unknown queries must be rejected; `Protocol` follows it.

The contestants are the trained model and, on request, the raw inputs and a bundle. A bundle is
searched as a server searches it: if it has a rescorer, the nearest vectors are candidates, and the
rescorer orders the candidates by their codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from retrieval.base.arrays import Bools, Floats, Ints
from retrieval.base.files import whole_file, write_json
from retrieval.base.folder_kinds import StrPath
from retrieval.base.progress import Progress, shows_progress
from retrieval.base.trec import qrels_text, run_text
from retrieval.data.encode import pixels
from retrieval.data.loading import inputs
from retrieval.data.splits import tested_splits
from retrieval.data.texts import ItemTexts
from retrieval.errors import DataError, RecipeError
from retrieval.evaluation.evaluation import (
    ByContestant,
    Evaluation,
    Judged,
    Levels,
    Metrics,
    Tags,
    class_sizes,
    evaluate as evaluate_codes,
    evaluate_search,
    grid,
    hidden_items,
    is_answerable,
    is_pooled,
    left_out,
    relevant_items,
    resolve_metrics,
    visible_grades,
)
from retrieval.evaluation.intervals import difference_over_classes
from retrieval.evaluation.neighbors import Exclusion, NeighborSearch, exact_neighbors
from retrieval.recipe.read import check_recipe, naming, read_table
from retrieval.run.build import build_dataset, check_columns
from retrieval.run.encoders import encoder_at
from retrieval.run.open import ItemCodes, Run, texts_of

if TYPE_CHECKING:
    from retrieval.bundle.bundle import Bundle
    from retrieval.bundle.manifest import SubspaceEntry
    from retrieval.data.datasets import Dataset
    from retrieval.data.splits import Splits
    from retrieval.model.contracts import Metric
    from retrieval.recipe.read import Recipe

Items = Ints
_RANKED = 1000  # hits of a query in a TREC run, as in the tracks of TREC


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
        split: "test", "validation", or "on-NAME" with other data.
        queries: number of queries in the means.
        gallery: number of items in the gallery.
        singletons: number of queries left out because no other item has their label.
        metrics: by contestant ("trained", "raw pixels" or "raw vectors", "bundle"; with texts,
            "text to image" and "image to text", also after "bundle, "), the mean of each metric.
        candidates: for a bundle with a rescorer, how many of the nearest items are candidates.
        spread: with `[evaluate] gallery_items`, by contestant, the standard deviation of each
            metric over random galleries.
        groups: with `[evaluate] by`, by contestant and group, the mean of each metric and the
            number of queries.
        differences: by address of another model, for each metric the trained model's mean minus
            this model's, and half the width of its 95 % interval over classes.
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
    differences: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float]:
        """The mean of each metric of the trained model, between images if they have classes."""
        return next(iter(self.metrics.values()))

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `evaluation-SIDE.json`, which omits keys without content."""
        table = asdict(self)
        for name in ("candidates", "spread", "groups", "differences"):
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
        for address, metrics in self.differences.items():
            lines.append(f"trained minus {address}, ± 95 % over classes:")
            lines += [
                f"  {name} {mean:+.4f} ± {half:.4f}" for name, (mean, half) in metrics.items()
            ]
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
    models: Sequence[str] = (),
    bundle: StrPath | None = None,
    on: StrPath | None = None,
    rankings: StrPath | None = None,
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
        models: addresses of other models to evaluate on the same queries, such as
            "core.timm:resnet50.a1_in1k".
        bundle: also evaluate a bundle, as a server searches it.
        on: a TOML file whose `[data]` and `[evaluate]` replace the recipe's, see `with_data`. The
            metrics are written into `evaluation-on-NAME.json`.
        rankings: also write the trained model's hits into this file, as a TREC run, and beside it,
            with the suffix `.qrels`, what is relevant.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).

    Returns:
        The metrics of each contestant.

    Raises:
        DataError: the side does not exist, the run has no items there, or no query has a right
            answer.
    """
    refuse_side(side)
    if rankings is not None and Path(rankings).suffix == ".qrels":
        raise DataError(f"{rankings}: a run needs another suffix than .qrels, such as .trec.")
    split = side
    if on is not None:
        run = with_data(run, on, side)
        split = f"on-{Path(on).stem}"
    chosen = resolve_metrics(metrics or run.recipe.evaluate.metrics, run.plugins)
    clusters = clusters or run.recipe.evaluate.clusters
    query, gallery = items_of(run, side)
    protocol = Protocol(run, query, gallery)
    if bundle is not None:
        protocol.refuse_bundle()
    encoders = {address: encoder_at(run.plugins, address) for address in models}
    device = device_of(run)
    model = run.model.to(device)
    combiner = model.combiner

    def measure(sides: tuple[Any, Any], distance: Any = None) -> Evaluation:
        return protocol.measure(*sides, distance, metrics=chosen, clusters=clusters)

    distance = combiner and combiner.compute_mat
    codes = protocol.encoded(ItemCodes(run, device))
    trained = measure(codes, distance)
    contestants = {"trained": trained}
    if model.text is not None:
        texts = texts_of(run, ahead=False)
        items, images = _once(query, gallery, *codes)
        sides = text_sides(texts.texts, items, images, partial(texts.codes, part=model.text))
        contestants |= {
            name: evaluate_codes(**arguments, metrics=chosen) for name, arguments in sides.items()
        }
        # of images that have no others of their class, only their texts can be found
        if not trained.queries:
            del contestants["trained"]
            trained = contestants["text to image"]
    if not trained.queries:
        raise DataError(unanswerable(run, side))
    if rankings is not None:
        protocol.write_rankings(Path(rankings), *codes, distance)
    if baseline:
        raw = protocol.encoded(lambda items: pixels(run.dataset, items, model))
        contestants[raw_name(run)] = measure(raw)
    for address, encoder in encoders.items():
        contestants[address] = measure(protocol.encoded(partial(encoder, run.dataset)))
    values = {name: contestant.values for name, contestant in contestants.items()}
    candidates = None
    if bundle is not None:
        served, candidates = _served(run, bundle, query, gallery, chosen)
        values |= served
    if device.type != "cpu":
        model.to("cpu")
    results = RunEvaluation(
        run=str(run.path),
        split=split,
        queries=trained.queries,
        gallery=trained.gallery,
        singletons=trained.singletons,
        metrics=values,
        candidates=candidates,
        spread={name: row.spread for name, row in contestants.items() if row.spread},
        groups={name: row.groups for name, row in contestants.items() if row.groups},
        differences={
            address: _differences(trained, contestants[address], run.splits.labels[query])
            for address in encoders
            if not trained.spread
        },
    )
    write_json(run.path / f"evaluation-{split}.json", results.as_dict(), DataError)
    return results


def _once(query: Items, gallery: Items | None, *codes: Any) -> tuple[Items, Any]:
    """Return the items of queries and gallery, each once, and their codes."""
    if gallery is None:
        return query, codes[0]
    items, rows = np.unique(np.concatenate([query, gallery]), return_index=True)
    return items, np.concatenate(codes)[rows]


def text_sides(
    texts: ItemTexts, items: Items, codes: Any, encode: Callable[[Ints], Any]
) -> dict[str, dict[str, Any]]:
    """Return the arguments of `retrieval.evaluate` for both directions of search.

    A text is right for all images that have it, and an image for all its texts.

    Args:
        texts: the texts of the dataset's items.
        items: (N,), the images to search.
        codes: (N, C), their codes.
        encode: returns the codes (T, C) of texts, which it gets as positions in `texts.distinct`.
    """
    numbers = texts.numbers(items)
    text_codes = encode(numbers)
    of_text = [[texts.distinct[number]] for number in numbers]
    of_image = texts.of(items)
    text_rows = np.arange(len(numbers))
    image_rows = np.arange(len(items))
    return {
        "text to image": {
            "codes": text_codes,
            "labels": text_rows,
            "gallery": codes,
            "gallery_labels": image_rows,
            "relevance": Tags(of_text, of_image),
        },
        "image to text": {
            "codes": codes,
            "labels": image_rows,
            "gallery": text_codes,
            "gallery_labels": text_rows,
            "relevance": Tags(of_image, of_text),
        },
    }


def _differences(
    trained: Evaluation, other: Evaluation, query_class: Ints
) -> dict[str, tuple[float, float]]:
    """Return each metric's mean difference over the queries, and half of its interval's width.

    Metrics of all queries together have no value for each query, so they are left out.
    """
    differences = {}
    for name, values in trained.per_query.items():
        answerable = np.flatnonzero(~np.isnan(values))
        classes, number = np.unique(query_class[answerable], return_inverse=True)
        if len(classes) < 2:
            continue  # the interval would be infinite
        sums = np.bincount(number, values[answerable]).tolist()
        reference = np.bincount(number, other.per_query[name][answerable]).tolist()
        mean = difference_over_classes(sums, reference, np.bincount(number).tolist())
        differences[name] = (mean.value, mean.half)
    return differences


def with_data(run: Run, on: StrPath, side: str) -> Run:
    """Return a run with other data, all items of which are tested.

    Args:
        run: a run.
        on: a TOML file with the table `[data]` and, if needed, `[evaluate]`.
        side: the side to measure; other data have only a test side.

    Raises:
        RecipeError: the file has other tables, or they are wrong.
        DataError: the data cannot be read, or the model does not take their items.
    """
    if side != "test":
        raise DataError(f"{on} has only items to test on, and no {side} side.")
    table, _ = read_table(on)
    if "data" not in table or table.keys() - {"data", "evaluate"}:
        raise RecipeError("it must have [data], may have [evaluate], and nothing else.", str(on))
    table_of_run = run.recipe.model_dump(exclude_unset=True)
    objects = {name: part for name, part in run.recipe.objects.items() if name != "data"}
    recipe = check_recipe({**table_of_run, "evaluate": {}, **table}, str(on), objects, run.plugins)
    with naming(on):
        dataset = build_dataset(recipe)
        if dataset.kind != run.dataset.kind:
            raise DataError(f"[data] holds {dataset.kind}, but the model takes {run.dataset.kind}.")
        splits = tested_splits(dataset)
    return replace(run, recipe=recipe, dataset=dataset, splits=splits)


UNSERVED_KEYS = ("exclude", "relevant", "levels", "tags", "by", "gallery_items", "open_set")
"""Keys of `[evaluate]` for which no bundle is measured: a server's search cannot follow them."""


def refuse_side(side: str) -> None:
    """Refuse a side that is neither "test" nor "validation"."""
    if side not in ("test", "validation"):
        raise DataError(f'A run is measured on its "test" or "validation" side, not on {side!r}.')


def items_of(run: Run, side: str) -> tuple[Items, Items | None]:
    """Return the queries of a run's side, and its gallery or, if that is the queries, `None`."""
    run.require_data()
    splits = run.splits
    if side == "test":
        query = splits.query
        gallery = splits.gallery
    else:
        query, gallery = splits.validation_sides
    if not len(query):
        raise DataError(f"{run.path} has no {side} items, because its [split] leaves none.")
    return query, gallery


def raw_name(run: Run) -> str:
    """Return the name of the contestant that compares the raw inputs."""
    if run.dataset.kind == "features":
        return "raw vectors"
    return "raw pixels"


def device_of(run: Run) -> torch.device:
    """Return where to encode a run's items: a CUDA device, unless its recipe asks for the CPU."""
    cuda = torch.cuda.is_available() and run.recipe.train.device != "cpu"
    return torch.device("cuda" if cuda else "cpu")


@dataclass(frozen=True)
class DividedItems:
    """A recipe's data before there is a model: all items, and which of them are on which side."""

    recipe: Recipe
    dataset: Dataset
    splits: Splits


def refuse_unanswerable(run: Run | DividedItems) -> None:
    """Refuse a run before training if no query of a side has a right answer.

    The means over the queries of such a side would be NaN.

    Raises:
        DataError: the validation side or the test side cannot be measured.
    """
    splits = run.splits
    if run.recipe.text is not None:
        # images are found by their texts, whatever their classes
        of_item = ItemTexts(run.dataset, run.recipe.text)
        for side, items in (("test", splits.query), ("validation", splits.validation)):
            if len(items) and not len(of_item.numbers(items)):
                raise DataError(
                    f"[text] column: no item of the {side} side has a text in"
                    f" '{run.recipe.text.column}', so nothing can be measured there."
                )
        return
    test = Protocol(run, splits.query, splits.gallery)
    # each random gallery may leave other queries, so each is checked
    rounds = test.rounds(splits.query, splits.gallery)
    sides = [("test", query, gallery) for query, gallery, _, _ in rounds]
    if len(splits.validation):
        sides.append(("validation", *splits.validation_sides))
    for side, query, gallery in sides:
        # nothing is searched, so the items' own numbers stand in for their codes
        search, query_class, item_class, arguments = test.search(query, gallery, query, gallery)
        if not is_answerable(search, query_class, item_class, arguments.get("relevance")):
            raise DataError(unanswerable(run, side))
        if side == "test" and run.recipe.evaluate.open_set:
            refuse_one_kind(relevant_items(search, query_class, item_class) > 0)


def unanswerable(run: Run | DividedItems, side: str) -> str:
    """Return why no metric of a side can be measured, and what to do."""
    excluded = ""
    advice = ""
    if column := run.recipe.evaluate.exclude:
        excluded = f", as [evaluate] exclude = {column!r} hides the others"
    if side == "validation":
        advice = ", or train without a validation side"
    return (
        f"No item of the {side} side has another of its class to find{excluded}, so nothing can be"
        f" measured there. Choose a [split] that gives this side two items of a class{advice}."
    )


@dataclass(frozen=True)
class Protocol:
    """The queries and the gallery of an evaluation, measured as a run's `[evaluate]` says.

    Attributes:
        run: the run, or its data.
        query: (Q,), the items that are queries.
        gallery: (N,), the items to search; `None` means the queries or, with `gallery_items`,
            random queries.
    """

    run: Run | DividedItems
    query: Items
    gallery: Items | None

    def refuse_bundle(self) -> None:
        """Refuse to measure a bundle if a key of `UNSERVED_KEYS` is set."""
        table = self.run.recipe.evaluate
        if keys := [key for key in UNSERVED_KEYS if getattr(table, key) not in (None, [])]:
            raise DataError(
                f"[evaluate] {', '.join(keys)}: a bundle cannot be measured under this protocol."
                " Leave out the bundle, or remove this from the recipe."
            )

    def encoded(self, encode: Callable[[Items], Any]) -> tuple[Any, Any]:
        """Return the codes of the queries and of the gallery; `None` without a gallery."""
        if self.gallery is None:
            return encode(self.query), None
        return encode(self.query), encode(self.gallery)

    def measure(self, query: Any, gallery: Any, distance: Any = None, **further: Any) -> Evaluation:
        """Return the metrics of the queries' and the gallery's codes.

        With random galleries, each metric is its mean over these, and the rest is of the first.
        `further` are arguments of `evaluate_search`.

        Raises:
            RecipeError: the data lack a column that `[evaluate]` names.
            DataError: a random gallery cannot be drawn.
        """
        rates = self.run.recipe.evaluate.open_set
        evaluations = []
        for sides in self.rounds(query, gallery):
            search, query_class, item_class, arguments = self.search(*sides, distance)
            evaluation = evaluate_search(search, query_class, item_class, **arguments, **further)
            if rates:
                evaluation.values.update(open_set(search, query_class, item_class, rates))
            evaluations.append(evaluation)
        first = evaluations[0]
        if len(evaluations) == 1:
            return first
        means = {}
        spread = {}
        for name in first.values:
            column = [evaluation.values[name] for evaluation in evaluations]
            means[name] = float(np.mean(column))
            spread[name] = float(np.std(column, ddof=1))
        return replace(first, values=means, spread=spread)

    def rounds(self, query: Any, gallery: Any) -> Iterator[tuple[Items, Items | None, Any, Any]]:
        """Yield queries, gallery, and the codes of both: once, or for each random gallery."""
        table = self.run.recipe.evaluate
        if table.gallery_items is None:
            yield self.query, self.gallery, query, gallery
            return
        if self.gallery is not None:
            raise DataError(
                "[evaluate] gallery_items: the data have their own gallery. Leave the key out."
            )
        labels = self.run.splits.labels[self.query]
        if np.bincount(labels).max() <= table.gallery_items:
            raise DataError(
                f"[evaluate] gallery_items = {table.gallery_items}: no class has more test items"
                " than that, so none would be a query."
            )
        for number in range(table.repetitions):
            # only the split's seed counts: all runs on a split are measured on the same galleries
            random = np.random.default_rng([self.run.recipe.split.seed % 2**64, number])
            order = random.permutation(len(labels))
            by_class = order[np.argsort(labels[order], kind="stable")]
            ordered = labels[by_class]
            number_in_class = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
            chosen = np.sort(by_class[number_in_class < table.gallery_items])
            rest = np.setdiff1d(np.arange(len(labels)), chosen)
            yield self.query[rest], self.query[chosen], query[rest], query[chosen]

    def write_rankings(self, path: Path, query: Any, gallery: Any, distance: Any) -> None:
        """Write the first 1,000 hits of each query as a TREC run, and what is relevant as qrels.

        Both name items by their keys. The qrels have one line for each query and relevant item.
        With random galleries, both files are of the first.

        Raises:
            DataError: a file cannot be written.
        """
        queries, searched, *codes = next(self.rounds(query, gallery))
        search, query_class, item_class, arguments = self.search(
            queries, searched, *codes, distance
        )
        relevance = arguments.get("relevance") or Levels(
            [query_class.tolist()], [item_class.tolist()]
        )
        keys = self.run.dataset.keys
        names = [keys[item] for item in (queries if searched is None else searched)]
        hits, _ = search.nearest(min(_RANKED, len(names)))
        with (
            whole_file(path, DataError) as new_run,
            whole_file(path.with_suffix(".qrels"), DataError) as new_qrels,
            new_run.open("w", encoding="utf-8", errors="backslashreplace") as run,
            new_qrels.open("w", encoding="utf-8", errors="backslashreplace") as qrels,
        ):
            # Query by query: where classes are large, there are far more relevant pairs than items.
            for number, item in enumerate(queries):
                key = keys[item]
                run.write(run_text({key: [names[row] for row in hits[number] if row >= 0]}))
                (grades,) = visible_grades(search, relevance, np.array([number]))
                relevant = np.flatnonzero(grades > 0)
                qrels.write(qrels_text({key: {names[row]: float(grades[row]) for row in relevant}}))

    def search(
        self, query: Items, gallery: Items | None, left: Any, right: Any, *further: Any
    ) -> tuple[NeighborSearch, Items, Items, dict[str, Any]]:
        """Return the search for items, the class numbers of both sides, and arguments.

        The arguments are those of `evaluate_search` that `[evaluate]` sets. `left` and `right` are
        the codes of the queries and of the gallery, `further` are arguments of `NeighborSearch`.
        """
        labels = self.run.splits.labels
        query_class = labels[query]
        if gallery is None:
            item_class = query_class
        else:
            item_class = labels[gallery]
        arguments = self.arguments(query, gallery)
        exclude = arguments.pop("exclude", None)
        hidden = hidden_items(exclude, arguments.get("relevance"), query_class, item_class)
        search = NeighborSearch(left, right, hidden, *further)
        return search, query_class, item_class, arguments

    def arguments(self, query: Items, gallery: Items | None) -> dict[str, Any]:
        """Return the arguments of `evaluate` that `[evaluate]` sets for these items."""
        table = self.run.recipe.evaluate
        check_columns(table, self.run.dataset)
        metadata = self.run.dataset.metadata or []
        sides = [items for items in (query, gallery) if items is not None]
        arguments: dict[str, Any] = {}

        def columns(name: str) -> Any:
            return [[metadata[i].get(name) for i in items] for items in sides]

        if table.exclude is not None:
            same = table.exclude_label == "same"
            exclude = Exclusion(*columns(table.exclude))
            arguments["exclude"] = replace(exclude, same_label=same)
        if table.by is not None:
            arguments["by"] = columns(table.by)[0]
        relevant = self.listed(table.relevant, query)
        if any(relevant):
            searched = query if gallery is None else gallery
            keys = [self.run.dataset.keys[i] for i in searched]
            arguments["relevance"] = Judged(relevant, keys, self.listed(table.ignored, query))
        elif table.levels:
            # the label is the finest level, before those that the recipe names
            labels = [self.run.splits.labels[items].tolist() for items in sides]
            levels = zip(labels, *map(columns, table.levels), strict=True)
            arguments["relevance"] = Levels(*levels)
        elif table.tags is not None:
            tags = [[_tags(value) for value in column] for column in columns(table.tags)]
            arguments["relevance"] = Tags(*tags)
        return arguments

    def listed(self, columns: Sequence[str], query: Items) -> list[list[str]]:
        """Return for each query (Q,) the keys of items that metadata columns list."""
        rows = self.run.dataset.metadata or [{}] * len(self.run.dataset)
        return [[key for name in columns for key in _tags(rows[i].get(name))] for i in query]


def _tags(value: Any) -> list[str]:
    """Return the labels in a value: a list, text separated by ";", or `None`."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        parts = value
    else:
        parts = str(value).split(";")
    labels = [str(part).strip() for part in parts]
    return [label for label in labels if label]


def open_set(
    search: NeighborSearch,
    query_class: Ints,
    item_class: Ints,
    fars: Sequence[float],
) -> dict[str, float]:
    """Return the detection and identification rate (DIR) at rank 1 for each false alarm rate.

    A query is unknown if no visible gallery item has its class. A threshold t accepts a query whose
    nearest item is at distance t or nearer. FAR(t) is the share of unknown queries that are
    accepted. DIR(t) is the share of known queries that are accepted and whose nearest item has
    their class. DIR@FAR f is the largest DIR(t) over thresholds with FAR(t) ≤ f. Source: Phillips,
    Grother & Micheals, "Evaluation Methods in Face Recognition", Handbook of Face Recognition,
    2011.

    Raises:
        DataError: no query is unknown, or none is known.
    """
    rows, distances = search.first(np.arange(len(query_class)))
    known = relevant_items(search, query_class, item_class) > 0
    refuse_one_kind(known)
    right = known & (rows[:, 0] >= 0) & (item_class[rows[:, 0]] == query_class)
    unknown = np.sort(distances[~known, 0])
    identified = np.sort(distances[right, 0])
    # a query without visible items is never accepted
    thresholds = np.unique(distances[rows[:, 0] >= 0, 0])
    false_alarms = np.searchsorted(unknown, thresholds, side="right") / len(unknown)
    rates = np.searchsorted(identified, thresholds, side="right") / int(known.sum())
    metrics = {}
    for far in fars:
        allowed = rates[false_alarms <= far]
        # no threshold may keep the rate: then nothing is accepted, and nothing identified
        metrics[f"dir_at_far_{far:g}"] = float(allowed.max(initial=0.0))
    return metrics


def refuse_one_kind(known: Bools) -> None:
    """Refuse queries that are all known or all unknown, for which open-set rates mean nothing."""
    if known.all():
        problem = "unknown, because the class of each"
    elif not known.any():
        problem = "known, because the class of none"
    else:
        return
    raise DataError(
        f"[evaluate] open_set: no query is {problem} is in the gallery. Both kinds are needed."
    )


def _served(
    run: Run, path: StrPath, query: Ints, gallery: Ints | None, metrics: dict[str, Metric]
) -> tuple[dict[str, dict[str, float]], CandidateStep | None]:
    """Return a bundle's metrics, and how many of the nearest items are its rescorer's candidates.

    The metrics are by contestant; those of both directions need texts and a text encoder.

    Metrics of the whole ranking are left out, because a server returns only the first results.
    """
    from retrieval.bundle.bundle import Bundle

    bundle = Bundle.open(path)
    queries = encoded(bundle, run, query)
    query_class = run.splits.labels[query]
    if gallery is None:
        items = queries
        item_class = query_class
        exclude = np.arange(len(query))
    else:
        items = encoded(bundle, run, gallery)
        item_class = run.splits.labels[gallery]
        exclude = None
    # without a gallery, the query itself is no answer
    relevant = class_sizes(query_class, item_class) - (exclude is not None)
    metrics = {
        name: m for name, m in metrics.items() if isinstance(m.depth, int) and not is_pooled(m)
    }
    deepest = max((int(metric.depth) for metric in metrics.values()), default=1)
    size = len(item_class) - (exclude is not None)
    rows = served_rows(bundle, queries, items, min(deepest, size), exclude)
    matches = (item_class[rows] == query_class[:, None]) & (rows >= 0)
    answerable = relevant > 0
    values: dict[str, dict[str, float]] = {}
    if answerable.any():
        values["bundle"] = {
            name: float(metric(matches[answerable], relevant[answerable]).mean())
            for name, metric in metrics.items()
        }
    if run.recipe.text is not None and bundle.takes_text:
        texts = ItemTexts(run.dataset, run.recipe.text)
        searched, images = _once(query, gallery, queries["vector"], items["vector"])

        def encode(numbers: Ints) -> Any:
            return bundle.encode_text([texts.distinct[number] for number in numbers]).vector

        for side, arguments in text_sides(texts, searched, images, encode).items():
            values[f"bundle, {side}"] = evaluate_codes(**arguments, metrics=metrics).values
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
    from retrieval.bundle.distances import bundle_distances

    rescorer = bundle.manifest.rescorer
    vectors = items["vector"]
    size = len(vectors) - (exclude is not None)
    count = min(k if rescorer is None else rescorer.candidates, size)
    subspaces = bundle.manifest.subspaces
    proposed = nearest_in_each(queries["query"], vectors, count, subspaces, exclude)
    rows = np.full((len(queries["query"]), k), -1, dtype=np.int64)
    for i, query in enumerate(queries["query"]):
        # sub-spaces propose items of their own, of which an item may be proposed by several
        near = np.unique(proposed[:, i])
        code = None
        codes = None
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
    # imported here, as in `served_rows`: checking a recipe needs this module, but no bundle
    from retrieval.bundle.distances import columns_of_subspaces

    nearest = []
    for columns in columns_of_subspaces(subspaces):
        rows, _ = exact_neighbors(query[:, columns], vector[:, columns], k, exclude=exclude)
        nearest.append(rows)
    return np.stack(nearest)
