"""What the page of a report shows of each run; `page.html` is its template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from retrieval.evaluation.evaluation import metric_title
from retrieval.evaluation.report import pictures
from retrieval.evaluation.report.measured import Measured, confusions, hardest, suspects, thresholds
from retrieval.evaluation.report.pictures import Thumbnails
from retrieval.evaluation.verification import roc_curve

LEFT_OUT = ("by", "open_set", "rerank", "expand", "augment", "latency")
"""Keys of `[evaluate]` that a report does not read."""
SHEET = 6
"""Queries in each sheet."""


@dataclass(frozen=True)
class Section:
    """A run's part of the page.

    Attributes:
        name: what the run is called.
        measured: the run, measured.
        thumbnails: pictures of its items.
        map: how the map is made: "tsne" or "pca"; None for no map.
        panels: further drawings by title.
    """

    name: str
    measured: Measured
    thumbnails: Thumbnails
    map: str | None
    panels: Mapping[str, bytes]

    @property
    def left_out(self) -> list[str]:
        """The keys of `[evaluate]` that are set and that the page does not show."""
        settings = self.measured.run.recipe.evaluate
        return [key for key in LEFT_OUT if getattr(settings, key) not in (None, [], False)]

    @property
    def tagged(self) -> bool:
        """Whether items have several labels."""
        settings = self.measured.run.recipe.evaluate
        return settings.levels == [] and settings.tags is not None

    def sheets(self) -> list[tuple[str, Any]]:
        """Return titles and places of queries to show."""
        figures, distances = self.measured.figures, self.measured.distances
        order = np.lexsort((distances[:, 0], -figures.get("map_at_r", figures["recall_at_8"])))
        random = np.random.default_rng(0).permutation(len(order))[:SHEET]
        best, worst = order[:SHEET], order[::-1][:SHEET]
        return [("Best queries", best), ("Worst queries", worst), ("Random queries", random)]

    def hits(self, place: int) -> Iterator[tuple[int, str, list[str]]]:
        """Yield the nearest items of a query: the item, "right" or "wrong", and what is said of it."""
        found = self.measured
        for item, distance, grade in zip(
            found.neighbours[place], found.distances[place], found.grades[place], strict=True
        ):
            if item >= 0:
                shared = []
                if 0 < grade < found.match:  # the coarsest level has grade 1
                    shared = [f"same {found.run.recipe.evaluate.levels[-int(grade)]}"]
                yield (
                    item,
                    "right" if grade >= found.match else "wrong",
                    [*shared, f"{distance:.3g}"],
                )

    def curve(self) -> dict[str, list[float]]:
        """Return 200 points of the rates by threshold, for the page's slider."""
        roc = roc_curve(self.measured.pairs.distance, self.measured.pairs.same)
        some = np.unique(np.linspace(1, len(roc.far) - 1, 200).round().astype(int))
        curve = {"threshold": roc.threshold, "far": roc.far, "frr": 1 - roc.tar}
        return {name: values[some].round(6).tolist() for name, values in curve.items()}

    def points(self) -> dict[str, Any]:
        """Return the map: what it is, its dots, how many classes they are of, and data for the
        page's script.
        """
        assert self.map is not None
        plane, what = pictures.places(self.measured, self.map)
        items = self.measured.pairs.items.tolist()
        names = [self.measured.name(item) for item in items]
        classes = {label: number for number, label in enumerate(dict.fromkeys(names))}
        dots = [
            (f"{100 * x:.2f}", f"{100 * y:.2f}", f"{classes[label] * 137.5 % 360:.0f}")
            for (x, y), label in zip(plane, names, strict=True)
        ]
        keys = self.measured.run.dataset.keys
        data = {
            "points": [[label, keys[item]] for item, label in zip(items, names, strict=True)],
            "thumbnails": [self.thumbnails(item) for item in items],
        }
        return {"what": what, "dots": dots, "classes": len(classes), "data": data}


def page(sections: Sequence[Section]) -> str:
    """Return the whole page."""
    folder = files(__package__)
    template, style, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    environment.filters["data_uri"] = pictures.data_uri
    environment.filters["operating_point"] = _operating_point
    environment.globals.update(
        confusions=confusions,
        hardest=hardest,
        pictures=pictures,
        suspects=suspects,
        thresholds=thresholds,
        zip=zip,
    )
    figures = list(
        dict.fromkeys(name for section in sections for name in section.measured.intervals)
    )
    rows = [
        [section.name, *(_interval(section.measured.intervals.get(figure)) for figure in figures)]
        for section in sections
    ]
    return environment.from_string(template).render(
        runs=sections,
        head=["run", *map(metric_title, figures)],
        rows=rows,
        recalls=pictures.recalls(
            {section.name: section.measured.intervals for section in sections}
        ),
        style=style,
        script=script,
    )


def _interval(interval: tuple[float, float, float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.3f} [{interval[1]:.3f}, {interval[2]:.3f}]"


def _operating_point(point: tuple[str, float, float, float]) -> list[str]:
    name, threshold, far, frr = point
    return [name, f"{threshold:.4g}", f"{100 * far:.2f} %", f"{100 * frr:.2f} %"]
