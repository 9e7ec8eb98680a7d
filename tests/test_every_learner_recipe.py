"""Learners in recipes: train, export to one ONNX graph, index, search."""

from __future__ import annotations

import json

import numpy as np
import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.errors import RecipeError
from retrieval.host.plugins import load_plugins
from retrieval.run.open import Run
from sklearn.datasets import load_digits
from trained_weights import ran, summary

VECTORS = """
data = {{ name = "core.features", file = "{file}" }}
split = {{ by = "item", test = 0.5 }}
backbone.name = "core.features"
[learner]
"""
SHORT = "n_components = 16\nmax_iter = 15\nmax_queries = 300\n"
LEARNERS = {
    "gmml": 'name = "aml.gmml"\nt = 0.3\nregularization = 0.5\nprior = "covariance"\n',
    "aml": 'name = "aml.aml"\nalpha = 5.0\nbeta = 0.5\nn_pairs = "paper"\n'
    "standardize = true\nregularization = 0.1\n",
    "lanml": f'name = "anml.lanml"\ngamma1 = -0.5\n{SHORT}',
    "pnca": f'name = "anml.pnca"\nalpha = 0.3\n{SHORT}',
    "pca": 'name = "core.pca"\nn_components = 16\n',
    "lda": 'name = "core.lda"\n',
    "nca": 'name = "core.nca"\nn_components = 16\nmax_iter = 10\n',
}


@pytest.mark.parametrize("learner", LEARNERS.values(), ids=LEARNERS)
def test_from_vectors_to_answers(learner, tmp_path):
    digits = load_digits()
    x, y = digits.data.astype(np.float32), digits.target.astype(str)
    np.savez(tmp_path / "digits.npz", features=x, labels=y)
    (tmp_path / "recipe.toml").write_text(VECTORS.format(file=tmp_path / "digits.npz") + learner)
    ran("train", tmp_path / "recipe.toml", "--output", tmp_path / "run")
    assert summary(tmp_path / "run")["validation"]["map_at_r"] > 0.2
    ran("export", tmp_path / "run", "-o", tmp_path / "bundle")
    assert [path.name for path in (tmp_path / "bundle").glob("*.onnx")] == ["encoder.onnx"]

    # the bundle gives what a learner fitted on the run's training items gives
    run = Run.open(tmp_path / "run")
    built, train = run.recipe.build("learner", features=64), run.splits.train
    built.fit(x[train].astype(np.float64), y[train])
    actual = Bundle.open(tmp_path / "bundle", threads=1).encode(x[:100]).vector
    expected = built.transform(x[:100].astype(np.float64))
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)

    test = np.setdiff1d(np.arange(len(x)), train)
    gallery, queries, index = (tmp_path / name for name in ("g.npz", "q.npz", "index"))
    np.savez(gallery, features=x[train], labels=y[train])
    np.savez(queries, features=x[test[:60]])
    ran("index", "create", index, gallery, "--bundle", tmp_path / "bundle")
    answers = json.loads(ran("search", index, queries, "-k", "3", "--json"))
    first = [answer["results"][0]["label"] for answer in answers]
    assert np.mean(np.array(first) == y[test[:60]]) > 0.9


def test_wrong_parameters_of_learners_are_refused_in_a_recipe():
    plugins = load_plugins(block=["pml"])
    prior = [[2.0, 0.0], [0.0, 1.0]]
    assert plugins.build("learners", {"name": "aml.gmml", "prior": prior, "t": 0}).prior == prior
    assert plugins.build("learners", {"name": "anml.lanml", "neighbors": "all"}).neighbors == "all"
    for name, wrong in (
        ("aml.gmml", {"t": 1.5, "regularization": -1.0, "prior": "euclid", "n_pairs": "some"}),
        ("aml.aml", {"alpha": 0.0, "beta": -1.0, "balance": 1, "n_pairs": 0}),
        ("anml.lanml", {"gamma2": 0.0, "gamma1": "big", "neighbors": "some"}),
        ("anml.pnca", {"regularization": -1.0}),
        ("metric_learn.lmnn", {"regularization": 2.0}),
    ):
        for key, value in wrong.items():
            with pytest.raises(RecipeError, match=key):
                plugins.build("learners", {"name": name, key: value})
