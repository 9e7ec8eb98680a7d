"""Every learner keeps the contracts of scikit-learn and metric-learn."""

from __future__ import annotations

import inspect
import io
import math
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from retrieval.errors import MissingDependency
from retrieval.host.plugins import load_plugins
from retrieval.model.contracts import Learner
from retrieval.model.metric_learner import MetricLearner
from sklearn.base import clone
from sklearn.datasets import load_wine
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

STREAM = {"seeds": 300, "closure": 300}
SMALL: dict[str, dict[str, Any]] = {
    "anml.lanml": {"max_iter": 10, "max_queries": 60},
    "anml.pnca": {"max_iter": 10, "max_queries": 60},
    "aml.aml": {"n_pairs": 200},
    "aml.gmml": {"n_pairs": 200},
    "core.lda": {},
    "core.nca": {"max_iter": 5, "init": "random"},
    "core.pca": {},
    "feedback.diagonal": {},
    "feedback.low_rank": {},
    "metric_learn.itml": {"max_iter": 20},
    "metric_learn.lfda": {},
    "metric_learn.lmnn": {"max_iter": 10, "min_iter": 2, "learn_rate": 1e-4, "init": "random"},
    "metric_learn.lsml": {"max_iter": 20},
    "metric_learn.mmc": {"max_iter": 3, "max_proj": 50, "n_constraints": 50, "init": "random"},
    "metric_learn.rca": {},
    "metric_learn.scml": {"max_iter": 50, "output_iter": 50, "n_basis": 30, "k_impostor": 3},
    "oahu.lego": STREAM,
    "oahu.oahu": {"depth": 2, "hidden": 8, "embedding": 4, "dtype": "float64", **STREAM},
    "oahu.oasis": STREAM,
    "oahu.opml": {},
    "oahu.rdml": STREAM,
    "oahu.warm": STREAM,
}
"""Every learner, with parameters that keep it quick."""
FACTORIES = {
    name: factory
    for name, factory in load_plugins().factories("learners").items()
    if name.partition(".")[0] in ("aml", "anml", "core", "feedback", "metric_learn", "oahu")
}
WITHOUT_SEED = ("core.lda", "feedback.diagonal", "feedback.low_rank", "metric_learn.lfda")
SEEDED = [name for name in SMALL if FACTORIES[name].parameters and name not in WITHOUT_SEED]
NOT_LINEAR = ("oahu.oahu", "oahu.oasis")
every_learner = pytest.mark.parametrize("name", SMALL)
seeded_learners = pytest.mark.parametrize("name", SEEDED)


@pytest.fixture(scope="module")
def wine():
    x, y = load_wine(return_X_y=True)
    return StandardScaler().fit_transform(x), y


@pytest.fixture(scope="module")
def fitted(wine):
    """A function that returns a learner by name, fitted on wine once."""
    learners: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in learners:
            try:
                learners[name] = FACTORIES[name].make(**SMALL[name]).fit(*wine)
            except MissingDependency as missing:
                pytest.skip(str(missing))
        return learners[name]

    return get


def test_every_learner_is_tested():
    assert set(SMALL) == set(FACTORIES)


def by_loops(name: str, learner: Any, x: Any, y: Any) -> float:
    """The distance of two feature vectors, computed from the fitted arrays alone."""
    if name == "oahu.oasis":
        x, y = x / math.hypot(*x), y / math.hypot(*y)
        w = learner.similarity_
        mapped = [sum(w[i, j] * x[i] for i in range(len(x))) for j in range(len(x))]
        return math.dist(mapped, y)
    if name == "oahu.oahu":  # √(Σ α_l D_l²) of the unit embeddings in the spaces l
        spaces = zip(*(learner.spaces(z[None]).embeddings[:, 0] for z in (x, y)), strict=True)
        squares = (math.dist(u, v) ** 2 for u, v in spaces)
        return math.sqrt(sum(a * d for a, d in zip(learner.alpha_, squares, strict=True)))
    rows = learner.components_
    codes = [[float(row @ (z - learner.mean_)) for row in rows] for z in (x, y)]
    if name == "oahu.warm" and learner._unit:
        codes = [[c / math.hypot(*code) for c in code] for code in codes]
    return math.dist(*codes)


@every_learner
@pytest.mark.parametrize("scale", [1e200, 1e153])
def test_features_whose_squares_overflow_are_refused(name, scale, wine):
    x, y = wine
    with pytest.raises(ValueError, match=r"so large that their squares overflow\. Scale"):
        FACTORIES[name].make(**SMALL[name]).fit(scale * x, y)


@pytest.mark.parametrize("name", ["oahu.warm", "oahu.oahu", "aml.gmml", "aml.aml"])
def test_pairs_and_triplets_whose_squares_overflow_are_refused(name, wine):
    learner = FACTORIES[name].make()
    triplets, pairs = 1e200 * wine[0][:6].reshape(2, 3, -1), 1e200 * wine[0][:4].reshape(2, 2, -1)
    fit, data = getattr(learner, "fit_pairs", None), (pairs, [True, False])
    if name.startswith("oahu"):
        fit, data = learner.partial_fit, (triplets,)
    with pytest.raises(ValueError, match=r"so large that their squares overflow\. Scale"):
        fit(*data)
    assert not hasattr(learner, "n_triplets_")


# PCA ignores labels
@pytest.mark.parametrize("name", [name for name in SMALL if name != "core.pca"])
def test_missing_labels_and_labels_of_two_kinds_are_refused(name, wine):
    x, y = wine
    text = [f"class {number}" for number in y]
    for gap in (math.nan, None):
        for labels in (text, y.tolist()):
            says = r"1 of 178 labels is missing .* in row 3, counted from 0"
            with pytest.raises(ValueError, match=says):
                FACTORIES[name].make(**SMALL[name]).fit(x, [*labels[:3], gap, *labels[4:]])
    says = r"labels are of two kinds.* row 0 is 'class 0' .* row 3 is 0 \(int\)"
    with pytest.raises(ValueError, match=says):
        FACTORIES[name].make(**SMALL[name]).fit(x, [*text[:3], 0, *text[4:]])


@every_learner
def test_pair_distance_and_metric_by_loops(name, fitted, wine):
    learner, x = fitted(name), wine[0]
    assert isinstance(learner, Learner | MetricLearner)
    pairs = np.stack([x[:12], x[100:112]], axis=1)
    expected = [by_loops(name, learner, a, b) for a, b in pairs]
    distances = learner.pair_distance(pairs)
    assert distances.shape == (12,) and distances.dtype == np.float64 and min(expected) > 0
    np.testing.assert_allclose(distances, expected, rtol=1e-6)
    np.testing.assert_allclose(learner.pair_distance(pairs.tolist()), distances)
    metric = learner.get_metric()
    for (a, b), distance in zip(pairs, distances, strict=True):
        assert metric(a, b) == pytest.approx(distance, rel=1e-6)
        assert metric(a, b, squared=True) == pytest.approx(distance**2, rel=1e-6)
    if name == "oahu.oasis":
        unit = pairs / np.linalg.norm(pairs, axis=2, keepdims=True)
        scores = [a @ learner.similarity_ @ b for a, b in unit]
        np.testing.assert_allclose(learner.pair_score(pairs), scores)
    else:
        np.testing.assert_array_equal(learner.pair_score(pairs), -distances)
        assert learner.pair_distance(pairs[:, [0, 0]]) == pytest.approx(np.zeros(12), abs=1e-7)


@pytest.mark.parametrize("name", [name for name in SMALL if name not in NOT_LINEAR])
def test_mahalanobis_matrix_is_the_metric(name, fitted, wine):
    learner, x = fitted(name), wine[0]
    if name == "oahu.warm" and learner._unit:
        pytest.skip("compares by an angle; see test_an_angle_has_no_matrix")
    m = learner.get_mahalanobis_matrix()
    pairs = np.stack([x[:12], x[100:112]], axis=1)
    expected = [
        math.sqrt(sum(d[i] * m[i, j] * d[j] for i in range(13) for j in range(13)))
        for d in pairs[:, 0] - pairs[:, 1]
    ]
    np.testing.assert_allclose(learner.pair_distance(pairs), expected, rtol=1e-6)
    m += 1  # changes only the caller's copy
    np.testing.assert_allclose(learner.pair_distance(pairs), expected, rtol=1e-6)


def test_only_linear_learners_have_a_matrix(fitted):
    for name in NOT_LINEAR:
        assert not hasattr(fitted(name), "get_mahalanobis_matrix")


def test_an_angle_has_no_matrix(wine):
    x = wine[0]
    learner = clone(FACTORIES["oahu.warm"].make(**SMALL["oahu.warm"])).fit(*wine)
    learner.left_, learner.alpha_ = True, np.eye(5)[3]  # the first expert that compares by angles
    with pytest.raises(ValueError, match="compares items by an angle"):
        learner.get_mahalanobis_matrix()
    pair = np.stack([x[0], x[100]])
    expected = by_loops("oahu.warm", learner, *pair)
    assert learner.pair_distance(pair[None])[0] == pytest.approx(expected)
    assert learner.get_metric()(*pair) == pytest.approx(expected)


@every_learner
def test_the_metric_does_not_change_with_another_fit(name, wine):
    x, y = wine
    learner = FACTORIES[name].make(**SMALL[name])
    try:
        metric = learner.fit(x, y).get_metric()
    except MissingDependency as missing:
        pytest.skip(str(missing))
    before = metric(x[0], x[1])
    learner.fit(x[:, :6], y)
    assert metric(x[0], x[1]) == before
    with pytest.raises(ValueError, match="two vectors of 6 features"):
        learner.get_metric()(x[0], x[1])


@every_learner
def test_wrong_pairs_and_unfitted_learners_are_refused(name, fitted, wine):
    learner, x = fitted(name), wine[0]
    pairs = np.stack([x[:3], x[3:6]], axis=1)
    for call in (learner.pair_distance, learner.pair_score):
        for wrong in (x, pairs.transpose(1, 0, 2), pairs[0]):
            with pytest.raises(ValueError, match=r"Pairs must have the shape \(P, 2, F\)"):
                call(wrong)
        says = r"The pairs have 12 features, and \w+ was fitted on 13"
        with pytest.raises(ValueError, match=says):
            call(pairs[:, :, 1:])
        with pytest.raises(ValueError, match="NaN"):
            call(np.where(pairs == pairs[0, 0, 0], np.nan, pairs))
        with pytest.raises(ValueError, match="0 sample"):
            call(pairs[:0])
    metric = learner.get_metric()
    for u, v in ((x[0], x[:2]), (x[0][1:], x[1][1:]), (x[0], x[1][1:])):
        with pytest.raises(ValueError, match="compares two vectors of 13 features"):
            metric(u, v)
    with pytest.raises(ValueError, match="NaN or infinity"):
        metric(x[0], np.full(13, np.inf))
    for call in (learner.pair_distance, learner.pair_score):
        with pytest.raises(NotFittedError):
            getattr(clone(learner), call.__name__)(pairs)
    with pytest.raises(NotFittedError):
        clone(learner).get_metric()


@every_learner
def test_a_learner_that_is_pickled_rebuilt_or_fitted_again_is_the_same(name, fitted, wine):
    learner, x = fitted(name), wine[0]
    codes, file = learner.transform(x), io.BytesIO()
    joblib.dump(learner, file)
    file.seek(0)
    rebuilt = clone(learner)
    for attribute, value in vars(learner).items():
        if attribute.endswith("_"):
            setattr(rebuilt, attribute, value)
    for other in (joblib.load(file), rebuilt, clone(learner).fit(*wine)):
        np.testing.assert_array_equal(other.transform(x), codes)


@pytest.mark.parametrize("name", [name for name in SMALL if name not in NOT_LINEAR])
def test_the_head_is_accurate_far_from_zero(name, fitted, wine):
    """A bias would lose digits."""
    fitted(name)
    x, y = wine
    learner = FACTORIES[name].make(**SMALL[name]).fit(x + 1000, y)
    head, _ = learner.to_model_parts()
    codes = learner.transform(x + 1000)
    with torch.no_grad():
        actual = head(torch.from_numpy(x + 1000).float()).numpy()
    np.testing.assert_allclose(actual, codes, rtol=1e-4, atol=3e-4 * np.abs(codes).max())


@every_learner
def test_feature_names(name, fitted, wine):
    learner = fitted(name)
    names = learner.get_feature_names_out()
    kind = type(learner).__name__.lower()
    assert list(names) == [f"{kind}{i}" for i in range(learner.transform(wine[0][:2]).shape[1])]


@seeded_learners
def test_random_state_is_seed(name, fitted, wine):
    fitted(name)
    make = FACTORIES[name].make
    probe = np.stack([wine[0][:5], wine[0][100:105]], axis=1)

    def distances(**seeds: Any) -> Any:
        learner = make(**SMALL[name], **seeds)
        assert clone(learner).get_params() == learner.get_params()
        return clone(learner).fit(*wine).pair_distance(probe)

    seed_1 = distances(seed=1)
    np.testing.assert_array_equal(seed_1, distances(random_state=1))
    np.testing.assert_array_equal(seed_1, distances(seed=1, random_state=np.int64(1)))
    np.testing.assert_array_equal(distances(), distances(seed=0))
    # PCA's full solver is deterministic; oahu.warm stays Euclidean on so short a stream
    if name not in ("core.pca", "oahu.warm"):
        assert not np.array_equal(seed_1, distances())


@seeded_learners
def test_two_different_seeds_are_refused(name, fitted, wine):
    fitted(name)
    learner = FACTORIES[name].make(**SMALL[name], seed=0)
    assert learner.set_params(random_state=2).get_params()["random_state"] == 2
    says = r"seed is 0 and random_state is 2\. They are two names of one parameter"
    with pytest.raises(ValueError, match=says):
        learner.fit(*wine)
    learner.set_params(seed=None).fit(*wine)
    for wrong in ("1", -1, 0.5):
        with pytest.raises(ValueError, match=r"random_state is .*; it must be a whole number"):
            learner.set_params(random_state=wrong).fit(*wine)


@every_learner
def test_both_seeds_are_parameters_of_a_recipe(name):
    known = {p.name: p for p in FACTORIES[name].parameters}
    assert ("seed" in known) == ("random_state" in known) == (name in SEEDED)
    if name in SEEDED:
        assert list(inspect.signature(FACTORIES[name].make).parameters)[-1] == "random_state"
        assert FACTORIES[name].check({"seed": 3}, "[learner]")[1] == []
        assert FACTORIES[name].check({"random_state": 3}, "[learner]")[1] == []
        assert FACTORIES[name].check({"random_state": "3"}, "[learner]")[1]


def test_in_a_search_over_random_states_and_as_a_neighbours_metric(wine):
    x, y = wine
    make = FACTORIES["core.nca"].make
    nca = make(2, init="random", max_iter=5)
    pipeline = make_pipeline(StandardScaler(), nca, KNeighborsClassifier(3))
    search = GridSearchCV(pipeline, {"nca__random_state": [1, 2]}, cv=2, error_score="raise")
    assert search.fit(x, y).best_params_["nca__random_state"] in (1, 2)
    learner = make(2, max_iter=5).fit(x[::2], y[::2])
    by_codes = KNeighborsClassifier(3).fit(learner.transform(x[::2]), y[::2])
    by_metric = KNeighborsClassifier(3, metric=learner.get_metric()).fit(x[::2], y[::2])
    expected = by_codes.predict(learner.transform(x[1::2]))
    np.testing.assert_array_equal(by_metric.predict(x[1::2]), expected)


DRAWS = np.random.default_rng(0).normal(size=(40, 20))
ODD_DATA = {
    "one class": (DRAWS, np.zeros(40, int)),
    "one item of each class": (DRAWS, np.arange(40)),
    "two identical items": (DRAWS[[0, 0]], np.arange(2)),
    "one feature": (np.round(DRAWS[:, :1]), np.arange(40) % 2),
    "constant features": (np.ones((40, 5)), np.arange(40) % 4),
    "one constant feature": (np.hstack([DRAWS[:, :4], np.ones((40, 1))]), np.arange(40) % 4),
    "repeated items": (np.repeat(DRAWS[:10, :5], 4, axis=0), np.arange(40) // 4),
    "fewer items than features": (DRAWS[:8], np.arange(8) % 2),
}


@every_learner
@pytest.mark.filterwarnings("ignore")
def test_odd_data_are_learned_from_or_refused_in_a_sentence(name):
    if name.startswith("metric_learn"):
        pytest.importorskip("metric_learn")
    refused = {}
    for case, (x, y) in ODD_DATA.items():
        try:
            learner = FACTORIES[name].make(**SMALL[name]).fit(x, y)
            assert np.isfinite(learner.transform(x)).all(), case
        except ValueError as error:
            refused[case] = error
    for case, error in refused.items():
        assert type(error) is ValueError or "metric-learn's" in str(error), case
        assert str(error).endswith((".", "?")) and "unpack" not in str(error), error
    if name != "core.pca":  # which ignores labels
        assert "are of one class" in str(refused["one class"])
        assert {"one item of each class", "two identical items"} <= set(refused)
