"""Distances by name and of other libraries; similarities are refused."""

from functools import partial

import numpy as np
import pytest
import torch
from pytorch_metric_learning import distances
from retrieval.errors import DataError, PluginError
from retrieval.evaluation.evaluation import evaluate
from retrieval.evaluation.verification import verification
from retrieval.plugin import Combiner
from scipy.spatial.distance import cdist, cosine as cosine_of_two
from sklearn.datasets import load_digits
from sklearn.metrics import DistanceMetric, pairwise


@pytest.fixture(scope="module")
def digits():
    codes, labels = load_digits(return_X_y=True)
    return codes[:300].astype(np.float32), labels[:300]


def recall(digits, distance, codes=None):
    codes = digits[0] if codes is None else codes
    return evaluate(codes, digits[1], metrics="recall_at_1", distance=distance).values


def nearest(digits, table):
    """Recall@1 by a plain argmin over a table of distances."""
    np.fill_diagonal(table, np.inf)
    return {"recall_at_1": (digits[1][table.argmin(1)] == digits[1]).mean()}


COSINES = {
    "name": "cosine",
    "scikit-learn": pairwise.cosine_distances,
    "SciPy": partial(cdist, metric="cosine"),
    "similarity": distances.CosineSimilarity(),
    "dot product": distances.DotProductSimilarity(),
    "torch": lambda a, b: 1 - torch.nn.functional.cosine_similarity(a[:, None], b[None], dim=2),
}


@pytest.mark.parametrize("distance", COSINES.values(), ids=COSINES)
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_the_cosine_ranks_alike_in_every_form(digits, distance, kind):
    expected = nearest(digits, pairwise.cosine_distances(digits[0].astype(float)))
    assert recall(digits, distance, kind(digits[0])) == expected
    assert expected["recall_at_1"] > 0.9


@pytest.mark.parametrize(
    ("distance", "name"),
    [
        ("euclidean", "euclidean"),
        (pairwise.euclidean_distances, "euclidean"),
        (cdist, "euclidean"),
        (pairwise.manhattan_distances, "manhattan"),
        (DistanceMetric.get_metric("manhattan"), "manhattan"),
        (DistanceMetric.get_metric("manhattan").pairwise, "manhattan"),
        (distances.LpDistance(normalize_embeddings=False, p=1), "manhattan"),
    ],
)
def test_distances_of_other_libraries(digits, distance, name):
    expected = nearest(digits, pairwise.pairwise_distances(digits[0], metric=name))
    assert recall(digits, distance) == expected


def test_the_product_of_unequal_lengths_ranks_by_the_product(digits):
    expected = nearest(digits, -digits[0].astype(float) @ digits[0].T)
    product = distances.DotProductSimilarity(normalize_embeddings=False)
    for distance in (product, product.compute_mat, lambda a, b: -a @ b.T):
        assert recall(digits, distance) == expected


def test_a_similarity_that_is_no_kernel_is_refused():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), 10)
    codes = (3 * rng.normal(size=(6, 8))[labels] + rng.normal(size=(60, 8))).astype("float32")
    with pytest.raises(DataError, match="distance is a similarity"):
        evaluate(
            codes[30:35],
            labels[30:35],
            gallery=codes[30:],
            gallery_labels=labels[30:],
            distance=pairwise.sigmoid_kernel,
        )


@pytest.mark.parametrize(
    "similarity",
    [
        pairwise.cosine_similarity,
        pairwise.linear_kernel,
        pairwise.rbf_kernel,
        pairwise.laplacian_kernel,
        pairwise.polynomial_kernel,
        pairwise.chi2_kernel,
        pairwise.additive_chi2_kernel,
        lambda a, b: a @ b.T,
        lambda a, b: -torch.cdist(a, b),
        lambda a, b: 1 / (1 + torch.cdist(a, b)),
    ],
)
def test_a_similarity_is_refused(digits, similarity):
    with pytest.raises(DataError, match=r"distance is a similarity.*would rank backwards"):
        recall(digits, similarity)
    queries, gallery = digits[0][:4], digits[0][4:]
    with pytest.raises(DataError, match="distance is a similarity"):
        evaluate(
            queries,
            digits[1][:4],
            gallery=gallery,
            gallery_labels=digits[1][4:],
            distance=similarity,
        )


def test_the_attribute_decides_for_a_distance_that_says_the_wrong_thing(digits):
    class Wrong(distances.LpDistance):
        def __init__(self):
            super().__init__()
            self.is_inverted = True

    with pytest.raises(DataError, match="distance is a similarity"):
        recall(digits, Wrong())


@pytest.mark.parametrize("spread", [0, 1e-6, 1e-3])
def test_a_collapsed_embedding_is_still_measured(digits, spread):
    noise = np.random.default_rng(0).normal(size=digits[0].shape)
    codes = (1 + spread * noise).astype(np.float32)
    for distance in (pairwise.cosine_distances, torch.cdist, distances.CosineSimilarity()):
        assert 0 <= recall(digits, distance, codes)["recall_at_1"] < 0.3


@pytest.mark.parametrize(
    ("distance", "says"),
    [
        ("cosin", "no distance 'cosin'. Did you mean 'cosine'"),
        ("manhattan", "as a function, such as sklearn.metrics.pairwise.manhattan_distances"),
        (np.eye(3), "numpy array of shape .3, 3.*must be 'euclidean', 'cosine' or a function"),
        (pairwise.paired_cosine_distances, "one number per pair"),
        (lambda a, b: torch.cdist(a, b) * float("nan"), "is NaN.*Check the distance"),
    ],
)
def test_what_is_no_distance_is_named(digits, distance, says):
    with pytest.raises(DataError, match=says):
        recall(digits, distance)


@pytest.mark.parametrize(
    ("distance", "says"),
    [
        (distances.CosineSimilarity, "is a class, CosineSimilarity; pass an object of it"),
        (cosine_of_two, "The distance cosine failed: ValueError"),
    ],
)
def test_a_distance_that_fails_is_named(digits, distance, says):
    with pytest.raises(PluginError, match=says):
        recall(digits, distance)


def test_a_code_of_zeros_has_no_cosine(digits):
    codes = digits[0].copy()
    codes[[3, 7]] = 0
    with pytest.raises(DataError, match="2 of 300 codes are all zeros, so they have no cosine"):
        recall(digits, "cosine", codes)


class Learned(Combiner):
    """A distance that an untrained net may give any values, such as larger ones for equal codes."""

    def compute_mat(self, query_emb, ref_emb):
        return -torch.cdist(query_emb, ref_emb)


def test_a_combiner_is_a_distance_by_its_contract(digits):
    expected = nearest(digits, -cdist(digits[0], digits[0]))
    for distance in (Learned(), Learned().compute_mat):
        assert recall(digits, distance) == expected


def test_reversed_pairs_are_warned_of(caplog):
    cosines, same = [0.9, 0.8, 0.1, 0.95, 0.2, 0.3], [1, 1, 0, 1, 0, 0]
    assert verification(cosines, same, [0, 0, 0, 1, 1, 1]).values["auc"] == 0
    assert "different pairs are nearer than same pairs" in caplog.text
    caplog.clear()
    verification([-cosine for cosine in cosines], same, [0, 0, 0, 1, 1, 1])
    assert not caplog.text
