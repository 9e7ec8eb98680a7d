"""A learner in a recipe: train, evaluate, export to one ONNX graph, index, search; behind vectors
and behind a frozen network.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval.run.open import Run
from retrieval.serving.bundle import Bundle
from sklearn.datasets import load_digits

VECTORS = """
[data]
name = "core.features"
file = "digits.npz"
[split]
by = "item"
test = 0.5
[backbone]
name = "core.features"
"""


LANML = """
[learner]
name = "anml.lanml"
gamma1 = -0.5
n_components = 16
max_iter = 15
max_queries = 300
"""

PNCA = """
[learner]
name = "anml.pnca"
alpha = 0.3
n_components = 16
max_iter = 15
max_queries = 300
"""


def run(cli: Callable[..., Any], *words: str | Path) -> str:
    outcome = cli(*words)
    assert outcome.code == 0, outcome.err
    return str(outcome.out)


@pytest.mark.parametrize("learner", [LANML, PNCA], ids=["lanml", "pnca"])
def test_from_vectors_to_answers(learner: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    digits = load_digits()
    x, y = digits.data.astype(np.float32), digits.target.astype(str)
    np.savez(tmp_path / "digits.npz", features=x, labels=y)
    (tmp_path / "recipe.toml").write_text(
        VECTORS.replace("digits.npz", str(tmp_path / "digits.npz")) + learner
    )
    run(cli, "train", tmp_path / "recipe.toml", "--output", tmp_path / "run")
    loaded = Run.open(tmp_path / "run")
    head = loaded.model.head
    run(cli, "export", tmp_path / "run", "-o", tmp_path / "bundle")
    assert not (tmp_path / "bundle" / "rescorer.onnx").exists()

    # the run's weights are what fitting on the run's training items gives
    built = loaded.recipe.build("learner", features=64)
    train = loaded.splits.train
    built.fit(x[train].astype(np.float64), y[train])
    actual = Bundle.open(tmp_path / "bundle", threads=1).encode(x[:100]).vector
    np.testing.assert_allclose(
        actual, built.transform(x[:100].astype(np.float64)), rtol=1e-3, atol=1e-3
    )
    assert sum(p.numel() for p in head.parameters()) == 16 * 64

    test = np.setdiff1d(np.arange(len(x)), train)
    np.savez(tmp_path / "gallery.npz", features=x[train], labels=y[train])
    np.savez(tmp_path / "queries.npz", features=x[test[:60]])
    run(
        cli,
        "index",
        "create",
        tmp_path / "index",
        tmp_path / "gallery.npz",
        "--bundle",
        tmp_path / "bundle",
    )
    answers = json.loads(
        run(cli, "search", tmp_path / "index", tmp_path / "queries.npz", "-k", "3", "--json")
    )
    first = [answer["results"][0]["label"] for answer in answers]
    assert np.mean(np.array(first) == y[test[:60]]) > 0.9
