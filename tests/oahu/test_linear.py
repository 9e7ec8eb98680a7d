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


def test_warm_is_euclid_before_the_first_triplet_and_until_refuted() -> None:
    x, _ = clouds()
    triplets = stream(2000)
    for components in (None, 6, 256, 2, 3):
        learner = Warm(components=components).prepare(x)
        for start in range(0, 300, 20):  # labels that mean nothing
            assert not learner.left_
            assert np.array_equal(learner.get_mahalanobis_matrix(), np.eye(6))
            assert np.array_equal(learner.transform(x), x - x.mean(0))
            rng = np.random.default_rng(start)
            learner.partial_fit(x[rng.integers(0, len(x), (20, 3))])
        learner = Warm(components=components).prepare(x).partial_fit(triplets)
        assert learner.left_ and learner.lead_ > learner._bound()
        assert np.allclose(np.linalg.norm(learner.transform(x), axis=1), 1)


def test_the_bound_holds_at_every_time() -> None:
    """Of streams without a difference, at most the share `doubt` ever leaves Euclid: here at any of 2,000 differing verdicts."""
    learner = Warm(doubt=0.05)
    bounds = np.zeros(2000)
    for n in range(2000):
        learner.differing_ = n + 1
        bounds[n] = learner._bound()
    walks = np.random.default_rng(0).choice([-1, 1], (2000, 2000)).cumsum(axis=1)
    share = (walks > bounds).any(axis=1).mean()
    assert 0.002 < share < 0.05
    n = 57
    assert bounds[n - 1] == pytest.approx(math.sqrt((n + 10) * (math.log((n + 10) / 10) + 2 * math.log(20))))


def test_warm_is_that_of_a_loop() -> None:
    triplets = stream(400)
    x = clouds()[0]
    learner = Warm(components=None, prior=5.0, ridge=0.2).prepare(x).partial_fit(triplets)
    mean, similar = x.mean(0), [t[0] - t[1] for t in triplets]

    def metrics(count: int) -> list[Any]:
        total = sum((np.outer(d, d) for d in similar[:count]), np.zeros((6, 6)))
        a = total / (np.trace(total) / 6 if count else 1.0) * count / (count + 5.0)
        values, vectors = np.linalg.eigh(np.eye(6) + a / 0.2)
        return [vectors @ np.diag(values**-s) @ vectors.T for s in POWERS]

    def hedged(errors: Any, count: int) -> Any:
        found = np.exp(-math.sqrt(8 * math.log(len(POWERS)) / max(count, 1)) * errors)
        return found / found.sum()

    def angles_wrong(m: Any, t: Any) -> float:
        a, p, n = t - mean
        near, far = ((a @ m @ o) / math.sqrt((a @ m @ a) * (o @ m @ o)) for o in (p, n))
        return float(near < far)

    errors, present, lead, differing, left = np.zeros(len(POWERS)), metrics(0), 0, 0, False
    turns = []
    for number, (a, p, n) in enumerate(triplets, start=1):
        weights = hedged(errors, number - 1)
        average = sum(w * m for w, m in zip(weights, present, strict=True))
        mine, euclid = angles_wrong(average, (a, p, n)), float(((a - p) ** 2).sum() > ((a - n) ** 2).sum())
        errors += [angles_wrong(m, (a, p, n)) for m in present]
        if mine != euclid:
            differing, lead = differing + 1, lead + int(euclid - mine)
            bound = math.sqrt((differing + 10) * (math.log((differing + 10) / 10) + 2 * math.log(1 / 0.05)))
            left = lead > 0 if left else lead > bound
        turns.append(left)
        if number % 64 == 0 or number in (1, 2, 4, 8, 16, 32):
            present = metrics(number)
    weights = hedged(errors, 400)
    assert (learner.lead_, learner.differing_, learner.left_) == (lead, differing, left) and left
    assert 10 < turns.index(True) < 400
    assert (learner.weights_[1:, 0] == 0).tolist() == turns and (learner.weights_.sum(1) == pytest.approx(1))
    assert np.allclose(learner.errors_, errors) and np.allclose(learner.alpha_, [0, *weights])
    m = sum(w * one for w, one in zip(weights, present, strict=True))
    assert np.allclose(learner.get_mahalanobis_matrix(), m)
    codes = learner.transform(x)
    norms = np.sqrt(np.einsum("nf,fg,ng->n", x - mean, m, x - mean))
    assert np.allclose(codes @ codes.T, (x - mean) @ m @ (x - mean).T / np.outer(norms, norms))
    assert np.ptp(errors) > 3


def test_warm_goes_back_to_euclid_when_the_stream_turns() -> None:
    x, _ = clouds()
    learner = Warm().prepare(x).partial_fit(stream(600))
    assert learner.left_
    turned = stream(2000)[:, [0, 2, 1]]  # what was alike is unlike
    learner.partial_fit(turned)
    assert not learner.left_ and np.array_equal(learner.get_mahalanobis_matrix(), np.eye(6))


@pytest.mark.parametrize("components", [3, 256])
def test_warm_finds_its_components_in_the_stream(components: int) -> None:
    x, y = clouds()
    learner = Warm(components=components)
    triplets = next(in_chunks(itertools.islice(from_labels(y), SETTLE + 50), x, SETTLE + 50))
    learner.partial_fit(triplets[: SETTLE - 1])
    assert np.array_equal(learner.components_, np.eye(6)) and not learner.mean_.any()
    learner.partial_fit(triplets[SETTLE - 1 :])
    rows = triplets[:SETTLE].reshape(-1, 6)
    assert np.allclose(learner.mean_, rows.mean(0))
    directions = np.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][:components]
    assert np.allclose(learner.basis_.T @ learner.basis_, directions.T @ directions)
    assert learner.learned_ == 50 and not learner.products_.size


def test_warm_counts_errors_where_its_codes_lie() -> None:
    triplets = stream(1060)
    x = clouds()[0]
    learner = Warm(components=3).prepare(x).partial_fit(triplets[:1024])
    assert learner.left_
    learner.learned_ = 10**9  # the weights stand still, and no refresh comes
    before, lead = learner.errors_.copy(), learner.lead_
    wrong = np.zeros(len(POWERS))
    for expert in range(len(POWERS)):  # each expert alone, by its codes
        alone = copy.deepcopy(learner)
        alone.errors_ = np.where(np.arange(len(POWERS)) == expert, 0.0, 1e9)
        alone._serve()
        for triplet in triplets[1024:]:
            a, p, n = alone.transform(triplet)
            wrong[expert] += ((a - p) ** 2).sum() > ((a - n) ** 2).sum()
    a, p, n = (learner.transform(triplets[1024:, i]) for i in range(3))
    served = ((a - p) ** 2).sum(1) > ((a - n) ** 2).sum(1)
    a, p, n = (triplets[1024:, i] for i in range(3))
    euclid = ((a - p) ** 2).sum(1) > ((a - n) ** 2).sum(1)
    learner._serve()
    learner.partial_fit(triplets[1024:])
    assert np.array_equal(learner.errors_ - before, wrong) and wrong.any()
    assert abs(learner.lead_ - lead - int(euclid.sum() - served.sum())) <= 1


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        (LEGO(learning_rate=0.0), "learning_rate"), (LEGO(upper=0.0), "upper"), (LEGO(lower=100.0), "lower"),
        (RDML(learning_rate=-1.0), "learning_rate"), (OASIS(aggressiveness=0.0), "aggressiveness"),
        (OASIS(margin=float("nan")), "margin"), (OPML(gamma=0.0), "gamma"), (Warm(components=0), "components"),
        (Warm(prior=0.0), "prior"), (Warm(ridge=0.0), "ridge"), (Warm(doubt=1.0), "doubt"),
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
