"""The linear baselines against plain float64 loops; chunks, save and load of every learner."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from oahu_streams import noisy_clouds as clouds, same, stream_of

from retrieval_oahu import LEGO, OAHU, OASIS, OPML, RDML, Warm
from retrieval_oahu.linear import one_pass
from retrieval_oahu.streams import Triplet

ALL = [LEGO, RDML, OASIS, OPML, Warm]
SMALL: dict[str, Any] = {"depth": 2, "hidden": 8, "embedding": 4, "rule": "linear"}
EVERY = {
    **{kind.__name__: kind for kind in ALL},
    "float32": partial(OAHU, **SMALL),
    # a number of NumPy, as from a grid search
    "float64": partial(OAHU, **SMALL, dtype="float64", seed=np.int64(3)),
}


@pytest.mark.parametrize("kind", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("prepared", [True, False])
def test_chunks_save_and_load_change_nothing(kind, prepared, tmp_path):
    triplets = stream_of(clouds(), 300)
    triplets[5, 2] = triplets[5, 0]
    whole, single, loaded = kind(), kind(), kind()
    if prepared:
        for learner in (whole, single, loaded):
            learner.prepare(clouds()[0])
    whole.partial_fit(triplets)
    single.learn_from(triplets)
    loaded.partial_fit(triplets[:170]).save(tmp_path / "x.safetensors")
    loaded = type(whole).load(tmp_path / "x.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
    assert loaded.get_params() == whole.get_params()
    loaded.learn_from(np.split(triplets[170:], [3, 4, 100]))
    same(whole, single)
    same(whole, loaded)
    assert whole.n_skipped_ == 1 and whole.n_triplets_ == 300
    if isinstance(whole, OAHU):
        assert whole.n_used_ == 299 and whole.input_layer_.dtype == whole.dtype
    x = clouds()[0]
    assert np.array_equal(whole.transform(x), loaded.transform(x))


@pytest.mark.parametrize("kind", [LEGO, RDML, OPML, Warm])
def test_fit_separates_classes(kind):
    x, y = clouds()
    learner = (OPML(gamma=0.1) if kind is OPML else kind()).fit(x, y)
    assert 0 < learner.constraint_utilization_ <= 1
    m = learner.get_mahalanobis_matrix()
    assert np.linalg.eigvalsh(m).min() > 0 and np.allclose(m, m.T)
    assert np.diag(m)[:2].mean() > 1.3 * np.diag(m)[2:].mean()

    def errors(codes: Any) -> float:
        d = ((codes[:, None] - codes) ** 2).sum(2)
        np.fill_diagonal(d, np.inf)
        return float((y[d.argmin(1)] != y).mean())

    assert errors(learner.transform(x)) < errors(x)


def test_lego_by_loops():
    triplets = stream_of(clouds(), 40)
    learner = LEGO(0.2, 30, 70).prepare(clouds()[0])
    m = np.eye(6)
    used = 0
    for a, p, n in triplets / learner.unit_:
        changed = False
        for z, alike in ((a - p, True), (a - n, False)):
            now = z @ m @ z
            target = np.percentile(learner.distances_, 30 if alike else 70)
            if (alike and now > target) or (not alike and now < target):
                changed = True
                # the step by bisection of ȳ = ŷ / (1 + η (ȳ − y) ŷ), instead of the closed form
                low, high = 1e-12, max(now, target) * 2
                for _ in range(200):
                    middle = (low + high) / 2
                    if middle * (1 + 0.2 * (middle - target) * now) > now:
                        high = middle
                    else:
                        low = middle
                m = np.linalg.inv(np.linalg.inv(m) + 0.2 * (low - target) * np.outer(z, z))
                assert z @ m @ z == pytest.approx(low)
        used += changed
    learner.partial_fit(triplets)
    assert np.allclose(learner.matrix_, m, atol=1e-9) and learner.n_used_ == used and 0 < used < 40


def test_rdml_by_loops():
    triplets = stream_of(clouds(), 60)
    for rate in (0.05, 0.5):
        learner = RDML(rate).prepare(clouds()[0])
        m = np.eye(6)
        for a, p, n in triplets / learner.unit_:
            for z, sign in ((a - p, 1), (a - n, -1)):
                if sign * (1 - z @ m @ z) <= 0:
                    step = rate
                    if sign == 1:
                        step = min(rate, 0.9 / (z @ np.linalg.inv(m) @ z))
                    m = m - step * sign * np.outer(z, z)
        learner.partial_fit(triplets)
        assert np.allclose(learner.matrix_, m) and np.linalg.eigvalsh(m).min() > 0
        assert np.allclose(learner.matrix_ @ learner.inverse_, np.eye(6), atol=1e-6)


def test_oasis_by_loops():
    triplets = stream_of(clouds(), 80)
    learner = OASIS(0.1, 0.03).partial_fit(triplets)
    w, used = np.eye(6), 0
    for triplet in triplets:
        a, p, n = (v / math.sqrt(sum(c * c for c in v)) for v in triplet)
        pairs = itertools.product(range(6), repeat=2)
        loss = max(0.0, 0.03 - sum(a[i] * w[i, j] * (p[j] - n[j]) for i, j in pairs))
        if loss > 0:
            v = np.outer(a, p - n)
            w = w + min(0.1, loss / (v**2).sum()) * v
            used += 1
    assert np.allclose(learner.similarity_, w) and learner.n_used_ == used and 0 < used < 80
    x = clouds()[0]
    s = learner.queries(x[:4]) @ learner.transform(x).T
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    assert np.allclose(s, unit[:4] @ w @ unit.T)


def test_opml_by_loops():
    triplets = stream_of(clouds(), 60)
    for gamma in (1e-3, 5.0):
        learner = OPML(gamma).prepare(clouds()[0])
        m, used = np.eye(6), 0
        for a, p, n in triplets / learner.unit_:
            u, v = a - p, a - n
            if 1 + ((m @ u) ** 2).sum() - ((m @ v) ** 2).sum() > 0:
                g = min(gamma, 0.5 / (v @ v))
                m = m @ np.linalg.inv(np.eye(6) + g * (np.outer(u, u) - np.outer(v, v)))
                used += 1
        learner.partial_fit(triplets)
        assert np.allclose(learner.matrix_, m, rtol=1e-6) and learner.n_used_ == used


def test_opml_makes_one_pass():
    labels = np.array([0, 0, 1, 1, 0, 2])
    assert list(one_pass(labels, np.arange(6))) == [
        Triplet(3, 2, 1),  # 0 and 1 come before any other class, 2 is the first of its class
        Triplet(4, 1, 3),
    ]
    learner = OPML().fit(*clouds())
    assert learner.n_triplets_ <= len(clouds()[0])


OUT_OF_RANGE: dict[Any, dict[str, list[Any]]] = {
    LEGO: {"learning_rate": [0.0], "upper": [0.0], "lower": [100.0]},
    RDML: {"learning_rate": [-1.0]},
    OASIS: {"aggressiveness": [0.0], "margin": [math.nan]},
    OPML: {"gamma": [0.0]},
    Warm: {"components": [0], "memory": [255], "prior": [0.0], "ridge": [0.0], "doubt": [1.0]},
    OAHU: {
        "tau": [0.0, 2.0, math.nan],
        "beta": [0.0, 1.0],
        "smoothing": [0.0, 1.5],
        "learning_rate": [0.0, math.inf],
        "depth": [-1],
        "hidden": [0],
        "rule": ["both"],
        "dtype": ["float16", np.float32],
        "search": ["best"],
    },
}


@pytest.mark.parametrize("kind", OUT_OF_RANGE)
def test_parameters_out_of_range_are_refused_by_name(kind):
    for name, values in OUT_OF_RANGE[kind].items():
        for value in values:
            with pytest.raises(ValueError, match=f"{kind.__name__} {name}: "):
                kind(**{name: value}).prepare(clouds()[0])


@pytest.mark.parametrize("kind", [*ALL, OAHU])
def test_transform_changes_nothing_and_is_never_stale(kind):
    x, y = clouds()
    learner = kind(seed=0).fit(x, y)
    before = dict(vars(learner))
    learner.transform(x)
    assert vars(learner) == before
    if kind is OPML:
        mapped = (x - learner.mean_) @ (learner.map_ / learner.unit_).T
        assert np.allclose(learner.transform(x), mapped)
    codes = learner.transform(x)
    learner.partial_fit(x[[[0, 1, 100], [60, 61, 0], [120, 130, 7]]])
    if kind in (LEGO, RDML, OPML, OAHU):
        assert not np.array_equal(learner.transform(x), codes)


@pytest.mark.parametrize("kind", ALL)
def test_equal_items_and_constant_features_stay_finite(kind):
    x, _ = clouds()
    x[:, 0] = 3.0
    learner = kind().prepare(x)
    triplets = np.stack([x[:50], x[:50], x[100:150]], axis=1)  # anchor and positive are the same
    learner.partial_fit(triplets).partial_fit(np.zeros((3, 3, 6)))
    assert learner.n_skipped_ == 3
    assert np.isfinite(learner.transform(x)).all()
    copied = copy.deepcopy(learner)
    same(copied.partial_fit(triplets), learner.partial_fit(triplets))
