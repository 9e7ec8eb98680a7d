"""`Warm` against a plain loop; its memory, its bound, and when it leaves Euclidean distance."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from oahu_streams import noisy_clouds as clouds, stream_of

from retrieval_oahu import Warm, from_labels, in_chunks, with_closure
from retrieval_oahu.recent_items import Memory, digest
from retrieval_oahu.warm import EXPERTS, FOLDS, SETTLE


def sectors() -> tuple[Any, Any]:
    """Three sectors of a circle of radius 1 to 20; the near and the far part of each is a class."""
    rng = np.random.default_rng(1)
    side, length = rng.integers(0, 3, 750), rng.uniform(0, 1, 750)
    angle, radius = 0.8 * side + rng.uniform(-0.3, 0.3, 750), np.exp(3 * length)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return x, 2 * side + (length > 0.5)


def correct(codes: Any, y: Any) -> float:
    d = ((codes[:, None] - codes) ** 2).sum(2)
    np.fill_diagonal(d, np.inf)
    return float((y[d.argmin(1)] == y).mean())


def test_euclidean_distance_is_served_until_an_expert_is_better():
    x, y = clouds()
    for components in (None, 6, 256):
        learner = Warm(components=components).prepare(x)
        for start in range(0, 600, 20):  # random triplets
            assert not learner.left_
            assert np.array_equal(learner.get_mahalanobis_matrix(), np.eye(6))
            assert np.array_equal(learner.transform(x), x - x.mean(0))
            rng = np.random.default_rng(start)
            learner.partial_fit(x[rng.integers(0, len(x), (20, 3))])
        learner = Warm(components=components).prepare(x).partial_fit(stream_of(clouds(), 2000))
        served = int(learner.alpha_.argmax()) - 1
        assert learner.left_ and learner.lead_[served] > learner._bound()[served]
        assert correct(learner.transform(x), y) > correct(x, y) + 0.1
        if EXPERTS[served].angle:
            assert np.allclose(np.linalg.norm(learner.transform(x), axis=1), 1)


def test_an_expert_that_only_orders_triplets_better_is_not_served():
    """Angles order these classes better than distances, but mix near and far neighbours."""
    x, y = sectors()
    learner = Warm(components=None).prepare(x)
    learner.learn_from(itertools.islice(in_chunks(from_labels(y, seed=3), x, 256), 16))
    angles = [n for n, expert in enumerate(EXPERTS) if expert.angle]
    assert (learner.triplets_lead_[angles] > 100).all() and (learner.lead_[angles] < -50).all()
    assert correct(learner.transform(x), y) >= correct(x, y) > 0.98


def test_the_bound_holds_at_every_time():
    """If experts are no better, the share of streams that ever leave Euclidean distance is at most
    `doubt`.
    """
    learner = Warm(doubt=0.2)
    bounds = np.zeros(2000)
    for n in range(2000):
        learner.differing_ = np.full(len(EXPERTS), n + 1.0)
        bounds[n] = learner._bound()[0]
    walks = np.random.default_rng(0).choice([-1, 1], (2000, 2000)).cumsum(axis=1)
    share = (walks > bounds).any(axis=1).mean()
    assert 0.002 < share < 0.2 / len(EXPERTS)
    variance, chance = 57 + 5, 0.2 / len(EXPERTS)
    log = math.log(1 + math.sqrt(variance / 5) / (2 * chance))
    assert bounds[57 - 1] == pytest.approx(math.sqrt(2 * variance * log))


def components_of(alike: list[tuple[int, int]], items: int) -> list[int]:
    """Return the component of each item in the graph of similar pairs."""
    component = list(range(items))
    changed = True
    while changed:
        changed = False
        for a, b in alike:
            low = min(component[a], component[b])
            changed |= component[a] != low or component[b] != low
            component[a] = component[b] = low
    return component


def loop_votes(
    distance: Any, item: int, seen: list[int], part: list[int], unlike: set[tuple[int, int]]
) -> float:
    """Return the mean vote of an item's nearest 1, 3, 5, 7 and 9 neighbours of known relation."""
    neighbours = sorted((distance(item, other), other) for other in seen if other != item)
    window = min(max(9, int(0.01 * len(seen))), len(seen) - 1)
    known: list[int] = []
    for _, other in neighbours[:window]:
        if part[other] == part[item] or (part[item], part[other]) in unlike:
            known.append(part[other])
    total = 0.0
    for number in (1, 3, 5, 7, 9):
        votes = known[:number]
        own = votes.count(part[item])
        against = max((votes.count(p) for p in votes if p != part[item]), default=0)
        total += 1.0 if own > against else 0.5 if own == against else 0.0
    return total / 5


def test_warm_by_loops():
    x, y = clouds()
    rows = list(itertools.islice(from_labels(y), 448))
    learner = Warm(components=None, prior=5.0, ridge=0.2).prepare(x).partial_fit(x[np.array(rows)])
    z = x - x.mean(0)
    fold = [int(np.frombuffer(digest(vector), np.uint64)[0] % FOLDS) for vector in z]
    learned, lead_of_triplets = 0, np.zeros(len(EXPERTS))
    alike: list[tuple[int, int]] = []
    apart: list[tuple[int, int]] = []
    seen: list[int] = []
    judged: dict[int, int] = {}
    verdicts: dict[int, Any] = {}

    def angle(m: Any, i: int, j: int) -> float:
        return -float(z[i] @ m @ z[j] / math.sqrt((z[i] @ m @ z[i]) * (z[j] @ m @ z[j])))

    def square(m: Any, i: int, j: int) -> float:
        return float((z[i] - z[j]) @ m @ (z[i] - z[j]))

    def measures(left_out: int) -> list[Any]:
        """Euclidean distance and the experts, trained without the pairs of a fold's items."""
        pairs = [(a, p) for a, p in alike[:learned] if left_out not in (fold[a], fold[p])]
        total = sum((np.outer(z[a] - z[p], z[a] - z[p]) for a, p in pairs), np.zeros((6, 6)))
        moment = total / (np.trace(total) / 6 if pairs else 1.0) * len(pairs) / (len(pairs) + 5.0)
        distances: list[Any] = [partial(square, np.eye(6))]
        for expert in EXPERTS:
            m = np.linalg.inv(np.eye(6) + moment / (0.2 * expert.reach))
            distances.append(partial(angle if expert.angle else square, m))
        return distances

    while learned < len(rows):
        block = rows[learned : learned + min(max(learned, 1), 64)]
        by_fold = [measures(left_out) for left_out in range(FOLDS)]
        for a, p, n in block:
            euclid, *experts = by_fold[fold[a]]
            wrong = [float(distance(a, p) > distance(a, n)) for distance in (euclid, *experts)]
            lead_of_triplets += wrong[0] - np.array(wrong[1:])
            alike.append((a, p))
            apart.append((a, n))
            seen += [item for item in dict.fromkeys((a, p, n)) if item not in seen]
        part = components_of(alike, len(z))
        unlike = {(part[a], part[n]) for a, n in apart} | {(part[n], part[a]) for a, n in apart}
        for item in dict.fromkeys(item for a, p, _ in block for item in (a, p)):
            if len(seen) > 9 and 2 * judged.get(item, -1) <= learned:
                judged[item] = learned
                euclid, *experts = by_fold[fold[item]]
                own = loop_votes(euclid, item, seen, part, unlike)
                votes = [loop_votes(d, item, seen, part, unlike) for d in experts]
                verdicts[item] = np.array(votes) - own
        learned += len(block)
    assert np.allclose(learner.lead_, sum(verdicts.values()))
    assert np.allclose(learner.differing_, sum(v**2 for v in verdicts.values()))
    assert np.allclose(learner.triplets_lead_, lead_of_triplets)
    assert learner.differing_.min() > 5 and np.ptp(learner.lead_) > 3
    assert set(fold) == set(range(FOLDS))
    served = int(learner.alpha_.argmax()) - 1
    assert learner.left_ == (served >= 0) and learner.left_
    distance, codes = measures(FOLDS)[served + 1], learner.transform(x)  # all pairs
    squares = ((codes[0] - codes) ** 2).sum(1)
    for j in range(1, 30):
        expected = distance(0, j)
        assert squares[j] == pytest.approx(2 + 2 * expected if EXPERTS[served].angle else expected)


def test_back_to_euclidean_distance_when_the_stream_changes():
    x, _ = clouds()
    learner = Warm().prepare(x).partial_fit(stream_of(clouds(), 600))
    assert learner.left_
    learner.partial_fit(stream_of(clouds(), 2000)[:, [0, 2, 1]])  # similar items become dissimilar
    assert not learner.left_ and np.array_equal(learner.get_mahalanobis_matrix(), np.eye(6))


@pytest.mark.parametrize("components", [3, 256])
def test_components_come_from_the_stream(components):
    triplets = stream_of(clouds(), SETTLE + 50)
    learner = Warm(components=components)
    learner.partial_fit(triplets[: SETTLE - 1])
    assert np.array_equal(learner.components_, np.eye(6)) and not learner.mean_.any()
    learner.partial_fit(triplets[SETTLE - 1 :])
    rows = triplets[:SETTLE].reshape(-1, 6)
    assert np.allclose(learner.mean_, rows.mean(0))
    directions = np.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][:components]
    assert np.allclose(learner.basis_.T @ learner.basis_, directions.T @ directions)
    assert learner.learned_ + len(learner.waiting_) == 50 and not learner.products_.size


def test_experts_are_judged_by_the_distances_of_their_embeddings():
    """Here, with all folds trained on all pairs and with fewer components than features."""
    x, _ = clouds()
    learner = Warm(components=3).prepare(x).partial_fit(stream_of(clouds(), 1024))
    learner.moment_[:], learner.pairs_[:] = learner.moment_[-1], learner.pairs_[-1]
    learner._decompose()
    block = stream_of(clouds(), 1088)[1024:]
    before = learner.triplets_lead_.copy()
    wrong = []
    for number in range(len(EXPERTS)):  # each expert alone, by its embeddings
        alone = copy.deepcopy(learner)
        alone.let_go_[0] = np.where(np.arange(len(EXPERTS)) == number, 1e9, -1e9)
        alone.triplets_lead_[:] = 1.0
        alone._decide()
        assert alone.alpha_[number + 1] == 1
        a, p, n = (alone.transform(block[:, i]) for i in range(3))
        wrong.append((((a - p) ** 2).sum(1) > ((a - n) ** 2).sum(1)).sum())
    a, p, n = (block[:, i] for i in range(3))
    euclid = (((a - p) ** 2).sum(1) > ((a - n) ** 2).sum(1)).sum()
    learner.partial_fit(block)
    assert np.array_equal(learner.triplets_lead_ - before, euclid - np.array(wrong))


class WithoutFolds(Warm):
    """Judges items with experts that have learned all pairs."""

    def _decompose(self) -> None:
        self.moment_[:], self.pairs_[:] = self.moment_[-1], self.pairs_[-1]
        super()._decompose()


def leavers(kind: type[Warm], closure: bool, streams: int) -> int:
    """Return how many streams of 300 triplets of random labels ever leave Euclidean distance."""
    count = 0
    for seed in range(streams):
        rng = np.random.default_rng(seed)
        x, y = rng.standard_normal((150, 40)), rng.integers(0, 3, 150)
        triplets: Any = from_labels(y, seed=seed)
        if closure:
            triplets = with_closure(triplets, seed=seed)
        rows = np.array(list(itertools.islice(triplets, 300)))
        learner = kind(seed=seed).prepare(x).partial_fit(x[rows])
        count += bool((learner.weights_[:, 0] < 1).any())
    return count


@pytest.mark.parametrize("closure", [False, True])
def test_few_streams_of_random_labels_leave_euclidean_distance(closure):
    assert leavers(Warm, closure, streams=24) <= 1  # 5 %
    if closure:  # its first triplets reuse few items, and in 40 dimensions any labels fit
        assert leavers(WithoutFolds, closure, streams=10) >= 5


def test_a_closure_stream_finds_a_better_geometry():
    x, y = clouds()
    triplets = itertools.islice(with_closure(from_labels(y)), 1500)
    learner = Warm().prepare(x).learn_from(in_chunks(triplets, x))
    assert learner.left_ and correct(learner.transform(x), y) > correct(x, y) + 0.1


def test_an_expert_is_served_only_while_its_proof_stands():
    x, y = clouds()
    shuffled = np.random.default_rng(0).permutation(y)
    learner, proofs = Warm().prepare(x), []
    for labels in (y, shuffled, y):
        for chunk in in_chunks(itertools.islice(from_labels(labels), 1500), x, 64):
            learner.partial_fit(chunk)
            proven = (learner.lead_ > learner._bound()) & (learner.triplets_lead_ > 0)
            assert learner.left_ == proven.any()
            if learner.left_:
                assert proven[int(learner.alpha_.argmax()) - 1]
            else:
                assert np.array_equal(learner.components_, np.eye(6))
            proofs.append(learner.left_)
    assert (np.diff(np.array(proofs, int)) < 0).any()  # a proof was lost


def memory(places: int) -> Memory:
    none = np.zeros((places, 2))
    parted, used = np.zeros((places, places), bool), np.zeros(places, np.int64)
    return Memory(none, none.astype(np.uint64), np.arange(places), parted, used)


def test_the_memory_knows_implied_relations_and_evicts_the_longest_unused():
    held = memory(6)
    vectors = np.arange(16.0).reshape(8, 2)

    def take(*items: int) -> list[int]:
        return [held.take(vectors[item], digest(vectors[item]))[0] for item in items]

    def unlike(x: int, y: int) -> bool:
        return bool(held.parted[held.group[x], held.group[y]])

    held.learn(*take(0, 1, 2))
    held.learn(*take(2, 3, 4))
    a, b, c, d, e = take(0, 1, 2, 3, 4)
    assert held.group[a] == held.group[b] and held.group[c] == held.group[d]
    assert unlike(b, d) and unlike(c, e)
    assert not unlike(a, e) and held.group[a] != held.group[e]
    held.learn(*take(5, 4, 0))  # the sixth place
    assert unlike(e, b)
    take(1, 2, 3, 4, 5)
    assert held.take(vectors[6], digest(vectors[6])) == (a, True)  # 0 was unused the longest
    assert not held.parted[held.group[a]].any() and (held.group == held.group[a]).sum() == 1
    assert held.take(vectors[1], digest(vectors[1])) == (b, False) and unlike(b, d)
    assert np.array_equal(held.vectors[a], vectors[6])
    assert (held.parted == held.parted.T).all() and not held.parted.diagonal().any()


def test_voters_are_among_the_nearest_share():
    held = memory(400)
    vectors = np.stack([np.arange(400.0), np.zeros(400)], axis=1)
    for vector in vectors:
        held.take(vector, digest(vector))
    held.learn(0, 15, 30)  # the numbers are also the distances from 0
    distances = np.abs(vectors[:1, 0] - vectors[:, 0][None])
    assert held.votes(np.array([0]), distances.copy()) == [0.5]  # none among the nine nearest
    assert held.votes(np.array([0]), distances.copy(), 0.05) == [1.0]
    held.learn(0, 12, 14)
    # the voters are 12 (for), 14 (against) and 15 (for)
    assert held.votes(np.array([0]), distances.copy(), 0.05) == [1.0]
    held.learn(0, 1, 10)
    held.learn(0, 1, 11)
    # Farthest first, the voters are 30, 15, 14, 12, 11, 10 and 1, of which 15, 12 and 1 are for.
    # One voter gives 0, three give ½, and five or more give 1.
    assert held.votes(np.array([0]), -distances, 1.0) == pytest.approx([(0 + 0.5 + 1 + 1 + 1) / 5])


def test_a_contradiction_replaces_the_earlier_relations_of_its_items():
    held = memory(6)
    places = [held.take(v, digest(v))[0] for v in np.arange(12.0).reshape(6, 2)]
    held.learn(0, 1, 2)
    held.learn(3, 4, 0)
    held.learn(0, 2, 1)  # contradicts the first triplet
    assert held.group[0] == held.group[2] and held.parted[held.group[0], held.group[1]]
    assert not held.parted[held.group[0], held.group[3]] and held.group[3] == held.group[4]
    assert places == list(range(6))
    assert (held.parted == held.parted.T).all() and not held.parted.diagonal().any()


def test_a_small_memory_is_bounded_and_saves_and_loads(tmp_path):
    triplets = stream_of(clouds(200), 900)  # 600 items, places for 256
    learner = Warm(memory=256).prepare(clouds(200)[0]).partial_fit(triplets[:500])
    arrays = {k: v for k, v in vars(learner).items() if isinstance(v, np.ndarray)}
    held = {name: value.shape for name, value in arrays.items()}
    learner.save(tmp_path / "x.safetensors")
    again = Warm.load(tmp_path / "x.safetensors").partial_fit(triplets[500:])
    learner.partial_fit(triplets[500:])
    for name, value in vars(learner).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value, getattr(again, name)), name
            assert value.shape == held[name] or name in ("weights_", "weights_at_", "waiting_")
    assert learner.let_go_[1].min() > 0 and learner.turnover_ > 0
