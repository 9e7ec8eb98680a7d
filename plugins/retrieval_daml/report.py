"""Report panels of an adversarial run: losses, weights of local metrics, shifts of samples."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from retrieval import Run

Epochs = list[dict[str, Any]]


def report_panels(run: Run) -> dict[str, bytes]:
    """Return the panels of an adversarial run as SVG, by title; other runs have none."""
    combiner = run.recipe.combiner
    if run.recipe.generator is None and not (combiner and combiner.name.startswith("daml.")):
        return {}
    epochs = read_log(run)
    panels: dict[str, Callable[[Any, Epochs], None]] = {}
    if epochs:
        panels["Losses of metric and generator (DAML)"] = draw_losses
    if any("load_1" in epoch for epoch in epochs):
        panels["Weights of the local metrics (DAML)"] = draw_weights
    if any("synthetic_shift" in epoch for epoch in epochs):
        panels["Shifts of the synthetic samples (DAML)"] = draw_shifts
    return {title: _svg(draw, epochs) for title, draw in panels.items()}


def read_log(run: Run) -> Epochs:
    """Return the log of a run, one entry per epoch; a line that a crash cut short ends the log."""
    epochs = []
    # A training process may be writing the log, or may have been killed.
    with contextlib.suppress(OSError, ValueError):
        for line in run.metrics_file.read_text(encoding="utf-8").splitlines():
            epochs.append(json.loads(line))
    return epochs


def draw_losses(figure: Any, epochs: Epochs) -> None:
    """Draw the metric's loss J_m and the generator's loss J_gen by epoch (Fig. 8 of the paper)."""
    x = [epoch["epoch"] for epoch in epochs]
    axes = figure.subplots()
    # If the combiner is trained, the logged loss includes its objective.
    metric = [epoch.get("loss", np.nan) - epoch.get("combiner_loss", 0.0) for epoch in epochs]
    axes.plot(x, metric, "o-", color="C0", label="J_m, the loss")
    axes.set(xlabel="epoch", ylabel="J_m")
    lines = [axes.lines[0]]
    if any("generator_loss" in epoch for epoch in epochs):
        right = axes.twinx()
        generator = [epoch.get("generator_loss", np.nan) for epoch in epochs]
        lines += right.plot(x, generator, "s--", color="C1", label="J_gen, the generator")
        right.set_ylabel("J_gen")
    _mark_phases(axes, epochs)
    # "best" is slow for much data, and warns.
    axes.legend(handles=lines, loc="upper right")


def draw_weights(figure: Any, epochs: Epochs) -> None:
    """Draw the weights γ of each local metric by epoch: mean, median and 10 to 90 % of pairs."""
    logged = [epoch for epoch in epochs if "load_1" in epoch]
    x = [epoch["epoch"] for epoch in logged]
    count = sum(name.startswith("load_") for name in logged[0])
    panels = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for k, axes in enumerate(panels, 1):
        low, middle, high = ([epoch[f"gamma_{k}_p{q}"] for epoch in logged] for q in (10, 50, 90))
        color = f"C{k - 1}"
        axes.fill_between(x, low, high, color=color, alpha=0.25, label="10 to 90 % of pairs")
        axes.plot(x, middle, ":", color=color, label="median")
        axes.plot(x, [epoch[f"load_{k}"] for epoch in logged], "o-", color=color, label="mean")
        axes.axhline(1 / count, color="grey", linewidth=0.8)
        axes.set(title=f"metric {k}", xlabel="epoch", ylim=(0, 1))
        _mark_phases(axes, logged)
    panels[0].set_ylabel("weight γ")
    panels[0].legend(loc="upper right")


def draw_shifts(figure: Any, epochs: Epochs) -> None:
    """Draw the distance between synthetic and real samples by epoch."""
    logged = [epoch for epoch in epochs if "synthetic_shift" in epoch]
    axes = figure.subplots()
    axes.plot(
        [epoch["epoch"] for epoch in logged],
        [epoch["synthetic_shift"] for epoch in logged],
        "o-",
    )
    axes.set(xlabel="epoch", ylabel="mean feature distance, synthetic to real", ylim=(0, None))
    _mark_phases(axes, logged)


def _mark_phases(axes: Any, epochs: Epochs) -> None:
    """Draw a vertical line at the start of each training phase."""
    for earlier, later in itertools.pairwise(epochs):
        if earlier["phase"] != later["phase"]:
            axes.axvline(later["epoch"] + 0.5, color="grey", linestyle=":", linewidth=0.8)


def _svg(draw: Callable[[Any, Epochs], None], epochs: Epochs) -> bytes:
    """Return a panel as reproducible SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    file = io.BytesIO()
    # A fixed salt and no date: the same run gives the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "retrieval"}):
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        draw(figure, epochs)
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
