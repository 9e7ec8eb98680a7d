"""Pictures of a report, each inside the page: items as thumbnails, drawings as SVG."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from retrieval.errors import DataError
from retrieval.evaluation.plot import Picture
from retrieval.evaluation.report.measured import RECALLS, Measured
from retrieval.evaluation.verification import roc_curve
from retrieval.model.contracts import Dataset
from retrieval.serving.images import from_array, to_mode

SIDE = 64
"""Pixels of a thumbnail's longer side."""


class Thumbnails:
    """Thumbnails of a dataset's items, `most` at most; each is made once."""

    def __init__(self, dataset: Dataset, most: int) -> None:
        self.dataset, self.left = dataset, most
        self._thumbnails: dict[int, str] = {}

    def __call__(self, item: int) -> str:
        """Return an item as a data URI; empty for a vector, a damaged image, or one too many."""
        if item in self._thumbnails:
            return self._thumbnails[item]
        if self.dataset.kind != "image" or self.left <= 0:
            return ""
        self.left -= 1
        try:
            item_data = self.dataset[item]
            image = from_array(item_data) if isinstance(item_data, np.ndarray) else item_data
            image = to_mode(image, "L" if image.mode == "L" else "RGB").copy()
        except DataError:
            return ""
        image.thumbnail((SIDE, SIDE))
        out = io.BytesIO()
        kind = "png" if max(image.size) <= 32 else "jpeg"
        image.save(out, kind, **({} if kind == "png" else {"quality": 75}))
        self._thumbnails[item] = (
            f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"
        )
        return self._thumbnails[item]


def svg(figure: Any) -> bytes:
    """Return a matplotlib figure as SVG, the same bytes for the same figure."""
    import matplotlib as mpl

    out = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "retrieval", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def data_uri(picture: bytes) -> str:
    """Return an SVG or PNG as a data URI."""
    kind = "png" if picture.startswith(b"\x89PNG") else "svg+xml"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def recalls(runs: Mapping[str, Mapping[str, tuple[float, float, float]]]) -> bytes:
    """Draw Recall@K of runs by name, with intervals."""
    figure = Picture(5.6, 3.2)
    axis = figure.subplots()
    for place, (name, intervals) in enumerate(runs.items()):
        means = np.array([intervals[f"recall_at_{k}"] for k in RECALLS])
        around = np.maximum(np.abs(means[:, 1:] - means[:, :1]).T, 0)
        x = np.arange(len(RECALLS)) + 0.04 * place
        axis.errorbar(x, means[:, 0], around, marker="osD^v"[place % 5], capsize=3, label=name)
    axis.set_xticks(range(len(RECALLS)), [str(k) for k in RECALLS])
    axis.set(xlabel="K", ylabel="Recall@K")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="upper right")
    return svg(figure)


def distances(measured: Measured) -> bytes:
    """Draw how far apart pairs of one class and of two classes are: histograms, each of area 1."""
    figure = Picture(5.6, 3.0)
    axis = figure.subplots()
    pairs = measured.pairs
    bins = np.linspace(0.0, float(pairs.distance.max(initial=0.0)) or 1.0, 50).tolist()
    for which, name, hatch in ((pairs.same, "one class", ""), (~pairs.same, "two classes", "//")):
        if which.any():
            axis.hist(
                pairs.distance[which], bins, density=True, alpha=0.55, label=name, hatch=hatch
            )
    axis.set(xlabel="distance", ylabel="density of pairs")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="upper right")
    return svg(figure)


def rates(measured: Measured) -> bytes:
    """Draw FAR and FRR by threshold."""
    roc = roc_curve(measured.pairs.distance, measured.pairs.same)
    some = np.unique(np.linspace(1, len(roc.far) - 1, 400).round().astype(int))
    figure = Picture(5.6, 3.0)
    axis = figure.subplots()
    axis.plot(roc.threshold[some], roc.far[some], label="false accepts (FAR)")
    axis.plot(roc.threshold[some], 1 - roc.tar[some], "--", label="false rejects (FRR)")
    axis.set(xlabel="threshold of the distance", ylabel="rate", ylim=(-0.02, 1.02))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, loc="upper right")
    return svg(figure)


def places(measured: Measured, method: str) -> tuple[np.ndarray[Any, Any], str]:
    """Return where the sample's items lie on a map (S, 2), from 0 to 1, and what the map is."""
    pairs = measured.pairs
    if method == "tsne" and len(pairs.items) >= 5:
        from sklearn.manifold import TSNE

        perplexity = min(30.0, (len(pairs.items) - 1) / 3)
        tsne = TSNE(
            metric="precomputed", init="random", perplexity=perplexity, random_state=0, n_jobs=1
        )
        plane, name = tsne.fit_transform(pairs.matrix), "t-SNE by the learned distance"
    else:
        centred = pairs.codes.double().numpy() - pairs.codes.double().numpy().mean(0)
        u, s, _ = np.linalg.svd(centred, full_matrices=False)
        plane = np.zeros((len(centred), 2))
        plane[:, : min(2, len(s))] = (u * s)[:, :2]
        share = (s[:2] ** 2).sum() / ((s**2).sum() or 1.0)
        name = f"PCA of the codes, {100 * share:.0f} % of their variance"
    low, high = plane.min(0), plane.max(0)
    return (plane - low) / np.where(high > low, high - low, 1.0), name
