"""A run is evaluated from any working folder, and exported once its data are gone."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
from PIL import Image
from retrieval.errors import BundleError, DataError
from retrieval.serving.bundle import Bundle
from sklearn.datasets import load_digits
from trained_weights import retrieval as command

RECIPE = """
name = "elsewhere"
plugins = ["mine.py"]
data = {{ {data} }}
split.by = "item"
sampler = {{ classes = 4, items = 2, batches = 2 }}
backbone = {{ {backbone} }}
head.embedding_size = 4
loss.name = "mine.contrastive"
train = {{ epochs = 1, device = "cpu" }}
"""
PLUGIN = """
from pytorch_metric_learning import losses
from retrieval.plugin import hookimpl

def contrastive() -> losses.ContrastiveLoss:
    \"\"\"The contrastive loss.\"\"\"
    return losses.ContrastiveLoss()

@hookimpl
def retrieval_losses():
    return {"contrastive": contrastive}
"""
KINDS = {
    "photos": (
        'name = "core.image_folder", folder = "data"',
        'name = "core.convnet", size = 8, width = 2, depth = 2',
    ),
    "vectors": ('name = "core.features", file = "data/vectors.npz"', 'name = "core.features"'),
}


def retrieval(*words: object) -> Any:
    result = command(*words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_from_another_folder_and_without_the_data(kind, tmp_path, monkeypatch):
    digits = load_digits()
    home, away, run = tmp_path / "home", tmp_path / "away", tmp_path / "moved"
    for label in range(4):
        (home / "data" / str(label)).mkdir(parents=True)
        for i, image in enumerate(digits.images[digits.target == label][:12]):
            pixels = Image.fromarray((image * 15.9).astype(np.uint8))
            pixels.save(home / "data" / str(label) / f"{i:02}.png")
    few = digits.target < 4
    vectors, labels = digits.data[few].astype(np.float32), digits.target[few].astype(str)
    np.savez(home / "data" / "vectors.npz", features=vectors, labels=labels)
    away.mkdir()
    data, backbone = KINDS[kind]
    (home / "recipe.toml").write_text(RECIPE.format(data=data, backbone=backbone))
    (home / "mine.py").write_text(PLUGIN)
    monkeypatch.chdir(home)
    retrieval("train", "recipe.toml")
    monkeypatch.chdir(away)
    trained = home / "runs" / "elsewhere"
    assert "recall_at_1" in retrieval("evaluate", trained).output
    assert "note:" not in retrieval("export", trained, "-o", "whole.bundle").output
    shutil.rmtree(home / "data")
    (home / "mine.py").unlink()
    trained.rename(run)
    with pytest.raises(DataError, match=f"{home / 'data'}"):
        retrieval("evaluate", run)
    without = retrieval("export", run, "-o", "without.bundle").output
    assert "note: The run's data cannot be opened: " in without
    assert "verified on the held-out inputs that the run keeps" in without
    one, other = (Bundle.open(away / f"{name}.bundle", threads=1) for name in ("whole", "without"))
    assert 8 <= other.manifest.verified.items <= 64
    generator = np.random.default_rng(0)
    items = generator.standard_normal((5, 64)).astype(np.float32)
    if kind == "photos":
        items = generator.integers(0, 256, (5, *one.manifest.input.shape), dtype=np.uint8)
    np.testing.assert_array_equal(one.encode(items).vector, other.encode(items).vector)
    says = "int8 variant is calibrated on training items, but there are none"
    with pytest.raises(BundleError, match=says):
        retrieval("export", run, "-o", "int8.bundle", "--variant", "int8")
    (run / "inputs.safetensors").unlink()
    with pytest.raises(DataError, match=f"{home / 'data'}"):
        retrieval("export", run, "-o", "none.bundle")
