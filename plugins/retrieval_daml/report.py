"""Panels of a run as SVG: loss curves, weights of local metrics, synthetic beside real samples, a
map of both.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from retrieval import Run, load
from retrieval.data.loading import inputs
from retrieval.errors import DataError
from retrieval.host.files import whole_file
from retrieval.run import checkpoint
from retrieval.run.build import build_objective
from retrieval.run.weights import load_weights
from retrieval.training.synthetic import choose_triplets
from torch import Tensor

Floats = NDArray[np.float64]

CLASSES, ITEMS, SYNTHETIC = 10, 20, 150
"""Classes and items of each that are looked at, and synthetic samples on the map."""


@dataclass(frozen=True)
class Samples:
    """Training items of a run, and what its generator makes of them.

    Attributes:
        labels: (B,) class numbers of the items.
        codes: (B, C) their codes.
        real: (T,) distances of triplets' anchors to the real samples that the generator replaces;
            None without one.
        synthetic: (T,) the same of the synthetic samples.
        made: (S, C) codes of some synthetic samples.
        made_labels: (S,) the labels that they are given.
        replaces: "negative" or "positive".
    """

    labels: NDArray[np.int64]
    codes: Tensor
    real: Floats | None = None
    synthetic: Floats | None = None
    made: Tensor | None = None
    made_labels: NDArray[np.int64] | None = None
    replaces: str = "negative"


def write_report(path: Path, output: Path | None = None) -> list[Path]:
    """Draw what there is to draw of a run.

    Args:
        path: the run's folder.
        output: folder for the panels; by default `report` in the run's.

    Returns:
        The files: `losses.svg`; `gamma.svg` where a discriminator trained; `synthetic.svg` where a
            generator did; `map.svg`.

    Raises:
        DataError: the folder is not a run, its log has no epoch in its log yet, or the folder
            cannot be written.
    """
    run = _loaded(path)
    if run.recipe.learner is not None:
        raise DataError(
            f"{path} is a learner's run: it has no epochs, batches or synthetic samples to draw."
        )
    folder = run.path / "report" if output is None else output
    return [_write(folder / f"{name}.svg", draw) for name, draw in drawings(run).items()]


TITLES = {
    "losses": "Losses of metric and generator (DAML)",
    "gamma": "Weights of the local metrics (DAML)",
    "synthetic": "Synthetic samples beside real ones (DAML)",
    "map": "Map of training items and synthetic samples (DAML)",
}
"""What the panels are called in a report."""


def report_panels(path: Path) -> dict[str, bytes]:
    """Return the panels of a run with a generator or with this plugin's local metrics as SVG, by
    title; none of any other run.
    """
    run = _loaded(path)
    combiner = run.recipe.combiner
    if run.recipe.generator is None and not (combiner and combiner.name.startswith("daml.")):
        return {}
    found = {}
    for name, draw in drawings(run).items():
        out = io.BytesIO()
        with _figure() as figure:
            draw(figure)
            figure.savefig(out, format="svg", metadata={"Date": None})
        found[TITLES[name]] = out.getvalue()
    return found


def _loaded(path: Path) -> Run:
    run = load(path)
    if not isinstance(run, Run):
        raise DataError(f"{path} is not a run. Name a folder that training wrote.")
    return run


def drawings(run: Run) -> dict[str, Callable[[Any], None]]:
    """Return what draws each panel there is of a run, by name."""
    epochs = read_log(run)
    samples = look(run)
    panels: dict[str, Callable[[Any], None]] = {
        "losses": lambda figure: draw_losses(figure, epochs)
    }
    if any("load_1" in epoch for epoch in epochs):
        panels["gamma"] = lambda figure: draw_gamma(figure, epochs)
    if samples.real is not None:
        panels["synthetic"] = lambda figure: draw_synthetic(figure, epochs, samples)
    panels["map"] = lambda figure: draw_map(figure, run, samples)
    return panels


def read_log(run: Run) -> list[dict[str, Any]]:
    """Return a run's log, an epoch each; of one that a crash cut off, what is whole.

    Raises:
        DataError: there is none.
    """
    epochs = []
    with contextlib.suppress(OSError, ValueError):
        for line in run.metrics_file.read_text(encoding="utf-8").splitlines():
            epochs.append(json.loads(line))
    if not epochs:
        raise DataError(
            f"{run.metrics_file} has no epoch yet: there is nothing to draw. Train on, with"
            " --resume where the run was stopped."
        )
    return epochs


def look(run: Run) -> Samples:
    """Return training items of a run and what its generator makes of them, with the last
    checkpoint's weights.
    """
    state = checkpoint.load(run.last)
    load_weights(run.model, state, run.last)
    splits = run.splits
    rows = np.concatenate(
        [
            splits.train[splits.train_labels == label][:ITEMS]
            for label in np.unique(splits.train_labels)[:CLASSES]
        ]
    )
    labels = splits.labels[rows]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        generator = build_objective(run.recipe, run.model, len(splits.train_classes)).generator
        chunks = [
            run.model.features(chunk)
            for chunk in inputs(run.dataset, rows, run.model.preprocessing, 64)
        ]
        features = torch.cat(chunks).float()
        codes = run.model.head(features).float()
        if generator is None:
            return Samples(labels, codes)
        try:
            generator.load_state_dict(state["modules"].get("generator", {}))
        except RuntimeError as error:
            raise DataError(
                f"{run.last} holds another generator than the recipe beside it names, or the plugin"
                " was changed."
            ) from error
        generator.eval()
        number = torch.from_numpy(labels)
        a, p, n = choose_triplets(None, number)
        if not len(a):
            return Samples(labels, codes)
        made = generator(features[a], features[p], features[n])
        replaced = n if generator.replaces == "negative" else p
        distance = run.model.feature_distance
        real, synthetic = distance(features[a], features[replaced]), distance(features[a], made)
        some = torch.linspace(0, len(a) - 1, min(len(a), SYNTHETIC)).round().long()
        return Samples(
            labels,
            codes,
            real.double().numpy(),
            synthetic.double().numpy(),
            run.model.head(made[some]).float(),
            labels[replaced[some].numpy()],
            generator.replaces,
        )


# --- panels
# ----------------------------------------------------------------------------------------------


def draw_losses(figure: Any, epochs: list[dict[str, Any]]) -> None:
    """J_m and J_gen by epoch (the paper's Fig. 8), each on its own axis."""
    x = [epoch["epoch"] + 1 for epoch in epochs]
    axes = figure.subplots()
    # the log's loss holds the combiner's own objective, where that trains
    metric = [epoch.get("loss", np.nan) - epoch.get("combiner_loss", 0.0) for epoch in epochs]
    axes.plot(x, metric, "o-", color="C0", label="J_m, the loss")
    axes.set(xlabel="epoch", ylabel="J_m")
    lines = [axes.lines[0]]
    if any("generator_loss" in epoch for epoch in epochs):
        right = axes.twinx()
        generator = [epoch.get("generator_loss", np.nan) for epoch in epochs]
        lines += right.plot(x, generator, "s--", color="C1", label="J_gen, the generator")
        right.set_ylabel("J_gen")
    _phases(axes, epochs)
    axes.legend(handles=lines, loc="upper right")  # "best" takes long with much data, and says so


def draw_gamma(figure: Any, epochs: list[dict[str, Any]]) -> None:
    """Γ of each local metric by epoch: its mean, and where four fifths of the pairs lie."""
    known = [epoch for epoch in epochs if "load_1" in epoch]
    x = [epoch["epoch"] + 1 for epoch in known]
    count = sum(name.startswith("load_") for name in known[0])
    panels = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for k, axes in enumerate(panels, 1):
        low, middle, high = ([epoch[f"gamma_{k}_p{q}"] for epoch in known] for q in (10, 50, 90))
        axes.fill_between(x, low, high, color=f"C{k - 1}", alpha=0.25, label="10 to 90 % of pairs")
        axes.plot(x, middle, ":", color=f"C{k - 1}", label="median")
        axes.plot(x, [epoch[f"load_{k}"] for epoch in known], "o-", color=f"C{k - 1}", label="mean")
        axes.axhline(1 / count, color="grey", linewidth=0.8)
        axes.set(title=f"metric {k}", xlabel="epoch", ylim=(0, 1))
        _phases(axes, known)
    panels[0].set_ylabel("weight γ")
    panels[0].legend(loc="upper right")


def draw_synthetic(figure: Any, epochs: list[dict[str, Any]], samples: Samples) -> None:
    """How far synthetic samples are from their anchors beside the real ones, and how far they were
    moved in each epoch.
    """
    assert samples.real is not None and samples.synthetic is not None
    left, right = figure.subplots(1, 2)
    bins = np.linspace(0, float(max(samples.real.max(), samples.synthetic.max())) or 1.0, 40)
    left.hist(samples.real, bins, alpha=0.6, label=f"real {samples.replaces}s")
    left.hist(samples.synthetic, bins, alpha=0.6, label="synthetic")
    left.set(xlabel="learned distance to the anchor", ylabel="triplets")
    left.legend(loc="upper right")
    known = [epoch for epoch in epochs if "synthetic_shift" in epoch]
    right.plot(
        [epoch["epoch"] + 1 for epoch in known], [epoch["synthetic_shift"] for epoch in known], "o-"
    )
    right.set(xlabel="epoch", ylabel="mean feature distance, synthetic to real", ylim=(0, None))


def draw_map(figure: Any, run: Run, samples: Samples) -> None:
    """A t-SNE map of items (dots) and synthetic samples (crosses) by the learned distance, coloured
    by label.
    """
    from sklearn.manifold import TSNE

    codes = samples.codes if samples.made is None else torch.cat([samples.codes, samples.made])
    with torch.no_grad():
        distances = run.model.distances(codes, codes).double().numpy()
    distances = np.maximum((distances + distances.T) / 2, 0.0)
    np.fill_diagonal(distances, 0.0)
    perplexity = min(30.0, max(1.0, (len(codes) - 1) / 3))
    tsne = TSNE(
        metric="precomputed", init="random", perplexity=perplexity, random_state=0, n_jobs=1
    )
    points = tsne.fit_transform(distances)
    axes = figure.subplots()
    items = points[: len(samples.labels)]
    names = np.unique(samples.labels)
    for place, label in enumerate(names):
        colour = f"C{place % 10}"
        axes.scatter(*items[samples.labels == label].T, s=14, color=colour)
        if samples.made_labels is not None:
            made = points[len(samples.labels) :][samples.made_labels == label]
            axes.scatter(*made.T, s=28, color=colour, marker="x")
    title = (
        "items"
        if samples.made is None
        else f"items (dots) and synthetic {samples.replaces}s (crosses), by label"
    )
    axes.set(title=title, xticks=[], yticks=[])


def _phases(axes: Any, epochs: list[dict[str, Any]]) -> None:
    """A line where a phase begins."""
    for before, after in itertools.pairwise(epochs):
        if before["phase"] != after["phase"]:
            axes.axvline(after["epoch"] + 0.5, color="grey", linestyle=":", linewidth=0.8)


def _write(path: Path, draw: Callable[[Any], None]) -> Path:
    """Write a panel, whole or not at all."""
    with _figure() as figure:
        draw(figure)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as temporary:
                figure.savefig(temporary, format="svg", metadata={"Date": None})
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path


@contextlib.contextmanager
def _figure() -> Iterator[Any]:
    """Give an empty figure; the same drawing is the same file."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "retrieval"}):
        yield Figure(figsize=(9, 4.5), layout="constrained")
