"""DAMML trained on digits, exported, indexed and searched, against torch and plain loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from discriminator_by_loops import affine, gamma, local_distances
from numpy.typing import NDArray
from retrieval.bundle.bundle import Bundle
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.export.export_run import export
from retrieval.index.index import create_index, open_index
from retrieval.run.open import Run
from retrieval.training.trainer import train_run
from sklearn.datasets import load_digits

from retrieval_daml.local_metrics import Discriminator

DISCRIMINATOR = {"name": "daml.discriminator", "metrics": 4, "hidden": 16}
COMBINERS = {
    "soft": DISCRIMINATOR,
    "sharp": DISCRIMINATOR | {"mu": 3.0, "start": 2.0},
    "views": DISCRIMINATOR | {"views": True, "start": 1.0},
    "uniform": {"name": "daml.uniform", "metrics": 4},
    "squares": {"name": "daml.uniform", "metrics": 4, "power": 2},
}


class Served:
    """A trained run, its bundle and its index of the held-out digits."""

    def __init__(self, make: Any, name: str, folder: Path) -> None:
        digits = load_digits()
        vectors = (digits.data / 16.0).astype(np.float32)
        np.savez(folder / "digits.npz", features=vectors, labels=digits.target)
        recipe = make(
            data={"name": "core.features", "file": str(folder / "digits.npz")},
            split={"by": "item", "test": 0.6, "validation": 0.0},
            sampler={"classes": 8, "items": 6, "batches": 25},
            head={"embedding_size": 32},
            combiner=COMBINERS[name],
            generator=None,
            train={"epochs": 3},
        )
        train_run(folder / "run", recipe)
        self.run: Run = Run.open(folder / "run")
        self.combiner: Any = self.run.model.combiner
        self.manifest = export(self.run).bundle.manifest
        query = self.run.splits.query
        self.items: NDArray[np.float32] = vectors[query]
        keys = [str(row) for row in range(len(query))]
        gallery, self.index_path = folder / "gallery.npz", folder / "index"
        np.savez(gallery, features=self.items, labels=digits.target[query], keys=keys)
        options: dict[str, Any] = {"backend": "flat", "progress": False}
        create_index(self.index_path, folder / "run" / "bundle", [gallery], **options)
        with torch.no_grad():
            self.codes = self.run.model(torch.from_numpy(self.items))[1]
            self.distances = self.combiner.compute_mat(self.codes, self.codes).numpy()


@pytest.fixture(scope="module")
def served(make, tmp_path_factory):
    """The trained model of a combiner in `COMBINERS`; each is trained once."""
    built: dict[str, Served] = {}

    def get(name: str) -> Served:
        if name not in built:
            built[name] = Served(make, name, tmp_path_factory.mktemp(name))
        return built[name]

    return get


def test_the_bundle_has_a_rescorer_and_codes(served):
    soft = served("soft")
    manifest = soft.manifest
    assert manifest.vector == 32 and manifest.code == 32 + 2 * 16 and not manifest.distance.exact
    assert manifest.rescorer.file == "rescorer.onnx" and manifest.distance.name == "Discriminator"
    assert manifest.rescorer.items == len(soft.items) > 1000
    bundle = Bundle.open(soft.run.path / "bundle", threads=1)
    encoded = bundle.encode(soft.items[:50])
    assert np.abs(encoded.vector - soft.codes[:50, :32].numpy()).max() < 1e-5
    # the vector is the unit embeddings side by side; the code adds both hidden sums of the item
    assert np.allclose(np.linalg.norm(encoded.vector.reshape(50, 4, 8), axis=2), 1, atol=1e-5)
    assert np.abs(encoded.code - soft.codes[:50].numpy()).max() < 1e-4


@pytest.mark.parametrize("name", ["soft", "sharp", "views", "uniform"])
def test_onnx_gives_the_distances_of_plain_loops(served, name):
    """Distances of items' features in float64, from the trained weights alone."""
    built = served(name)
    state = {k: v.double().tolist() for k, v in built.run.model.state_dict().items()}

    first = "head.embedding.0" if name != "uniform" else "head.0"

    def embedding(v: list[float]) -> list[float]:
        if name != "views":
            return affine(state[f"{first}.weight"], state[f"{first}.bias"], v)
        maps = [f"{first}.maps.{k}" for k in range(4)]
        views = [v[16 * k : 16 * k + 16] for k in range(4)]
        parts = [
            affine(state[f"{left}.weight"], state[f"{left}.bias"], view)
            for left, view in zip(maps, views, strict=True)
        ]
        return [value for part in parts for value in part]

    def weights(x: list[float], y: list[float]) -> list[float]:
        return [0.25] * 4 if name == "uniform" else gamma(state, x, y)

    bundle = Bundle.open(built.run.path / "bundle", threads=1)
    encoded = bundle.encode(built.items)
    actual = bundle.rescore(encoded.code[:3], encoded.code[100:140])
    for i in range(3):
        for j in range(40):
            x, y = built.items[i].tolist(), built.items[100 + j].tolist()
            local = local_distances(embedding(x), embedding(y), 4)
            expected = sum(g * d for g, d in zip(weights(x, y), local, strict=True))
            assert actual[i, j] == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("name", ["soft", "sharp", "uniform"])
def test_five_hundred_candidates_keep_the_exhaustive_first_ten(served, name):
    built = served(name)
    size = len(built.items)
    expected = {}
    vectors = built.codes[:, :32].double()
    euclidean = np.linalg.norm(vectors[:, None] - vectors[None], axis=2)
    exact = built.distances.astype(np.float64)
    np.fill_diagonal(exact, np.inf)
    np.fill_diagonal(euclidean, np.inf)
    requested = np.unique(np.linspace(0, size - 1, 512).round().astype(int))
    for number in (50, 200, 500):
        kept = []
        for row in requested:
            candidates = np.argsort(euclidean[row], kind="stable")[:number]
            first = np.argsort(exact[row], kind="stable")[:10]
            kept.append(len({*candidates.tolist()} & {*first.tolist()}) / 10)
        expected[str(number)] = sum(kept) / len(kept)
    overlap = built.manifest.rescorer.overlap
    assert {key: overlap[key] for key in expected} == pytest.approx(expected, abs=2e-3)
    assert overlap["500"] >= 0.95
    assert overlap["50"] <= overlap["200"] <= overlap["500"]
    metrics = ["recall_at_1", "recall_at_10"]
    results = evaluate(built.run, bundle=built.run.path / "bundle", metrics=metrics)
    stated = results.candidates.overlap_at_10
    assert {k: stated[k] for k in expected} == pytest.approx(expected, abs=0.02)
    trained, bundle = (results.metrics[name]["recall_at_1"] for name in ("trained", "bundle"))
    assert bundle == pytest.approx(trained, abs=0.02)


def test_sharp_weights_get_more_candidates(served):
    actual = {}
    for name in ("soft", "sharp"):
        built = served(name)
        combiner = built.combiner
        assert isinstance(combiner, Discriminator)
        with torch.no_grad():
            gamma = combiner.weights(built.codes, built.codes).amax(-1).numpy()
        mean = gamma[~np.eye(len(gamma), dtype=bool)].mean()
        assert combiner.sharpness(built.codes) == pytest.approx(mean, abs=0.02)
        actual[name] = mean
        assert built.manifest.rescorer.candidates == (500 if mean > 0.6 else 200)
    assert actual["soft"] < 0.6 < actual["sharp"]
    fixed = Discriminator(64, 32, 4, 16, candidates=77)
    assert fixed.choose_candidates(fixed.build_head(64)(torch.randn(9, 64))) == 77


def test_squares_of_equal_weight_need_no_rescorer(served):
    built = served("squares")
    assert built.manifest.distance.exact
    assert built.manifest.rescorer is built.manifest.code is None
    with open_index(built.index_path, threads=1) as index:
        hits = index.search(index.bundle.encode(built.items[:5]), 10)
    for row, actual in enumerate(hits):
        distances = np.sort(built.distances[row])[:10]
        # FAISS reports √Σ d², which is √K times the mean
        assert [hit.distance / 2 for hit in actual] == pytest.approx(distances.tolist(), abs=1e-3)


def test_the_command_line_searches_it(served, cli, tmp_path):
    built, query = served("soft"), tmp_path / "query.npz"
    np.savez(query, features=built.items[7:8], labels=["?"])
    outcome = cli("search", built.index_path, query, "-k", "3", "--candidates", "300", "--json")
    assert outcome.code == 0, outcome.err
    hits = json.loads(outcome.out)[0]["results"]
    expected = np.argsort(built.distances[7], kind="stable")[:3].tolist()
    assert [int(hit["id"]) for hit in hits] == expected
