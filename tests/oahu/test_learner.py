"""OAHU as a learner: seeds, counters, bad input, damaged files, and its three uses."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import oahu_loops as loops
import pytest
from oahu_streams import fitted, same, stream_of
from retrieval.errors import DataError
from safetensors.numpy import save_file

from retrieval_oahu import OAHU, Spaces
from retrieval_oahu.network import Network

SMALL = {"depth": 2, "hidden": 8, "embedding": 4, "seeds": 60, "closure": 60}


def clouds(classes: int = 3, each: int = 30, apart: float = 3.0) -> tuple[Any, Any]:
    rng, y = np.random.default_rng(0), np.repeat(np.arange(classes), each)
    centres = rng.standard_normal((classes, 6))[y] * apart
    return centres + rng.standard_normal((len(y), 6)), y


def test_a_stream_is_learned_as_by_plain_loops():
    x, _ = clouds()
    learner = OAHU(**SMALL, dtype="float64", tau=0.3).prepare(x)
    h = learner.hidden
    # test_step.py compares the network's step with loops
    network = Network(learner.input_layer_.copy(), learner.layers_.copy(), h)
    triplets = stream_of(clouds(), 12)
    learner.partial_fit(triplets)
    alpha = [1 / 3] * 3
    for triplet in (triplets - x.mean(0)) / x.std(0):
        w = [m[:, :h].tolist() for m in network.levels[:2]]
        theta = [m[:, h:].tolist() for m in network.levels]
        losses = loops.losses(triplet.tolist(), w, theta, 0.3)
        network.step(triplet, np.array(alpha), 0.3, learner.learning_rate)
        alpha = loops.hedge(alpha, losses, learner.beta, learner.smoothing, "exp")
    assert np.allclose(learner.alpha_, alpha, atol=1e-13)
    assert np.allclose(learner.input_layer_, network.levels[0], atol=1e-13)
    assert np.array_equal(learner.weights_[-1], learner.alpha_)
    assert learner.weights_at_.tolist() == list(range(13))


def test_mean_and_deviation_are_those_of_the_stream_so_far():
    triplets = stream_of(clouds(), 30)
    learner = OAHU(**SMALL).partial_fit(triplets)
    rows = triplets.reshape(-1, triplets.shape[2])
    assert np.allclose(learner.mean_, rows.mean(0)) and np.allclose(learner.scale_, rows.std(0))


def test_nearly_constant_features_stay_finite():
    x, y = clouds()
    x[:, 0], x[:, 1] = 5.0, 0.0
    x[3, 1] = 1e-9
    learner = OAHU(**SMALL).fit(x, y)
    assert np.isfinite(learner.transform(x)).all() and (learner.scale_ > 1e-3).all()
    single = OAHU(**SMALL).partial_fit(np.ones((1, 3, 4)) + np.eye(3, 4)[None])
    assert np.isfinite(single.alpha_).all()


def test_every_triplet_is_used_and_the_seed_decides_everything():
    x, y = clouds()
    first, second, other = (OAHU(**SMALL, seed=s).fit(x, y) for s in (4, 4, 5))
    same(first, second)
    assert first.constraint_utilization_ == 1.0 and first.n_triplets_ == 120
    assert (first.input_layer_ != other.input_layer_).any()


@pytest.mark.parametrize("tau", [0.1, 0.3, 0.6])
def test_two_classes_are_separated_as_in_theorem_3_1(tau):
    x, y = clouds(2, 20, apart=2.0)
    sizes = {"depth": 1, "hidden": 32, "embedding": 8, "seeds": 3000, "closure": 0}
    learner = OAHU(**sizes, tau=tau, learning_rate=0.1).fit(x, y)
    alike = y[:, None] == y
    for space in learner.spaces(x).embeddings:
        d = np.linalg.norm(space[:, None] - space, axis=2)
        assert d[alike].max() <= tau and d[~alike].min() >= 2 - tau  # Eq 16
        assert d[~alike].min() >= 2 - 3 * tau > 0  # Eq 18


def test_contradictory_and_repeated_triplets_do_no_harm():
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((3, 6))
    learner = OAHU(**SMALL).prepare(rng.standard_normal((50, 6)))
    for _ in range(300):
        learner.partial_fit(np.array([[a, b, c], [a, c, b], [a, b, c]]))
    assert np.isfinite(learner.input_layer_).all() and np.isfinite(learner.layers_).all()
    assert learner.alpha_.sum() == pytest.approx(1) and learner.constraint_utilization_ == 1.0
    # two of three triplets say that b is nearer
    d = np.linalg.norm(np.diff(learner.spaces([b, a, c]).embeddings, axis=1), axis=2)
    assert (d[:, 0] < d[:, 1]).all()


@pytest.mark.parametrize(
    ("triplets", "words"),
    [
        (np.full((2, 3, 6), np.nan), "NaN or infinity"),
        (np.ones((2, 2, 6)), "shape"),
        (np.ones((3, 3, 5)), "5 features, but OAHU learns from 6"),
        (np.array([["a"] * 6] * 3), "real numbers"),
        (np.ones(6), "shape"),
    ],
)
def test_nothing_is_learned_from_a_bad_chunk(triplets, words):
    learner = OAHU(**SMALL).prepare(clouds()[0])
    before = copy.deepcopy(fitted(learner))
    with pytest.raises(ValueError, match=words):
        learner.partial_fit(triplets)
    assert all(np.array_equal(before[name], value) for name, value in fitted(learner).items())


def test_tau_beyond_the_theorem_is_allowed_with_a_warning():
    with pytest.warns(UserWarning, match="2/3"):
        OAHU(**SMALL, tau=1.9).prepare(clouds()[0])


def test_labels_without_triplets_are_refused():
    x, _ = clouds()
    for labels, words in (
        (np.zeros(len(x)), "one class"),
        (np.arange(len(x)), "only one"),
        (x[:, 0], "continuous"),
    ):
        with pytest.raises(ValueError, match=words):
            OAHU(**SMALL).fit(x, labels)


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "learner.safetensors"
    with pytest.raises(DataError, match="does not exist"):
        OAHU.load(path)
    OAHU(**SMALL).partial_fit(stream_of(clouds(), 3)).save(path)
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-20], b"pickle" * 50):
        path.write_bytes(content)
        with pytest.raises(DataError, match="safetensors"):
            OAHU.load(path)
    save_file({"x": np.zeros(2)}, path)
    with pytest.raises(DataError, match="has no learner"):
        OAHU.load(path)


def test_a_copy_shares_nothing_with_the_original():
    triplets = stream_of(clouds(), 20)
    original = OAHU(**SMALL).partial_fit(triplets[:10])
    copied = copy.deepcopy(original)
    before = copied.layers_.copy()
    original.partial_fit(triplets[10:])
    assert np.array_equal(copied.layers_, before)
    same(copied.partial_fit(triplets[10:]), original)


@pytest.mark.parametrize("k", [1, 3, 200])
def test_classify_retrieve_and_similar_by_plain_loops(k):
    x, y = clouds(apart=0.7)
    names = np.array(["coat", "bag", "dress"])[y]
    learner = OAHU(**SMALL, dtype="float64").fit(x, y)
    x[3] = x[4]  # a tie
    references, queries = learner.spaces(x[:60]), learner.spaces(x[60:])
    r = references.embeddings.transpose(1, 0, 2).tolist()
    q = queries.embeddings.transpose(1, 0, 2).tolist()
    alpha = learner.alpha_.tolist()
    actual = learner.classify(x[60:], references, names[:60], k)
    labels, count = names[:60].tolist(), min(k, 60)
    assert actual.tolist() == [loops.predict(value, r, labels, alpha, count) for value in q]
    rows, scores = learner.retrieve(x[60:], references, k)
    for i, value in enumerate(q):
        expected = loops.retrieve(value, r, alpha, min(k, 60))
        assert np.allclose(scores[i], [score for _, score in expected])
        if k < 60:  # all items: some scores are equal up to rounding
            assert rows[i].tolist() == [row for row, _ in expected]
        assert len(set(rows[i].tolist())) == min(k, 60)
    for threshold in (0.05, 0.3, 0.55):
        p, pairs = learner.similar(x[:30], x[60:], threshold), zip(r[:30], q, strict=True)
        assert np.allclose(p, [loops.probability(a, b, alpha, threshold) for a, b in pairs])


def test_ties_count_as_nearest_and_scores_are_merged_by_maximum():
    e = np.zeros((2, 3, 2))
    e[0], e[1] = [1, 0], [[1, 0], [0, 1], [0, -1]]
    references = Spaces(e, np.array([0.4, 0.6]))
    query = Spaces(np.array([[[1.0, 0.0]], [[0.0, 1.0]]]), np.array([0.4, 0.6]))
    rows, scores = query.retrieve(references, 3)
    # The first space has three ties with score .4 e⁰. The second has .6, .6 e^(−√2/2) and .6 e⁻¹.
    assert rows.tolist() == [[1, 0, 2]] and np.allclose(scores, [[0.6, 0.4, 0.4]])


def test_classify_retrieve_and_similar_refuse_wrong_arguments():
    x, y = clouds()
    learner = OAHU(**SMALL).fit(x, y)
    spaces, other = learner.spaces(x), OAHU(**{**SMALL, "depth": 1}).fit(x, y)
    for call, words in (
        (lambda: learner.classify(x, spaces, y[:5]), "5 labels for 90"),
        (lambda: learner.retrieve(x, spaces, 0), "must be at least 1, not 0"),
        (lambda: learner.similar(x, x[:3]), "same number of items"),
        (lambda: learner.similar(x, x, 1.0), "threshold"),
        (lambda: learner.retrieve(x, other.spaces(x)), "another model"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_memory_does_not_grow_with_the_stream():
    learner = OAHU(**SMALL)
    triplets = stream_of(clouds(), 1000)
    learner.partial_fit(triplets)
    bound = bytes_of(OAHU(**SMALL).prepare(clouds()[0])) + 513 * (3 + 1) * 8
    for _ in range(8):
        learner.partial_fit(triplets)
        assert bytes_of(learner) <= bound


def bytes_of(learner: Any) -> int:
    return sum(v.nbytes for v in fitted(learner).values() if isinstance(v, np.ndarray))
