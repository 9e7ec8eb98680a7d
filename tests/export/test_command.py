"""`retrieval export` on real runs: a network's and a learner's."""

from __future__ import annotations

import numpy as np
import pytest
from click.testing import CliRunner
from makers import read_manifest
from retrieval.bundle.bundle import Bundle
from retrieval.cli.app import app
from retrieval.export import export_run as runs
from retrieval.run.open import Run

NETWORK = """
data.name = "core.digits"
split.by = "class"
backbone = { name = "core.convnet", width = 4, depth = 2 }
head.embedding_size = 8
loss.name = "pml.contrastive"
sampler.classes = 5
train.epochs = 1
"""
LEARNER = """
data = { name = "core.features", file = "digits.npz" }
split.by = "class"
backbone.name = "core.features"
learner.name = "core.lda"
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("runs")
    data = load_digits()
    features, file = data.data.astype(np.float32), str(folder / "digits.npz")
    np.savez(file, features=features, labels=data.target.astype(str))
    for name, text in (("network", NETWORK), ("learner", LEARNER.replace("digits.npz", file))):
        (folder / f"{name}.toml").write_text(text)
        result = run("train", folder / f"{name}.toml", "--output", folder / name)
        assert result.exit_code == 0, result.output
    return folder


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("name", ["network", "learner"])
def test_a_run_becomes_a_bundle(trained, tmp_path, name):
    result = run("export", trained / name, "-o", tmp_path / "b", "--variant", "int8")
    assert result.exit_code == 0, result.output
    assert "held-out items (tolerance 0.0001)" in result.output and "int8: " in result.output
    bundle = Bundle.open(tmp_path / "b", threads=1)
    manifest = bundle.manifest
    assert manifest.name == name and manifest.verified.items > 400
    assert manifest.variants["int8"].recall_at_1.before > 0.3
    loaded = Run.open(trained / name)
    items = runs._load(loaded, loaded.splits.query[:20])
    assert np.isfinite(bundle.encode(items).vector).all()


def test_a_bundle_of_the_first_dimensions_of_an_embedding(trained, tmp_path):
    """Of unit length if the embedding is, and without the metrics of the whole embedding."""
    for name, width, unit in (("network", 8, True), ("learner", 4, False)):
        assert run("evaluate", trained / name).exit_code == 0
        bundles = []
        for more in ((), ("--dimensions", 3)):
            result = run("export", trained / name, "-o", tmp_path / f"{name}{len(more)}", *more)
            assert result.exit_code == 0, result.output
            bundles.append(Bundle.open(tmp_path / f"{name}{len(more)}", threads=1))
        whole, cut = bundles
        assert (whole.manifest.vector, cut.manifest.vector) == (width, 3)
        assert whole.manifest.evaluation and cut.manifest.evaluation is None
        loaded = Run.open(trained / name)
        items = runs._load(loaded, loaded.splits.query[:20])
        expected = whole.encode(items).vector[:, :3]
        if unit:
            expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        assert cut.manifest.normalized == unit
        np.testing.assert_allclose(cut.encode(items).vector, expected, atol=1e-5)
    for wrong in (0, 9):
        result = run("export", trained / "network", "-o", tmp_path / "none", "--dimensions", wrong)
        assert result.exit_code != 0 and not (tmp_path / "none").exists()
    assert "the run's embedding has 8. Choose 1 to 8" in str(result.exception)


def test_the_default_output_and_the_metrics_of_evaluate(trained):
    assert run("evaluate", trained / "learner").exit_code == 0
    result = run("export", trained / "learner")
    assert result.exit_code == 0, result.output
    manifest = read_manifest(trained / "learner" / "bundle")
    assert 0 < manifest.evaluation["recall_at_1"] <= 1
    again = run("export", trained / "learner")
    assert again.exit_code == 2 or "exists" in str(again.exception)
    assert again.stderr == ""  # nothing comes before an error


def test_int8_is_calibrated_on_training_items_and_measured_on_held_out_ones(
    trained, tmp_path, monkeypatch
):
    given = {}
    real = runs.export_model

    def noting(model, items, output, **options):
        given.update(items=items, **options)
        return real(model, items, output, **options)

    monkeypatch.setattr(runs, "export_model", noting)
    loaded = Run.open(trained / "network")
    runs.export(loaded, tmp_path / "b", variants=["int8"])
    splits = loaded.splits
    sides = {}
    for name, indices in (("train", splits.train), ("query", splits.query)):
        sides[name] = {image.tobytes() for image in runs._load(loaded, indices)}
    assert {image.tobytes() for image in given["calibration"]} <= sides["train"]
    assert {image.tobytes() for image in given["items"]} <= sides["query"]
    assert len(given["calibration"]) == 512 and 400 < len(given["items"]) <= 512
    assert set(np.unique(given["labels"])) == set(np.unique(splits.labels[splits.query]))
