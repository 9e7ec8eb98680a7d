"""The panels of an adversarial run: what they show is what the log holds."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from retrieval.evaluation.report.write import panels
from retrieval.recipe.read import check_recipe
from retrieval.run.open import Run
from retrieval.training.trainer import train
from sklearn.datasets import load_digits

from retrieval_daml import report


def make(folder: Path, name: str = "run", **tables: Any) -> Path:
    digits = load_digits()
    np.savez(folder / "digits.npz", features=digits.data[:500] / 16.0, labels=digits.target[:500])
    base: dict[str, Any] = {
        "data": {"name": "core.features", "file": str(folder / "digits.npz")},
        "split": {"by": "class", "validation": 0.0},
        "sampler": {"classes": 4, "items": 4, "batches": 4},
        "backbone": {"name": "core.features"},
        "head": {"embedding_size": 12},
        "combiner": {"name": "daml.discriminator", "metrics": 3, "hidden": 8},
        "generator": {"name": "daml.hard_negative"},
        "loss": {"name": "daml.triplet"},
        "phase": [
            {"name": "metric", "epochs": 1, "train": ["head"], "synthetic": False},
            {"name": "all", "epochs": 2},
        ],
    }
    train(folder / name, check_recipe({k: v for k, v in (base | tables).items() if v is not None}))
    return folder / name


@pytest.fixture(scope="module")
def adversarial(tmp_path_factory):
    return make(tmp_path_factory.mktemp("adversarial"))


def test_the_report_has_every_panel_of_such_a_run_alone(adversarial, tmp_path):
    actual = panels(Run.open(adversarial))
    titles = [
        "Losses of metric and generator (DAML)",
        "Weights of the local metrics (DAML)",
        "Shifts of the synthetic samples (DAML)",
    ]
    assert list(actual) == ["Curves of training", *titles]
    for title in titles:
        assert ElementTree.fromstring(actual[title]).tag.endswith("svg")
    assert report.report_panels(Run.open(adversarial)) == {title: actual[title] for title in titles}
    plain = make(
        tmp_path,
        combiner=None,
        generator=None,
        loss={"name": "pml.contrastive"},
        phase=[{"epochs": 1}],
    )
    assert list(panels(Run.open(plain))) == ["Curves of training"]


def test_the_curves_are_the_logs_figures(adversarial):
    epochs = [json.loads(line) for line in (adversarial / "metrics.jsonl").read_text().splitlines()]
    figure = Figure()
    report.draw_losses(figure, epochs)
    left, right = figure.axes
    assert list(left.lines[0].get_xdata()) == [1, 2, 3]
    expected = [epoch["loss"] - epoch.get("combiner_loss", 0.0) for epoch in epochs]
    assert "combiner_loss" not in epochs[0] and "combiner_loss" in epochs[1]
    assert list(left.lines[0].get_ydata()) == pytest.approx(expected)
    shown = list(right.lines[0].get_ydata())
    assert np.isnan(shown[0]) and shown[1:] == [epoch["generator_loss"] for epoch in epochs[1:]]
    figure = Figure()
    report.draw_weights(figure, epochs)
    assert len(figure.axes) == 3
    for k, axes in enumerate(figure.axes, 1):
        assert list(axes.lines[1].get_ydata()) == [epoch[f"load_{k}"] for epoch in epochs]
        assert list(axes.lines[0].get_ydata()) == [epoch[f"gamma_{k}_p50"] for epoch in epochs]
        (band,) = axes.collections
        edges = {(float(x), float(y)) for x, y in band.get_paths()[0].vertices}
        for q in (10, 90):
            assert {
                (float(i), epoch[f"gamma_{k}_p{q}"]) for i, epoch in enumerate(epochs, 1)
            } <= edges


def test_the_shifts_are_the_logs_figures(adversarial):
    epochs, figure = report.read_log(Run.open(adversarial)), Figure()
    report.draw_shifts(figure, epochs)
    line = figure.axes[0].lines[0]
    assert list(line.get_xdata()) == [2, 3]
    assert list(line.get_ydata()) == [epoch["synthetic_shift"] for epoch in epochs[1:]]


def test_a_log_that_a_crash_cut_off_is_drawn(adversarial, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(adversarial, run)
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole[: len(whole) - 40])
    epochs = report.read_log(Run.open(run))
    assert epochs == [json.loads(line) for line in whole.splitlines()[:2]]
    assert len(report.report_panels(Run.open(run))) == 3
    (run / "metrics.jsonl").write_text("")
    assert report.report_panels(Run.open(run)) == {}
