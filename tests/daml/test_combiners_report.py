"""The panels of an adversarial run show the numbers of its log."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from retrieval.run.open import Run
from trained_weights import fit, lines_of

from retrieval_daml import report
from retrieval_lab.report.write import panels

PHASES = [
    {"name": "metric", "epochs": 1, "train": ["head"], "synthetic": False},
    {"name": "all", "epochs": 2},
]


@pytest.fixture(scope="module")
def adversarial(make, tmp_path_factory):
    return fit(tmp_path_factory.mktemp("adversarial"), make(phase=PHASES))


def test_only_an_adversarial_run_has_the_panels(make, adversarial, tmp_path):
    actual = panels(Run.open(adversarial))
    titles = [
        "Losses of metric and generator (DAML)",
        "Weights of the local metrics (DAML)",
        "Shifts of the synthetic samples (DAML)",
    ]
    assert list(actual) == ["Curves of training", *titles]
    for title in titles:
        assert ElementTree.fromstring(actual[title]).tag.endswith("svg")
    plain = make(combiner=None, generator=None, train={"epochs": 1, "device": "cpu"})
    assert list(panels(Run.open(fit(tmp_path, plain)))) == ["Curves of training"]


def test_the_curves_show_the_log(adversarial):
    epochs, figure = lines_of(adversarial), Figure()
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
            assert {(i, epoch[f"gamma_{k}_p{q}"]) for i, epoch in enumerate(epochs, 1)} <= edges
    figure = Figure()
    report.draw_shifts(figure, epochs)
    line = figure.axes[0].lines[0]
    assert list(line.get_xdata()) == [2, 3]
    assert list(line.get_ydata()) == [epoch["synthetic_shift"] for epoch in epochs[1:]]


def test_a_log_that_a_crash_cut_off_is_drawn(adversarial, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(adversarial, run)
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole[:-40])
    assert report.read_log(Run.open(run)) == lines_of(adversarial)[:2]
    assert len(report.report_panels(Run.open(run))) == 3
    (run / "metrics.jsonl").write_text("")
    assert report.report_panels(Run.open(run)) == {}
