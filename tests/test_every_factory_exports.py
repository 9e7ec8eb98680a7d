"""Every installed backbone, combiner and learner exports graphs that agree with torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_models
import torch
from numpy.typing import NDArray
from retrieval.bundle.bundle import Bundle
from retrieval.export.export_model import export_model
from retrieval.host.factory import Factory
from retrieval.host.plugins import load_plugins
from retrieval.images.preprocessing import from_array
from retrieval.model.model import Model, build_head
from sklearn.datasets import load_digits, load_sample_images

PLUGINS = load_plugins()
DIGITS = load_digits()
VECTORS: NDArray[np.float32] = DIGITS.data[:300].astype(np.float32)
# Learners fit the sixteen pixels that vary most, because some learners refuse constant columns.
FEW: NDArray[np.float32] = np.ascontiguousarray(
    VECTORS[:, np.sort(VECTORS.var(axis=0).argsort()[-16:])]
)
GIVEN = {"features": VECTORS.shape[1], "embedding_size": 16, "classes": 10}

# Arguments of factories whose defaults are missing or slow.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "core.convnet": {"width": 8, "size": 33, "channels": 3, "stem": 2},
    **{f"core.efficientnet_lite{i}": {"pretrained": False, "size": 64} for i in range(3)},
    "core.pca": {"n_components": 16},
    "core.nca": {"n_components": 4, "max_iter": 3},
    "metric_learn.itml": {"max_iter": 20},
    "metric_learn.rca": {"n_chunks": 40},
    "core.timm": {"model": "lcnet_035", "size": 64},
    "core.torchvision": {"model": "resnet18", "size": 64},
}
NEEDS = dict.fromkeys(["core.timm", *(f"core.efficientnet_lite{i}" for i in range(3))], "timm")
SAVED = {
    "models.open_clip": lambda folder: small_models.open_clip_file(folder)[0],
    "models.sentence_transformers": small_models.sentence_transformers_folder,
    "models.transformers": lambda folder: small_models.transformers_folder(folder, "resnet"),
}
"""Factories whose models are written first, and what writes one."""
NEEDS |= {f"models.{name}": name for name in ("open_clip", "sentence_transformers", "transformers")}


@pytest.fixture(scope="module", autouse=True)
def saved(tmp_path_factory):
    """Write the folders whose libraries are installed."""
    for name, save in SAVED.items():
        if find_spec(NEEDS[name]) is not None:
            ARGUMENTS[name] = {"model": str(save(tmp_path_factory.mktemp(name)))}


def build(kind: str, name: str, values: dict[str, Any]) -> Any:
    factory: Factory = PLUGINS.find(kind, name)
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{name} needs {NEEDS[name]}")
    lacking = [
        p.name for p in factory.parameters if p.required and p.name not in ARGUMENTS.get(name, {})
    ]
    assert not lacking, (
        f"{name} needs {lacking}: add a line to ARGUMENTS, so that its export is tested"
    )
    torch.manual_seed(0)
    return PLUGINS.build(kind, {"name": name, **ARGUMENTS.get(name, {})}, values)


def photographs(preprocessing: Any, number: int = 20) -> NDArray[np.uint8]:
    """Return preprocessed patches of scikit-learn's two photographs."""
    rng = np.random.default_rng(0)
    images = load_sample_images().images
    patches = []
    for index in range(number):
        y, x = rng.integers(0, 200), rng.integers(0, 400)
        patches.append(preprocessing(from_array(images[index % 2][y : y + 200, x : x + 200])))
    return np.stack(patches)


def exported_agrees(model: Model, items: NDArray[Any], folder: Path) -> Bundle:
    manifest = export_model(model, items, folder / "b", name="b")
    assert manifest.verified.largest_difference <= manifest.verified.tolerance == 1e-4
    bundle = Bundle.open(folder / "b", threads=1)
    encoded = bundle.encode(items[:5])
    model.eval()
    with torch.inference_mode():
        codes = model(torch.from_numpy(items[:5]))[1].float()
        expected = codes if model.combiner is None else model.combiner.index_vectors(codes)
        assert np.abs(encoded.vector - expected.numpy()).max() < 1e-4 * max(
            1.0, float(expected.norm(dim=1).mean())
        )
        if encoded.code is not None and model.combiner is not None:
            distances = model.combiner.compute_mat(codes, codes).numpy()
            assert np.allclose(
                bundle.rescore(encoded.code, encoded.code), distances, rtol=1e-3, atol=1e-3
            )
    return bundle


@pytest.mark.parametrize("name", PLUGINS.factories("backbones"))
def test_backbone(name, tmp_path):
    backbone = build("backbones", name, GIVEN)
    model = Model(backbone, build_head(backbone.features, 32))
    items = VECTORS if backbone.preprocessing is None else photographs(backbone.preprocessing)
    with torch.no_grad():
        for _ in range(2):  # gives batch normalisation the statistics of real images
            model(torch.from_numpy(items))
    bundle = exported_agrees(model, items, tmp_path)
    assert bundle.encode(items[:5]).vector.shape == (5, 32) and not bundle.has_code


@pytest.mark.parametrize("name", PLUGINS.factories("combiners"))
def test_combiner(name, tmp_path):
    combiner = build("combiners", name, GIVEN)
    features = PLUGINS.build("backbones", {"name": "core.features"}, GIVEN)
    model = Model(features, combiner.build_head(VECTORS.shape[1]), combiner)
    bundle = exported_agrees(model, VECTORS, tmp_path)
    assert bundle.has_code == (not combiner.exact)


@pytest.mark.parametrize("name", PLUGINS.factories("learners"))
def test_learner(name, tmp_path):
    values = GIVEN | {"features": FEW.shape[1]}
    learner = build("learners", name, values)
    learner.fit(FEW[:200].astype(np.float64), DIGITS.target[:200])
    head, combiner = learner.to_model_parts()
    features = PLUGINS.build("backbones", {"name": "core.features"}, values)
    bundle = exported_agrees(Model(features, head, combiner), FEW[200:], tmp_path)
    if combiner is None:
        codes = learner.transform(FEW[200:].astype(np.float64))
        vectors = bundle.encode(FEW[200:]).vector
        assert np.abs(vectors - codes).max() < 1e-4 * np.linalg.norm(codes, axis=1).mean()
