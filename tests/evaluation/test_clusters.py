"""NMI and F1 against their definitions by plain counting; k-means on real vectors."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from retrieval.evaluation.evaluation import cluster_metrics, evaluate, kmeans, nmi, pair_f1
from sklearn.datasets import load_digits


def entropy(values):
    shares = [count / len(values) for count in Counter(values).values()]
    return -sum(share * math.log(share) for share in shares)


def plain_nmi(clusters, classes):
    """2 I(Ω; C) / (H(Ω) + H(C)), where I(Ω; C) = H(Ω) + H(C) − H(Ω, C)."""
    both = entropy(list(zip(clusters, classes, strict=True)))
    alone = entropy(clusters) + entropy(classes)
    return 2 * (alone - both) / alone


def plain_f1(clusters, classes):
    together = alike = both = 0
    for i, j in itertools.combinations(range(len(clusters)), 2):
        together += clusters[i] == clusters[j]
        alike += classes[i] == classes[j]
        both += clusters[i] == clusters[j] and classes[i] == classes[j]
    precision, recall = both / together, both / alike
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize("seed", range(2))
def test_against_plain_counting(seed):
    generator = np.random.default_rng(seed)
    classes = generator.integers(0, 5, 70) * 1000
    clusters = np.where(generator.random(70) < 0.6, classes // 1000, generator.integers(0, 7, 70))
    lists = clusters.tolist(), classes.tolist()
    assert nmi(clusters, classes) == pytest.approx(plain_nmi(*lists), abs=1e-12)
    assert pair_f1(clusters, classes) == pytest.approx(plain_f1(*lists), abs=1e-12)


def test_one_cluster_and_clusters_of_one_item():
    same, apart, many = np.zeros(6, int), np.arange(6), np.zeros(5_000_000, np.int32)
    for measure in (nmi, pair_f1):
        assert measure(same, same) == measure(apart, apart) == 1
        assert measure(same, apart) == 0
    assert pair_f1(many, many) == 1  # the number of pairs does not overflow


def test_digits_by_class_and_seed():
    codes, labels = load_digits(return_X_y=True)
    figures = cluster_metrics(codes, labels)
    assert figures == cluster_metrics(torch.from_numpy(codes), [str(label) for label in labels])
    assert 0.65 < figures["nmi"] < 0.85  # published k-means runs on this set: .74 to .75
    assert len(np.unique(kmeans(codes, 10))) == 10
    values = evaluate(codes, labels, metrics=["recall_at_1"], clusters=True).values
    assert values["nmi"] == figures["nmi"]
    assert values["f1"] == figures["f1"]


def test_metrics_of_a_collapsed_embedding():
    figures = cluster_metrics(np.ones((12, 3)), np.arange(12) % 3)
    assert figures == {"nmi": 0.0, "f1": pytest.approx(2 * 18 / (66 + 18))}


def gaussian(items, width, classes, noise=1.3):
    generator = np.random.default_rng(0)
    codes = generator.standard_normal((classes, width))[np.arange(items) % classes]
    return (codes + noise * generator.standard_normal((items, width))).astype(np.float32)


def test_an_offset_and_a_scale_change_nothing():
    codes = np.round(gaussian(1_000, 8, 20) * 64)  # whole numbers: sums are exact
    found = kmeans(codes, 20)
    assert (kmeans(codes * 2.0**40, 20) == found).all()
    assert nmi(kmeans(codes + 4096, 20), found) > 0.99


@pytest.mark.parametrize("count", [1, 9, 12, 40])
def test_fewer_different_codes_than_clusters(count):
    codes = np.repeat(np.eye(10, dtype=np.float32), 3, axis=0)
    found = kmeans(codes, count)
    pairs = set(zip(found.tolist(), codes.argmax(1).tolist(), strict=True))
    if count >= 10:
        assert len({cluster for cluster, _ in pairs}) == len(pairs) == 10
    assert found.min() >= 0 and found.max() < count
