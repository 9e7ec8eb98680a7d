"""The page of a report: sections of a run as HTML, everything inside one file."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from retrieval.evaluation.report import pictures
from retrieval.evaluation.report.measured import Measured, confusions, hardest, suspects, thresholds
from retrieval.evaluation.report.pictures import Thumbnails, drawing
from retrieval.evaluation.verification import roc_curve

NAMES = {"map_at_r": "MAP@R", "r_precision": "R-precision"}
LEFT_OUT = ("by", "open_set", "rerank", "expand", "augment", "latency")
"""Keys of `[evaluate]` that a report does not read."""
SHEET = 6
"""Queries in each sheet."""


def text(value: object) -> str:
    """Return a value as text of the page."""
    return html.escape(str(value), quote=True)


def title(figure: str) -> str:
    """Return what a figure is called: `recall_at_1` is Recall@1."""
    return NAMES.get(figure, figure.replace("recall_at_", "Recall@").replace("ndcg_at_", "nDCG@"))


def table(name: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table that scrolls by itself where the page is narrow; the cells are text."""
    columns = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{text(row[0])}</th>'
        + "".join(f"<td>{text(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{text(name)}"><table><thead><tr>{columns}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def data(value: Any) -> str:
    """Return data for the page's script; nothing in it can end the element."""
    said = json.dumps(value, ensure_ascii=True).replace("<", "\\u003c")
    return f'<script type="application/json">{said}</script>'


def page(every: Sequence[Measured], names: Sequence[str], sections: Sequence[str]) -> str:
    """Return the whole page.

    Args:
        every: the runs, measured.
        names: what each is called.
        sections: each run's own part.
    """
    own = files(__package__)
    style, script = ((own / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    links = "".join(f'<li><a href="#run{i}">{text(name)}</a></li>' for i, name in enumerate(names))
    figures = list(dict.fromkeys(name for found in every for name in found.intervals))
    rows = [
        [name, *(_interval(found.intervals.get(figure)) for figure in figures)]
        for name, found in zip(names, every, strict=True)
    ]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Report: {text(', '.join(names))}</title><style>{style}</style></head><body>",
            f'<header><h1>Report</h1><nav aria-label="Runs"><ul>{links}</ul></nav></header><main>',
            '<section aria-label="Figures"><h2>Figures</h2>',
            table("Figures of all runs", ["run", *map(title, figures)], rows),
            '<p class="note">In brackets the 95 % interval of the bootstrap over classes: what other test classes of the same kind could give. '
            "It says nothing of other seeds; <code>retrieval compare</code> does.</p>",
            drawing(
                pictures.recalls(every, names),
                "Recall@K of each run with intervals; the table above has the figures",
            ),
            "</section>",
            *sections,
            f"</main><script>{script}</script></body></html>\n",
        ]
    )


def _interval(found: tuple[float, float, float] | None) -> str:
    return "" if found is None else f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"


def section(
    found: Measured,
    name: str,
    number: int,
    thumbnails: Thumbnails,
    method: str | None,
    panels: Mapping[str, bytes],
) -> str:
    """Return a run's part of the page.

    Args:
        found: the run, measured.
        name: what it is called.
        number: which run it is, from 0.
        thumbnails: gives pictures of its items.
        method: of the map: "tsne" or "pca"; None for no map.
        panels: further drawings by title.
    """
    asked = f"{len(found.query):,} queries" + (
        f" drawn from {found.asked:,}" if len(found.query) < found.asked else ""
    )
    parts = [
        f'<section id="run{number}" aria-label="{text(name)}"><h2>{text(name)}</h2>',
        f"<p>{text(found.run)}; {asked} among {found.gallery:,} items{_protocol(found)}.</p>",
        *_sheets(found, thumbnails),
        *_mistakes(found, thumbnails),
        *_distances(found),
    ]
    if method is not None:
        parts += _map(found, name, thumbnails, method)
    if panels:
        parts.append("<h3>How it was trained, and panels of plugins</h3>")
        parts += [f"<h4>{text(what)}</h4>{drawing(picture, what)}" for what, picture in panels.items()]
    return "\n".join([*parts, "</section>"])


def _protocol(found: Measured) -> str:
    """Return which items the queries do not see, and what else `[evaluate]` says, as the end of a sentence and further ones."""
    table = found.run.recipe.evaluate
    parts = [""]
    if table.exclude is not None:
        same = " of their own label" if table.exclude_label == "same" else ""
        parts[0] = f", without those{same} that share the query’s {text(table.exclude)}"
    if table.gallery_items is not None:
        few = f"{table.gallery_items:,} item{'s' if table.gallery_items > 1 else ''}"
        each = f"The figures are means over {found.rounds:,} of them; sheets and mistakes are of the first"
        parts.append(f"The gallery is {few} of each class, drawn at random. {each}")
    if table.levels:
        parts.append(
            f"nDCG grades an item by the finest it shares with the query: label, {text(', '.join(table.levels))}"
        )
    elif table.tags is not None:
        parts.append(f"Right is what shares one of the query’s {text(table.tags)}; nDCG goes by how many")
    if left := [key for key in LEFT_OUT if getattr(table, key) not in (None, [], False)]:
        said = f"Of [evaluate] this page leaves out {', '.join(left)}"
        parts.append(f"{said}: <code>retrieval evaluate</code> measures them")
    return ". ".join(parts)


def _item(found: Measured, item: int, thumbnails: Thumbnails, mark: str = "", note: str = "") -> str:
    """Return one item of a sheet: its picture, its label, and whether it is right, in words too."""
    picture = thumbnails(item)
    image = (
        f'<img alt="" src="{picture}">'
        if picture
        else f"<span>{text(found.run.dataset.keys[item])}</span><br>"
    )
    said = {"right": "✓ ", "wrong": "✗ "}.get(mark, "")
    return f'<li class="item {mark}" title="{text(found.run.dataset.keys[item])}">{image}{said}{text(found.name(item))}{note}</li>'


def _row(found: Measured, place: int, thumbnails: Thumbnails) -> str:
    """Return a query and what was found for it, nearest first."""
    query = int(found.query[place])
    cells = [_item(found, query, thumbnails, note="<br>query")]
    for item, apart, grade in zip(
        found.neighbours[place], found.distances[place], found.grades[place], strict=True
    ):
        if item >= 0:
            mark = "right" if grade >= found.match else "wrong"
            shared = f"<br>same {text(_level(found, grade))}" if 0 < grade < found.match else ""
            cells.append(_item(found, int(item), thumbnails, mark, f"{shared}<br>{apart:.3g}"))
    return f'<ul class="sheet">{"".join(cells)}</ul>'


def _level(found: Measured, grade: float) -> str:
    """Return the level of classes that two items of a grade share, as `genus`: the coarsest is of grade 1."""
    return found.run.recipe.evaluate.levels[-int(grade)]


def _sheets(found: Measured, thumbnails: Thumbnails) -> list[str]:
    score = found.figures.get("map_at_r", found.figures["recall_at_8"])
    order = np.lexsort((found.distances[:, 0], -score))
    random = np.random.default_rng(0).permutation(len(order))[:SHEET]
    parts = []
    for name, rows in (
        ("Best queries", order[:SHEET]),
        ("Worst queries", order[::-1][:SHEET]),
        ("Random queries", random),
    ):
        parts.append(f"<h3>{name}</h3>")
        parts += [_row(found, int(place), thumbnails) for place in rows]
    return parts


def _mistakes(found: Measured, thumbnails: Thumbnails) -> list[str]:
    tags = found.run.recipe.evaluate.levels == [] and found.run.recipe.evaluate.tags is not None
    parts = ["<h3>Classes taken for one another</h3>"]
    rows = [] if tags else confusions(found)
    if tags:
        parts.append("<p>Items have several labels, so none is taken for another: left out.</p>")
    elif rows:
        head = ["query's class", "nearest item's class", "how often", "queries of that class"]
        parts.append(table("Classes taken for one another", head, rows))
    else:
        parts.append("<p>The nearest item of every query has its label.</p>")
    close, far = hardest(found)
    for name, pairs in (("Closest pairs of two classes", close), ("Farthest pairs of one class", far)):
        parts.append(f"<h3>{name}</h3>")
        for one, other, apart in pairs:
            parts.append(
                f'<ul class="sheet">{_item(found, one, thumbnails)}{_item(found, other, thumbnails)}<li>{apart:.3g}</li></ul>'
            )
    if tags:
        return parts
    rows_of = suspects(found)
    parts.append("<h3>Labels that are likely wrong</h3>")
    if len(rows_of):
        parts.append("<p>All the nearest items of these agree on another label.</p>")
        parts += [_row(found, int(place), thumbnails) for place in rows_of]
    else:
        parts.append("<p>No item has only nearest items of one other label.</p>")
    return parts


def _distances(found: Measured) -> list[str]:
    pairs, points = found.pairs, thresholds(found.pairs)
    parts = ["<h3>Distances, and the threshold of “the same thing?”</h3>", '<div class="drawings">']
    parts.append(
        drawing(
            pictures.distances(found), "Histograms of the distances of pairs of one class and of two classes"
        )
    )
    if not points:
        return [*parts, "</div><p>The sample has pairs of one kind only, so no threshold can be chosen.</p>"]
    parts.append(drawing(pictures.rates(found), "False accept rate and false reject rate by threshold"))
    rows = [[name, f"{at:.4g}", f"{100 * far:.2f} %", f"{100 * frr:.2f} %"] for name, at, far, frr in points]
    parts += ["</div>", table("Thresholds", ["operating point", "threshold", "FAR", "FRR"], rows)]
    roc = roc_curve(pairs.distance, pairs.same)
    some = np.unique(np.linspace(1, len(roc.far) - 1, 200).round().astype(int))
    curve = {
        "threshold": roc.threshold[some].round(6).tolist(),
        "far": roc.far[some].round(6).tolist(),
        "frr": (1 - roc.tar[some]).round(6).tolist(),
    }
    parts.append(
        f'<div class="threshold">{data(curve)}<label class="controls">Threshold <input type="range" min="0" max="{len(some) - 1}" '
        f'value="{len(some) // 2}"></label><output></output></div>'
    )
    parts.append(
        f'<p class="note">{len(pairs.distance):,} pairs of {len(pairs.items):,} test items. A threshold that is used elsewhere is better '
        "chosen on other items than those it is judged by: <code>retrieval evaluate --protocol verification</code> does so, in folds.</p>"
    )
    return parts


def _map(found: Measured, name: str, thumbnails: Thumbnails, method: str) -> list[str]:
    plane, what = pictures.places(found, method)
    items = found.pairs.items
    names = [found.name(int(item)) for item in items]
    classes = {label: i for i, label in enumerate(dict.fromkeys(names))}
    dots = "".join(
        f'<circle cx="{100 * x:.2f}" cy="{100 * y:.2f}" r=".8" fill="hsl({classes[label] * 137.5 % 360:.0f} 70% 42%)"/>'
        for (x, y), label in zip(plane, names, strict=True)
    )
    points = [
        [label, str(found.run.dataset.keys[int(item)])] for item, label in zip(items, names, strict=True)
    ]
    shown = data({"points": points, "thumbnails": [thumbnails(int(item)) for item in items]})
    return [
        f"<h3>Map</h3><p>{text(what)}; {len(items):,} test items of {len(classes):,} classes.</p>",
        f'<div class="embedding">{shown}<div class="controls"><label>Label <input type="search"></label>',
        '<button type="button" class="in">Zoom in</button><button type="button" class="out">Zoom out</button>',
        '<button type="button" class="whole">Whole map</button><span role="status"></span></div>',
        f'<svg class="map" viewBox="-2 -2 104 104" role="img" aria-label="Map of the test items of {text(name)}">{dots}</svg>',
        '<p class="shown" aria-live="polite"></p></div>',
    ]
