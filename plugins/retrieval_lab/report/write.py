"""`retrieval report`: write an HTML report of runs."""

from __future__ import annotations

import base64
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from retrieval.base.files import write_text
from retrieval.base.folder_kinds import StrPath
from retrieval.base.progress import Meter, Progress, shows_progress
from retrieval.data.datasets import Dataset
from retrieval.data.splits import natural
from retrieval.errors import DataError, PluginError, RetrievalError, listed, valid_text
from retrieval.evaluation.evaluation import metric_title
from retrieval.evaluation.plot import Picture, curves, plane, small_image, svg
from retrieval.evaluation.verification import roc_curve
from retrieval.host.factory import calling
from retrieval.recipe.read import to_toml
from retrieval.run.open import Run
from retrieval.run.resume import flat_recipe

from retrieval_lab.report.measured import (
    RECALLS,
    SHOWN,
    Measured,
    confusion_matrix,
    hardest,
    measure,
    suspects,
    thresholds,
)

MAX_RUNS = 10
THUMBNAILS = 800
LARGEST_PANEL = 4 << 20
METHODS = ("tsne", "pca", "none")


@shows_progress
def report(
    runs: StrPath | Run | Sequence[StrPath | Run],
    output: StrPath = "report.html",
    *,
    sample: int = 600,
    map: str = "tsne",
    label_column: str | None = None,
    progress: Progress = True,
) -> Path:
    """Write a self-contained HTML report of the strengths and mistakes of runs.

    The file stays small: the map and the pairs show a sample of the items, and the page at most
    `THUMBNAILS` images.

    Args:
        runs: finished runs or their folders, 1 to `MAX_RUNS`.
        output: the file to write; an existing file is replaced.
        sample: number of test items that the map shows and that form pairs, 10 to 3,000.
        map: kind of map: "tsne", "pca" or "none".
        label_column: column of metadata with names of classes to show instead of labels.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).

    Returns:
        The path of the file.

    Raises:
        DataError: folders are not runs (the message lists them), a run has no test items, or the
            file cannot be written.
        RecipeError: `[evaluate]` names a column that the data lack.
        PluginError: a plugin's panels are not valid.
    """
    if isinstance(runs, str | os.PathLike | Run):
        runs = [runs]
    else:
        runs = list(runs)
    if not 1 <= len(runs) <= MAX_RUNS:
        raise DataError(f"A report takes 1 to {MAX_RUNS} runs, not {len(runs)}.")
    if not 10 <= sample <= 3000:
        raise DataError(f"sample must be from 10 to 3,000, not {sample:,}.")
    if map not in METHODS:
        raise DataError(f"map must be one of {', '.join(METHODS)}, not {map!r}.")
    target = Path(output)
    if target.is_dir():
        raise DataError(
            f"{target} is a folder, but a report is a file. Name a file such as"
            f" {target / 'report.html'}."
        )
    opened = _opened(runs)
    if map == "none":
        method = None
    else:
        method = map
    sections: list[Section] = []
    with Meter("reporting", len(opened), "runs") as meter:
        for run, name in zip(opened, _names([run.path for run in opened]), strict=True):
            thumbnails = Thumbnails(run.dataset, THUMBNAILS // len(opened))
            measured = measure(run, sample, label_column)
            sections.append(Section(name, measured, thumbnails, method, panels(run)))
            meter.update()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, page(sections), DataError)
    return target


def _opened(runs: Sequence[StrPath | Run]) -> list[Run]:
    """Open runs, and raise one error for all that cannot be opened."""
    opened = []
    problems = []
    for run in runs:
        try:
            opened.append(run if isinstance(run, Run) else Run.open(run))
        except RetrievalError as error:
            problems.append(str(error))
    if problems:
        raise DataError(listed("The report", problems) if len(problems) > 1 else problems[0])
    return opened


def _names(runs: Sequence[StrPath]) -> list[str]:
    """Return each folder's name, or its whole path if another folder has the same name."""
    names = [valid_text(Path(run).resolve().name) for run in runs]
    pairs = zip(runs, names, strict=True)
    return [str(run) if names.count(name) > 1 else name for run, name in pairs]


def panels(run: Run) -> dict[str, bytes]:
    """Return drawings by title: a run's training curves, and the panels that plugins add."""
    drawings: dict[str, bytes] = {}
    if run.recipe.learner is None and run.metrics_file.is_file():
        drawings["Curves of training"] = svg(curves(run))
    with calling("A plugin's retrieval_report_panels"):
        answers = run.plugins.hook.retrieval_report_panels(run=run)
    for answer in answers:
        if not isinstance(answer, Mapping):
            raise PluginError(
                f"A plugin's retrieval_report_panels returned {type(answer).__name__}, not a"
                " mapping from titles to drawings."
            )
        for name, picture in answer.items():
            starts = (b"<svg", b"<?xml", b"\x89PNG")
            is_drawing = isinstance(picture, bytes) and picture.startswith(starts)
            if not is_drawing or len(picture) > LARGEST_PANEL:
                raise PluginError(
                    f"A plugin's panel '{name}' must be the bytes of an SVG or PNG of at most"
                    f" {LARGEST_PANEL >> 20} MB."
                )
            drawings[str(name)] = picture
    return drawings


LEFT_OUT = ("by", "open_set")
"""Keys of `[evaluate]` that a report ignores."""
SHEET = 6  # queries in each sheet
NEAR = 5  # an item's neighbours that the map shows
LEGEND = 24  # most classes in the map's legend


@dataclass(frozen=True)
class Section:
    """The section of the page about one run; `map` is the kind, "tsne" or "pca", or `None`."""

    name: str
    measured: Measured
    thumbnails: Thumbnails
    map: str | None
    panels: Mapping[str, bytes]

    @property
    def left_out(self) -> list[str]:
        """The keys of `[evaluate]` that are set and that the report ignores."""
        settings = self.measured.run.recipe.evaluate
        return [key for key in LEFT_OUT if getattr(settings, key) not in (None, [], False)]

    @property
    def tagged(self) -> bool:
        """Whether items have several labels, `[evaluate] tags`."""
        settings = self.measured.run.recipe.evaluate
        return settings.levels == [] and settings.tags is not None

    def sheets(self) -> list[tuple[str, Any]]:
        """Return the sheets of queries as (title, positions of the queries)."""
        metrics = self.measured.metrics
        distances = self.measured.distances
        order = np.lexsort((distances[:, 0], -metrics["map_at_r"]))
        random = np.random.default_rng(0).permutation(len(order))[:SHEET]
        best = order[:SHEET]
        worst = order[::-1][:SHEET]
        return [("Best queries", best), ("Worst queries", worst), ("Random queries", random)]

    def hits(self, row: int) -> Iterator[tuple[int, str, list[str]]]:
        """Yield the items nearest to the query in a row: (item, "right" or "wrong", captions)."""
        measured = self.measured
        columns = (measured.neighbours[row], measured.distances[row], measured.grades[row])
        for item, distance, grade in zip(*columns, strict=True):
            if item >= 0:
                captions = [f"{distance:.3g}"]
                if 0 < grade < measured.match:  # the coarsest level has grade 1
                    level = measured.run.recipe.evaluate.levels[-int(grade)]
                    captions.insert(0, f"same {level}")
                yield item, "right" if grade >= measured.match else "wrong", captions

    @property
    def recipe(self) -> str:
        """The recipe as TOML, without default values."""
        return to_toml(self.measured.run.recipe)

    def points(self) -> dict[str, Any]:
        """Return the map's description, dots and legend, and the data for the page's script."""
        assert self.map is not None
        positions, what = places(self.measured, self.map)
        pairs = self.measured.pairs
        items = pairs.items.tolist()
        names = [self.measured.name(item) for item in items]
        classes = sorted(Counter(names).items(), key=lambda entry: natural(entry[0]))
        # multiples of the golden angle are far apart on the colour wheel, however many there are
        hues = {label: f"{number * 137.5 % 360:.0f}" for number, (label, _) in enumerate(classes)}
        dots = []
        for (x, y), label in zip(positions, names, strict=True):
            dots.append((f"{100 * x:.2f}", f"{100 * y:.2f}", hues[label]))
        matrix = pairs.matrix + np.diag(np.full(len(items), np.inf))
        nearest = np.argsort(matrix, axis=1, kind="stable")[:, : min(NEAR, len(items) - 1)]
        distances = np.take_along_axis(matrix, nearest, 1)
        keys = self.measured.run.dataset.keys
        data = {
            "points": [[label, keys[item]] for item, label in zip(items, names, strict=True)],
            "thumbnails": [self.thumbnails(item) for item in items],
            "near": nearest.tolist(),
            "apart": [[float(f"{distance:.3g}") for distance in row] for row in distances],
        }
        legend = [(label, hues[label], count) for label, count in classes]
        return {"what": what, "dots": dots, "legend": legend, "data": data}


def page(sections: Sequence[Section]) -> str:
    """Return the page as HTML."""
    folder = files(__package__)
    template, style, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    # labels, keys and recipes are other people's text, so all of it is escaped
    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    environment.filters["data_uri"] = data_uri
    environment.filters["operating_point"] = _operating_point
    names = list(dict.fromkeys(name for section in sections for name in section.measured.intervals))
    rows: list[list[Any]] = []
    for section in sections:
        intervals = section.measured.intervals
        rows.append([section.name, *(_interval(intervals.get(name)) for name in names)])
    return environment.from_string(template).render(
        runs=sections,
        head=["run", *map(metric_title, names)],
        rows=rows,
        facts=facts([section.measured.run for section in sections]),
        compared=compared(sections),
        recalls=recalls({section.name: section.measured.intervals for section in sections}),
        hardest=hardest,
        distances=distances,
        confusion_matrix=confusion_matrix,
        rates=rates,
        suspects=suspects,
        thresholds=thresholds,
        zip=zip,
        most_in_legend=LEGEND,
        nearest=SHOWN,
        style=style,
        script=script,
    )


def facts(runs: Sequence[Run]) -> list[list[str]]:
    """Return table rows: seed, number of parameters, recipe keys that differ, and versions."""
    recipes = [flat_recipe(run.recipe) for run in runs]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe if key not in ("seed", "name"))
    differing = [key for key in keys if len({str(recipe.get(key)) for recipe in recipes}) > 1]
    return [
        ["seed", *(str(run.recipe.seed) for run in runs)],
        ["parameters", *(f"{sum(p.numel() for p in run.model.parameters()):,}" for run in runs)],
        *([key, *(str(recipe.get(key, "not set")) for recipe in recipes)] for key in differing),
        ["versions", *(", ".join(map(" ".join, versions(run).items())) for run in runs)],
    ]


def versions(run: Run) -> dict[str, str]:
    """Return the versions that a run was trained with; empty if `run.json` is damaged."""
    try:
        recorded = json.loads((run.path / "run.json").read_text(encoding="utf-8"))["versions"]
        return {str(name): str(version) for name, version in recorded.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def compared(sections: Sequence[Section]) -> list[list[tuple[Section, int]]] | None:
    """Return the queries on which the runs differ most, as (section, position of the query) by run.

    The result is `None` if the runs have different test items, or if there is only one run.
    """
    runs = [section.measured.run for section in sections]
    same = all(
        run.recipe.data == runs[0].recipe.data
        and np.array_equal(run.splits.query, runs[0].splits.query)
        for run in runs
    )
    if not same or len(runs) < 2:
        return None
    # an item may lie at another position in each run, or be no query there
    positions = []
    for section in sections:
        queries = section.measured.query.tolist()
        positions.append({item: position for position, item in enumerate(queries)})
    lines = []
    for item in positions[0]:
        if all(item in positions_of_run for positions_of_run in positions):
            pairs = zip(sections, positions, strict=True)
            lines.append([(section, rows[item]) for section, rows in pairs])

    def spread(line: list[tuple[Section, int]]) -> float:
        values = [section.measured.metrics["map_at_r"][position] for section, position in line]
        return float(np.ptp(values))

    return sorted(lines, key=spread, reverse=True)[:SHEET]


def _interval(interval: tuple[float, float, float] | None) -> list[str] | str:
    if interval is None:
        return ""
    return [f"{interval[0]:.3f}", f"{interval[1]:.3f}–{interval[2]:.3f}"]


def _operating_point(point: tuple[str, float, float, float]) -> list[str]:
    name, threshold, far, frr = point
    return [name, f"{threshold:.4g}", f"{100 * far:.2f} %", f"{100 * frr:.2f} %"]


SIDE = 96
"""Pixels of a thumbnail's longer side."""


class Thumbnails:
    """Makes up to `most` thumbnails of a dataset's items; `refused` are the items beyond that."""

    def __init__(self, dataset: Dataset, most: int) -> None:
        self.dataset = dataset
        self.left = most
        self.refused: set[int] = set()
        self._thumbnails: dict[int, str] = {}

    def __call__(self, item: int) -> str:
        """Return an item's data URI; "" for vectors, damaged images, and items beyond `most`."""
        if item in self._thumbnails:
            return self._thumbnails[item]
        if self.dataset.kind != "image":
            return ""
        if self.left <= 0:
            self.refused.add(item)
            return ""
        self.left -= 1
        self._thumbnails[item] = ""
        with suppress(DataError):
            image = small_image(self.dataset[item], SIDE)
            out = io.BytesIO()
            # a tiny image is smaller as PNG, and JPEG would blur its few pixels
            if max(image.size) <= 32:
                kind = "png"
            else:
                kind = "jpeg"
            image.save(out, kind, quality=75)
            self._thumbnails[item] = data_uri(out.getvalue(), kind)
        return self._thumbnails[item]


def data_uri(picture: bytes, kind: str | None = None) -> str:
    """Return a picture as a data URI; without a kind, it is a PNG or an SVG."""
    if kind is None:
        if picture.startswith(b"\x89PNG"):
            kind = "png"
        else:
            kind = "svg+xml"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def _axis(**labels: Any) -> Any:
    """Return the axes of a new picture."""
    axis = Picture(5.6, 3.0).subplots()
    axis.set(**labels)
    axis.spines[["top", "right"]].set_visible(False)
    return axis


def _drawn(axis: Any, corner: str) -> bytes:
    """Return a picture as SVG, with a legend in a corner."""
    axis.legend(frameon=False, fontsize=8, loc=corner)
    return svg(axis.figure)


def recalls(runs: Mapping[str, Mapping[str, tuple[float, float, float]]]) -> bytes:
    """Draw Recall@K of runs with intervals, from each run's `Measured.intervals` by its name."""
    axis = _axis(xlabel="K", ylabel="Recall@K")
    for number, (name, intervals) in enumerate(runs.items()):
        means = np.array([intervals[f"recall_at_{k}"] for k in RECALLS])
        around = np.abs(means[:, 1:] - means[:, :1]).T
        x = np.arange(len(RECALLS)) + 0.04 * number
        axis.errorbar(x, means[:, 0], around, marker="osD^v"[number % 5], capsize=3, label=name)
    axis.set_xticks(range(len(RECALLS)), [str(k) for k in RECALLS])
    return _drawn(axis, "lower right")


def distances(measured: Measured) -> bytes:
    """Draw histograms of the distances of matching and of other pairs, each with area 1."""
    distance = measured.pairs.distance
    same = measured.pairs.same
    bins = np.linspace(0.0, float(distance.max(initial=0.0)) or 1.0, 50).tolist()
    axis = _axis(xlabel="distance", ylabel="density of pairs")
    for mask, name, hatch in ((same, "one class", ""), (~same, "two classes", "//")):
        if mask.any():
            axis.hist(distance[mask], bins, density=True, alpha=0.55, label=name, hatch=hatch)
    return _drawn(axis, "upper right")


def rates(measured: Measured) -> bytes:
    """Draw false accept and false reject rates by threshold."""
    roc = roc_curve(measured.pairs.distance, measured.pairs.same)
    # 400 points are enough for a drawing; the first point of the curve is at −∞
    points = np.unique(np.linspace(1, len(roc.far) - 1, 400).round().astype(int))
    axis = _axis(xlabel="threshold of the distance", ylabel="rate", ylim=(-0.02, 1.02))
    axis.plot(roc.threshold[points], roc.far[points], label="false accepts (FAR)")
    axis.plot(roc.threshold[points], 1 - roc.tar[points], "--", label="false rejects (FRR)")
    return _drawn(axis, "upper right")


def places(measured: Measured, method: str) -> tuple[np.ndarray[Any, Any], str]:
    """Return the sample's positions (S, 2) on a map, from 0 to 1, and the map's description."""
    pairs = measured.pairs
    codes = pairs.codes.double().numpy()
    codes = np.pad(codes, ((0, 0), (0, max(0, 2 - codes.shape[1]))))
    method = method if len(codes) >= 5 else "pca"
    positions, name = plane(codes, method, distances=pairs.matrix)
    low = positions.min(0)
    high = positions.max(0)
    return (positions - low) / np.where(high > low, high - low, 1.0), name
