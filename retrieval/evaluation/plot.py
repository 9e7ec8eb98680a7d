"""Plots: the `neighbours` of queries, `curves` of training, and a `map` of codes.

Each function returns a matplotlib `Figure`. A notebook shows it, and `figure.savefig("file.png")`
saves it. No function needs a display or changes pyplot's state.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from numpy.typing import ArrayLike
from PIL import Image

from retrieval.errors import DataError, needing
from retrieval.images.decoding import decode
from retrieval.images.preprocessing import as_list, from_pixels, to_mode
from retrieval.model.labels import read_labels

if TYPE_CHECKING:
    from retrieval.images.preprocessing import ImageLike
    from retrieval.index.index import Index
    from retrieval.run.open import Run

__all__ = ["curves", "map", "neighbours"]

MAX_QUERIES = 50
LARGEST = 256  # pixels of a drawn image's longer side
NAMED = 10  # most classes in a legend


class Picture(Figure):
    """A `Figure` with its own canvas, so that notebooks show it without pyplot."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self)

    def draw(self, renderer: Any) -> None:
        """Draw all text as it is: `$` in a label begins no formula."""
        for text in self.findobj(Text):
            text.set_parse_math(False)
        super().draw(renderer)

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png")
        return out.getvalue()


def svg(figure: Figure) -> bytes:
    """Return a figure as SVG; equal figures give equal bytes."""
    import matplotlib as mpl

    out = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "retrieval", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def neighbours(
    index: Index, queries: Any, k: int = 10, *, labels: Sequence[str] | None = None
) -> Figure:
    """Draw queries, each with its nearest items in an index and their labels and distances.

    If the queries have labels, right results have a blue frame and ✓, and wrong results an orange
    frame and ✗.

    Args:
        index: an opened index of images.
        queries: an image, as `Encoder.encode` takes it, or up to 50 images.
        k: number of results, or all items if there are fewer.
        labels: each query's label; `None` marks no result as right or wrong.

    Raises:
        DataError: there is no query, or more than 50; a query is not an image; a label is missing;
            the index holds vectors, not images.
    """
    from retrieval.index.index import Index

    if not isinstance(index, Index):
        raise DataError(
            "Pass an opened index, then the queries:"
            " neighbours(retrieval.Index.open(path), queries)."
        )
    images = as_list(queries)
    if not images or len(images) > MAX_QUERIES:
        raise DataError(
            f"A picture of neighbours shows 1 to {MAX_QUERIES} queries, not {len(images)}."
        )
    if labels is not None and len(labels) != len(images):
        raise DataError(
            f"There are {len(labels)} labels for {len(images)} queries; give each query one."
        )
    names: list[str | None] = [None] * len(images)
    if labels is not None:
        names = [str(label) for label in read_labels(labels)]
    if index.bundle.manifest.input.preprocessing is None:
        raise DataError(f"{index.path} holds vectors, not images, so it cannot be drawn.")
    answers = index.search(list(images), k=k)
    columns = 1 + max(len(hits) for hits in answers)
    figure = Picture(columns + 0.6, 1.18 * len(images) + 0.5)
    grid = figure.subplots(len(images), columns, squeeze=False)
    for cells, query, hits, label in zip(grid, images, answers, names, strict=True):
        _query(cells[0], query, label)
        for cell, hit in zip(cells[1:], hits, strict=False):
            _answer(cell, hits.image(hit), hit.label, hit.distance, label, hit.id)
        for cell in cells[1 + len(hits) :]:
            cell.set_visible(False)
    marks = ""
    if labels is not None:
        marks = ": ✓ right, ✗ wrong"
    figure.suptitle(
        f"Queries with their {columns - 1} nearest{marks}, and the distance", fontsize=10
    )
    return figure


def validation_sheet(run: Run, queries: int = 6, k: int = 8) -> np.ndarray[Any, Any]:
    """Return pixels (H, W, 3) that show some validation items, each with its k nearest others."""
    from retrieval.evaluation.neighbors import NeighborSearch
    from retrieval.run.open import ItemCodes

    items = run.splits.validation
    combiner = run.model.combiner
    rows = np.unique(np.linspace(0, len(items) - 1, min(queries, len(items))).astype(np.int64))
    codes = ItemCodes(run, run.device)(items)
    search = NeighborSearch(
        codes, None, None, combiner and combiner.compute_mat, device=run.device.type
    )
    nearest, distances = search.nearest(min(k, len(items) - 1), rows)
    figure = Picture(nearest.shape[1] + 1.6, 1.18 * len(rows))
    grid = figure.subplots(len(rows), nearest.shape[1] + 1, squeeze=False)
    names = [run.splits.classes[int(run.splits.labels[item])] for item in items]
    for cells, row, hits, row_distances in zip(grid, rows, nearest, distances, strict=True):
        _query(cells[0], run.dataset[int(items[row])], names[row])
        for cell, hit, distance in zip(cells[1:], hits, row_distances, strict=True):
            _answer(cell, run.dataset[int(items[hit])], names[hit], distance, names[row])
    figure.canvas.draw()
    return np.array(figure.canvas.buffer_rgba())[..., :3]  # type: ignore[attr-defined]


def _query(cell: Axes, image: Any, label: str | None) -> None:
    title = "query"
    if label is not None:
        title = f"query: {label}"
    _cell(cell, small_image(image), title, "black", 1)


def _answer(
    cell: Axes, image: Any, name: str | None, distance: float, label: str | None, id: str = ""
) -> None:
    """Draw one result. It is right if its class `name` is the query's class `label`.

    Without `label`, no result is right or wrong. If the image cannot be read (`None`), the cell
    shows the name of its file, from `id`.
    """
    mark = ""
    colour = "0.4"
    if label is not None:
        mark, colour = (" ✓", "tab:blue") if name == label else (" ✗", "tab:orange")
    small = None
    if image is not None:
        small = small_image(image)
    title = f"{id if name is None else name}{mark} {distance:.2f}"
    _cell(cell, small, title, colour, 2.5)
    if small is None:
        cell.text(0.5, 0.5, f"cannot read\n{Path(id).name}", ha="center", va="center", fontsize=6)


def _cell(cell: Axes, image: Image.Image | None, title: str, colour: str, width: float) -> None:
    if image is not None:
        cell.imshow(np.asarray(image), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    cell.set(xticks=[], yticks=[])
    for side in cell.spines.values():
        side.set(color=colour, linewidth=width)
    cell.set_title(title if len(title) <= 18 else f"{title[:17]}…", fontsize=8, color=colour, pad=3)


def small_image(image: ImageLike, side: int = LARGEST) -> Image.Image:
    """Return an image in grey or RGB, scaled down if a side is longer than `side` pixels.

    Raises:
        DataError: the image cannot be read.
    """
    if isinstance(image, np.ndarray):
        opened = from_pixels(image)
    elif isinstance(image, Image.Image):
        opened = image
    else:
        opened = decode(image)
    small = to_mode(opened, "L" if opened.mode == "L" else "RGB").copy()
    small.thumbnail((side, side))
    return small


def curves(run: Run | str | os.PathLike[str]) -> Figure:
    """Draw a run's losses (above) and validation metrics (below) by epoch.

    A dotted line marks the epoch with the best validation, whose weights the run keeps. There is no
    line if the weights before training are the best.

    Args:
        run: a run, or its folder.

    Raises:
        DataError: `metrics.jsonl` is damaged or missing, as for a learner, which has no epochs.
    """
    records = _records(Path(run if isinstance(run, str | os.PathLike) else run.path))
    names = dict.fromkeys(key for record in records for key in record)  # unique, in order
    losses = [key for key in names if key == "loss" or key.endswith("_loss")]
    validated = [key for key in names if key.startswith("validation_")]
    figure = Picture(6.4, 4.8 if validated else 2.8)
    panels = figure.subplots(2 if validated else 1, sharex=True, squeeze=False)[:, 0]
    for panel, keys, name in zip(panels, (losses, validated), ("loss", "validation"), strict=False):
        for key in keys:
            epochs = []
            values = []
            for epoch, record in enumerate(records, 1):
                # not every epoch is validated
                if isinstance(record.get(key), int | float):
                    epochs.append(epoch)
                    values.append(record[key])
            label = key.removeprefix("validation_").replace("_", " ")
            if epochs:  # an empty line would be named in the legend
                panel.plot(epochs, values, marker=".", label=label)
        panel.set_ylabel(name)
        panel.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        panel.spines[["top", "right"]].set_visible(False)
    best = [epoch for epoch, r in enumerate(records, 1) if r.get("best")]
    if best:
        panels[1].axvline(best[-1], color="black", linestyle=":", linewidth=1)
    panels[-1].set_xlabel("epoch")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    return figure


def _records(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        losses = [record["loss"] for record in records]
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror or error}. Give the folder of a run that was"
            " trained in epochs."
        ) from None
    except (ValueError, LookupError, TypeError):
        losses = []
    if not losses or not all(isinstance(loss, int | float) for loss in losses):
        raise DataError(
            f"{file} must have a JSON object with a number 'loss' for each epoch, at least one."
            " Train again."
        )
    return records


def map(
    codes: ArrayLike,
    labels: Sequence[Any] | ArrayLike,
    *,
    method: Literal["pca", "tsne", "umap"] = "pca",
    seed: int = 0,
) -> Figure:
    """Draw codes as points of a plane, coloured by class.

    Args:
        codes: (N, C), embeddings, codes or features, with N and C at least 2.
        labels: (N,), numbers or text. A legend names up to ten classes.
        method: "pca" keeps the two directions of largest variance (scikit-learn's `PCA`). "tsne"
            preserves neighbourhoods, but neither distances nor sizes of clusters (van der Maaten &
            Hinton, JMLR 9, 2008; scikit-learn's `TSNE`, slow for more than ten thousand items).
            "umap" does too, faster (McInnes, Healy & Melville, arXiv 1802.03426, 2018), and needs
            the extra `umap`.
        seed: seed of t-SNE and UMAP. Equal seeds, codes and versions give equal figures.

    Raises:
        DataError: codes have another shape or are not finite, the number of labels differs from
            that of items, labels are missing or of two kinds, or the method is unknown.
        MissingDependency: umap-learn is not installed.
    """
    points = np.asarray(codes, dtype=np.float64)
    names = read_labels(labels)
    if points.ndim != 2 or min(points.shape) < 2:
        raise DataError(
            f"A map needs codes (N, C), with N and C at least 2, not of shape {points.shape}."
        )
    if not np.isfinite(points).all():
        raise DataError("The codes hold NaN or infinity, which have no place on a map.")
    if names.shape != points.shape[:1]:
        raise DataError(
            f"There are {len(points)} codes, but labels of shape {names.shape}: give each code one"
            " label."
        )
    positions, title = plane(points, method, seed)
    figure = Picture(6.4, 4.8)
    panel = figure.subplots()
    classes, numbers = np.unique(names, return_inverse=True)
    if len(classes) <= NAMED:
        for number, name in enumerate(classes):
            # matplotlib's legend leaves out a label that begins with "_".
            if str(name).startswith("_"):
                label = f" {name}"
            else:
                label = str(name)
            of_class = positions[numbers == number]
            panel.scatter(of_class[:, 0], of_class[:, 1], s=8, color=f"C{number}", label=label)
        panel.legend(
            frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), title="class"
        )
    else:
        panel.scatter(positions[:, 0], positions[:, 1], s=8, c=numbers, cmap="turbo")
    panel.set(
        title=f"{title}, {len(points):,} items of {len(classes):,} classes", xticks=[], yticks=[]
    )
    panel.set_aspect("equal", adjustable="datalim")
    return figure


def plane(
    points: np.ndarray[Any, Any],
    method: str,
    seed: int = 0,
    distances: np.ndarray[Any, Any] | None = None,
) -> tuple[np.ndarray[Any, Any], str]:
    """Return items' positions (N, 2) and a title; t-SNE uses `distances` (N, N) if they are set."""
    if method == "pca":
        from sklearn.decomposition import PCA

        pca = PCA(2, svd_solver="full")
        positions = pca.fit_transform(points)
        total = points.var(axis=0, ddof=1).sum()
        if total:
            share = pca.explained_variance_.sum() / total
        else:
            share = 1
        return positions, f"PCA: {100 * share:.0f} % of the variance"
    if method == "tsne":
        from sklearn.manifold import TSNE

        perplexity = min(30.0, (len(points) - 1) / 3)
        options = {"perplexity": perplexity, "init": "random", "random_state": seed, "n_jobs": 1}
        if distances is None:
            return TSNE(2, **options).fit_transform(points), "t-SNE"
        tsne = TSNE(2, metric="precomputed", **options)
        return tsne.fit_transform(distances), "t-SNE by the learned distance"
    if method == "umap":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # UMAP warns that it uses one thread if it has a seed
            with needing("A map by UMAP needs umap-learn", "umap"):
                from umap import UMAP
            near = min(15, len(points) - 1)
            umap = UMAP(n_neighbors=near, init="random", random_state=seed, n_jobs=1)
            return np.asarray(umap.fit_transform(points)), "UMAP"
    raise DataError(f"A map's method is 'pca', 'tsne' or 'umap', not {method!r}.")
