"""The linear baselines and the warm start: each step against a plain float64 loop, chunks, save and load, what they learn."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval_oahu import LEGO, OASIS, OPML, RDML, Warm, from_labels, in_chunks
from retrieval_oahu.closure import Triplet
from retrieval_oahu.opml import one_pass
from retrieval_oahu.warm import POWERS, SETTLE

ALL = [LEGO, RDML, OASIS, OPML, Warm]


def clouds(each: int = 60, features: int = 6) -> tuple[Any, Any]:
    """Three classes that differ in two features, among noise that is larger."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(3), each)
    x = rng.standard_normal((len(y), features)) * np.array([1, 1, 4, 4, 4, 4][:features])
    x[:, :2] += np.array([[0, 0], [4, 0], [0, 4]])[y]
    return x + 10, y


def stream(count: int) -> Any:
    x, y = clouds()
    return next(in_chunks(itertools.islice(from_labels(y), count), x, count))


def fitted(learner: Any) -> dict[str, Any]:
    return {k: v for k, v in vars(learner).items() if k.endswith("_") and not k.startswith("_")}


def same(one: Any, other: Any) -> None:
    assert fitted(one).keys() == fitted(other).keys()
    for name, value in fitted(one).items():
        assert np.array_equal(value, fitted(other)[name]), name


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("prepared", [True, False])
def test_chunks_save_and_load_change_nothing(kind: Any, prepared: bool, tmp_path: Path) -> None:
    triplets = stream(300)
    triplets[5, 2] = triplets[5, 0]
    one, two, three = kind(), kind(), kind()
    if prepared:
        for learner in (one, two, three):
            learner.prepare(clouds()[0])
    one.partial_fit(triplets)
    for triplet in triplets:
        two.partial_fit(triplet)
    three.partial_fit(triplets[:170]).save(tmp_path / "x.safetensors")
    three = kind.load(tmp_path / "x.safetensors").partial_fit(triplets[170:])
    same(one, two)
    same(one, three)
    assert one.n_skipped_ == 1 and one.n_triplets_ == 300
    x = clouds()[0]
    assert np.array_equal(one.transform(x), three.transform(x))


@pytest.mark.parametrize("kind", [LEGO, RDML, OPML, Warm])
def test_they_find_what_tells_classes_apart(kind: Any) -> None:
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


def test_lego_is_that_of_a_loop_and_minimises_what_it_says() -> None:
    triplets = stream(40)
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


def test_rdml_is_that_of_a_loop_and_stays_positive_definite() -> None:
    triplets = stream(60)
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


def test_oasis_is_that_of_a_loop() -> None:
    triplets = stream(80)
    learner = OASIS(0.1, 0.03).partial_fit(triplets)
    w, used = np.eye(6), 0
    for triplet in triplets:
        a, p, n = (v / math.sqrt(sum(c * c for c in v)) for v in triplet)
        loss = max(0.0, 0.03 - sum(a[i] * w[i, j] * (p[j] - n[j]) for i in range(6) for j in range(6)))
        if loss > 0:
            v = np.outer(a, p - n)
            w = w + min(0.1, loss / (v**2).sum()) * v
            used += 1
    assert np.allclose(learner.similarity_, w) and learner.n_used_ == used and 0 < used < 80
    x = clouds()[0]
    s = learner.queries(x[:4]) @ learner.transform(x).T
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    assert np.allclose(s, unit[:4] @ w @ unit.T)


def test_opml_is_that_of_a_loop() -> None:
    triplets = stream(60)
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


def test_opml_makes_one_pass() -> None:
    labels = np.array([0, 0, 1, 1, 0, 2])
    assert list(one_pass(labels, np.arange(6))) == [
        Triplet(3, 2, 1),  # 0 and 1 have no other class before them, 2 none of its own
        Triplet(4, 1, 3),
    ]
    learner = OPML().fit(*clouds())
    assert learner.n_triplets_ <= len(clouds()[0])


def test_warm_is_euclid_before_the_first_triplet() -> None:
    x = clouds()[0]
    for learner in (
        Warm(components=None),
        Warm(components=6),
        Warm(),
        Warm(components=2),
        Warm(components=3),
    ):
        assert np.allclose(learner.prepare(x).get_mahalanobis_matrix(), np.eye(6), atol=1e-12)
    few = Warm(components=3, rest=False).prepare(x)
    centred = x - x.mean(0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    assert np.allclose(few.get_mahalanobis_matrix(), directions[:3].T @ directions[:3])


def test_warm_is_that_of_a_loop() -> None:
    triplets = stream(200)
    learner = Warm(components=None, prior=5.0, ridge=0.2).prepare(clouds()[0]).partial_fit(triplets)
    similar = [t[0] - t[1] for t in triplets]

    def metrics(count: int) -> list[Any]:
        total = sum((np.outer(d, d) for d in similar[:count]), np.zeros((6, 6)))
        mean = np.trace(total) / 6 if count else 1.0
        share = 5.0 / max(count, 1)
        a = (total / mean + share * np.eye(6)) / (1 + share) + 0.2 * np.eye(6)
        values, vectors = np.linalg.eigh(a)
        found = [vectors @ np.diag(values**-s) @ vectors.T for s in POWERS]
        free = a - 0.2 * np.eye(6)
        return [m / (np.trace(m @ free) / np.trace(free)) for m in found]

    errors, present = np.zeros(len(POWERS)), metrics(0)
    for number, (a, p, n) in enumerate(triplets, start=1):
        for expert, m in enumerate(present):
            near, far = (a - p) @ m @ (a - p), (a - n) @ m @ (a - n)
            errors[expert] += near > far
        if number % 64 == 0 or number in (1, 2, 4, 8, 16, 32):
            present = metrics(number)
    weights = np.exp(-math.sqrt(8 * math.log(len(POWERS)) / 200) * errors)
    weights /= weights.sum()
    assert np.allclose(learner.errors_, errors) and np.allclose(learner.alpha_, weights)
    assert np.allclose(
        learner.get_mahalanobis_matrix(), sum(w * m for w, m in zip(weights, present, strict=True))
    )
    assert np.ptp(errors) > 3


def test_warm_finds_its_components_in_the_stream() -> None:
    x, y = clouds()
    learner = Warm(components=3, rest=False)
    triplets = next(in_chunks(itertools.islice(from_labels(y), SETTLE + 50), x, SETTLE + 50))
    learner.partial_fit(triplets[: SETTLE - 1])
    assert np.array_equal(learner.components_, np.eye(6))
    learner.partial_fit(triplets[SETTLE - 1 :])
    rows = triplets[:SETTLE].reshape(-1, 6)
    centred = rows - rows.mean(0)
    directions = np.linalg.svd(centred, full_matrices=False)[2][:3]
    assert np.allclose(learner.basis_.T @ learner.basis_, directions.T @ directions)
    assert learner.components_.shape == (3, 6) and learner.learned_ == 50 and not learner.products_.size


@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize("unit_length", [True, False])
def test_warm_counts_errors_where_its_codes_lie(rest: bool, unit_length: bool) -> None:
    triplets = stream(100)
    x = clouds()[0]
    learner = Warm(components=3, rest=rest, unit_length=unit_length).prepare(x).partial_fit(triplets[:64])
    codes = learner.transform(x)
    assert codes.shape[1] == (6 if rest else 3)
    if unit_length:
        assert np.allclose(np.linalg.norm(codes, axis=1), 1)
    wrong = np.zeros(len(POWERS))
    for expert in range(len(POWERS)):  # each expert alone, by its codes
        alone = copy.deepcopy(learner)
        alone.alpha_ = np.eye(len(POWERS))[expert]
        alone._mix()
        for triplet in triplets[64:100]:
            a, p, n = alone.transform(triplet)
            wrong[expert] += ((a - p) ** 2).sum() > ((a - n) ** 2).sum()
    before = learner.errors_.copy()
    assert np.array_equal(learner.partial_fit(triplets[64:]).errors_ - before, wrong)


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        (LEGO(learning_rate=0.0), "learning_rate"), (LEGO(upper=0.0), "upper"), (LEGO(lower=100.0), "lower"),
        (RDML(learning_rate=-1.0), "learning_rate"), (OASIS(aggressiveness=0.0), "aggressiveness"),
        (OASIS(margin=float("nan")), "margin"), (OPML(gamma=0.0), "gamma"), (Warm(components=0), "components"),
        (Warm(prior=0.0), "prior"), (Warm(ridge=0.0), "ridge"),
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_refused_by_name(learner: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        learner.prepare(clouds()[0])


@pytest.mark.parametrize("kind", ALL)
def test_equal_items_and_constant_features_stay_finite(kind: Any) -> None:
    x, _ = clouds()
    x[:, 0] = 3.0
    learner = kind().prepare(x)
    triplets = np.stack([x[:50], x[:50], x[100:150]], axis=1)  # anchor and positive are the same
    learner.partial_fit(triplets).partial_fit(np.zeros((3, 3, 6)))
    assert learner.n_skipped_ == 3
    assert np.isfinite(learner.transform(x)).all()
    copied = copy.deepcopy(learner)
    same(copied.partial_fit(triplets), learner.partial_fit(triplets))
