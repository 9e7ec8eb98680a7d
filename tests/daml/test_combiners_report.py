"""`retrieval daml-report`: what the panels show is what the run holds."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from matplotlib.figure import Figure
from retrieval.cli.app import app
from retrieval.errors import RetrievalError
from retrieval.recipe.read import check_recipe
from retrieval.run import checkpoint
from retrieval.run.open import load_run
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
def adversarial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("adversarial"))


def test_the_command_writes_every_panel(adversarial: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["daml-report", str(adversarial), "--output", str(tmp_path / "panels")]
    )
    assert done.exit_code == 0, done.output
    names = ["losses", "gamma", "synthetic", "map"]
    assert done.output.split() == [str(tmp_path / "panels" / f"{name}.svg") for name in names]
    for name in names:
        tree = ElementTree.parse(tmp_path / "panels" / f"{name}.svg")
        assert tree.getroot().tag.endswith("svg")
    assert sorted(path.name for path in (tmp_path / "panels").iterdir()) == sorted(
        f"{name}.svg" for name in names
    )
    kept = {path.name: path.read_bytes() for path in (tmp_path / "panels").iterdir()}
    report.write_report(adversarial, tmp_path / "again")
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == kept


def test_the_panels_are_the_files_and_only_of_such_a_run(adversarial: Path, tmp_path: Path) -> None:
    from retrieval.evaluation.report.write import panels

    found = panels(load_run(adversarial))
    assert list(found) == ["Curves of training", *report.TITLES.values()]
    report.write_report(adversarial, tmp_path / "panels")
    for name, title in report.TITLES.items():
        assert (tmp_path / "panels" / f"{name}.svg").read_bytes() == found[title]
    plain = make(
        tmp_path,
        combiner=None,
        generator=None,
        loss={"name": "pml.contrastive"},
        phase=[{"epochs": 1}],
    )
    assert list(panels(load_run(plain))) == ["Curves of training"]


def test_the_curves_are_the_logs_figures(adversarial: Path) -> None:
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
    report.draw_gamma(figure, epochs)
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


def test_the_samples_are_the_runs_own(adversarial: Path) -> None:
    run = load_run(adversarial)
    random = torch.get_rng_state()
    samples = report.look(run)
    assert torch.equal(torch.get_rng_state(), random)
    assert len(np.unique(samples.labels)) == 5 and samples.codes.shape == (100, 12 + 16)
    assert np.isin(samples.labels, run.splits.labels[run.splits.train]).all()
    assert samples.made is not None and samples.made_labels is not None
    assert samples.made.shape == (150, 28) and samples.made_labels.shape == (150,)
    # the generator of the last checkpoint, not a new one: the real samples' distances are those of
    # the metric's own codes
    state = checkpoint.load(run.last)
    assert state["modules"]["generator"]
    assert samples.real is not None and samples.synthetic is not None
    assert samples.real.shape == samples.synthetic.shape == (100 * 19,)
    assert np.abs(samples.real - samples.synthetic).max() > 1e-6
    combiner = run.model.combiner
    assert combiner is not None
    with torch.no_grad():
        distances = combiner.compute_mat(samples.codes, samples.codes).numpy()
    other = samples.labels[:, None] != samples.labels[None]
    assert (
        distances[other].min() - 1e-4 <= samples.real.min()
        and samples.real.max() <= distances[other].max() + 1e-4
    )


def test_synthetic_samples_are_drawn_beside_the_real_ones_they_replace(adversarial: Path) -> None:
    run, epochs = load_run(adversarial), report.read_log(load_run(adversarial))
    samples = report.look(run)
    assert samples.made is not None and samples.made_labels is not None
    assert samples.real is not None and samples.synthetic is not None
    # after a few steps they are still next to the negatives that they were made of, whose label
    # they bear
    with torch.no_grad():
        nearest = run.model.distances(samples.made, samples.codes).argmin(1).numpy()
    assert (samples.labels[nearest] == samples.made_labels).mean() > 0.9
    figure = Figure()
    report.draw_synthetic(figure, epochs, samples)
    left, right = figure.axes
    heights = [patch.get_height() for patch in left.patches]
    bins = np.linspace(0, max(samples.real.max(), samples.synthetic.max()), 40)
    for drawn, values in ((heights[:39], samples.real), (heights[39:], samples.synthetic)):
        assert drawn == np.histogram(values, bins)[0].tolist()
    assert list(right.lines[0].get_xdata()) == [2, 3]
    assert list(right.lines[0].get_ydata()) == [epoch["synthetic_shift"] for epoch in epochs[1:]]
    figure = Figure()
    report.draw_map(figure, run, samples)
    dots, crosses = figure.axes[0].collections[::2], figure.axes[0].collections[1::2]
    for drawn, labels in ((dots, samples.labels), (crosses, samples.made_labels)):
        assert [len(points.get_offsets()) for points in drawn] == np.unique(
            labels, return_counts=True
        )[1].tolist()
    # t-SNE keeps neighbours: of a synthetic sample and an item as of two items
    where = np.concatenate([points.get_offsets() for points in dots])
    own = np.repeat(np.arange(5), 20)
    hits = [
        own[np.square(where - point).sum(1).argmin()] == number
        for number, points in enumerate(crosses)
        for point in points.get_offsets()
    ]
    assert np.mean(hits) > 0.7


def test_a_plain_run_has_fewer_panels_and_what_is_no_run_is_refused(tmp_path: Path) -> None:
    plain = make(tmp_path, combiner=None, generator=None, phase=[{"name": "train", "epochs": 1}])
    assert [path.name for path in report.write_report(plain)] == ["losses.svg", "map.svg"]
    assert (plain / "report" / "map.svg").is_file()
    done = CliRunner().invoke(app, ["daml-report", str(tmp_path / "nothing")])
    assert done.exit_code != 0 and "is neither a run" in str(done.exception)
    (plain / "metrics.jsonl").write_text("")
    done = CliRunner().invoke(app, ["daml-report", str(plain)])
    assert done.exit_code != 0 and "has no epoch yet" in str(done.exception)
    fitted = make(
        tmp_path,
        "fitted",
        combiner=None,
        generator=None,
        loss=None,
        phase=None,
        learner={"name": "core.pca"},
    )
    done = CliRunner().invoke(app, ["daml-report", str(fitted)])
    assert done.exit_code != 0 and "is a learner's run" in str(done.exception)


@pytest.mark.parametrize("combiner", [None, {"name": "daml.uniform", "metrics": 3}])
def test_one_epoch_whose_generator_made_nothing_is_drawn(tmp_path: Path, combiner: Any) -> None:
    """As after an interruption in the first phase of Algorithm 1."""
    phases = [{"name": "metric", "epochs": 1, "train": ["head"], "synthetic": False}]
    run = make(tmp_path, combiner=combiner, phase=phases)
    names = [path.name for path in report.write_report(run)]
    assert names == ["losses.svg", "synthetic.svg", "map.svg"]


def test_what_a_crash_cut_off_is_left_out(adversarial: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(adversarial, run)
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole[: len(whole) - 40])
    epochs = report.read_log(load_run(run))
    assert epochs == [json.loads(line) for line in whole.splitlines()[:2]]
    assert len(report.write_report(run, tmp_path / "panels")) == 4


def test_what_is_missing_or_wrong_is_said(adversarial: Path, tmp_path: Path) -> None:
    def refused(run: Path, *options: str) -> str:
        done = CliRunner().invoke(app, ["daml-report", str(run), *options])
        assert isinstance(done.exception, RetrievalError), done.output
        return str(done.exception)

    (tmp_path / "taken").write_text("")
    assert "losses.svg cannot be written" in refused(
        adversarial, "--output", str(tmp_path / "taken")
    )
    run = tmp_path / "run"
    shutil.copytree(adversarial, run)
    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(recipe.replace("digits.npz", "gone.npz"))
    assert "gone.npz does not exist" in refused(run)
    (run / "recipe.toml").write_text(
        recipe.replace("daml.hard_negative", "daml.disturbed_negative")
    )
    assert "holds another generator than the recipe" in refused(run)
    (run / "recipe.toml").write_text(recipe)
    (run / "checkpoints" / "last.safetensors").unlink()
    assert "There is no checkpoint" in refused(run)
