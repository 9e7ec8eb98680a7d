"""Matches from a product in single precision against full search, on unusual codes."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from retrieval.evaluation import ranking
from retrieval.evaluation.evaluation import matching
from retrieval.evaluation.neighbors import Search, exact_neighbors
from retrieval.evaluation.ranking import Ranking
from sklearn.datasets import load_digits

GENERATOR = np.random.default_rng(0)


def expected(codes, labels, asked, depth, gallery=None, gallery_labels=None):
    """Return the matches (A, depth) of full search."""
    itself = gallery is None
    gallery, gallery_labels = (codes, labels) if itself else (gallery, gallery_labels)
    found, _ = exact_neighbors(codes[asked], gallery, depth, exclude=asked if itself else None)
    return gallery_labels[found] == labels[asked, None]


def images():
    found = load_digits().images
    turned = [found, found[:, ::-1]]
    pixels = np.concatenate(turned).reshape(-1, 64).astype(np.float32)
    return pixels, np.tile(load_digits().target, 2)


def clustered(size=3000, width=24, classes=150):
    labels = GENERATOR.integers(0, classes, size)
    codes = GENERATOR.normal(size=(classes, width))[labels] + GENERATOR.normal(size=(size, width))
    return codes.astype(np.float32), labels


def kinds():
    """Return codes and labels by name, and whether the ranking is expected to decide nearly all of
    them itself.
    """
    codes, labels = clustered()
    pixels, digit = images()
    unit = pixels / np.linalg.norm(pixels, axis=1, keepdims=True)
    near = np.ones((1500, 24)) + codes[:1500] * 1e-7
    crowd = np.concatenate([near, codes[1500:]]).astype(np.float32)
    twice = np.concatenate([codes[:1500], codes[:1500]])
    return {
        "clustered": (codes, labels, True),
        "unit digits": (unit, digit, True),
        "whole numbers, many ties": (pixels, digit, True),
        "far from zero": (codes + 300, labels, True),
        "each twice, with other labels": (twice, labels, True),
        "two decimals": (codes.round(1), labels, True),
        "half of them in a crowd": (crowd, labels, False),
        "all the same": (np.full((2500, 8), 0.3, np.float32), labels[:2500], False),
        "tiny": (codes * np.float32(1e-36), labels, True),
        "huge": (codes * np.float32(1e36), labels, True),
        "one far away": (np.concatenate([codes[1:], 1e5 * codes[:1]]), labels, False),
        "float64": (codes.astype(np.float64) * 1e150, labels, True),
    }


KINDS = kinds()


@cache
def truth_of(name):
    codes, labels, _ = KINDS[name]
    return expected(codes, labels, np.arange(len(codes)), 17)


@pytest.mark.parametrize("name", KINDS)
def test_matches_are_those_of_full_search(name):
    codes, labels, decided = KINDS[name]
    asked, depths = np.arange(len(codes)), np.full(len(codes), 17)
    assert Ranking.serves(len(codes), depths) == len(codes)
    truth, seen, failures, before = truth_of(name), [], 0, codes.copy()
    for rows, matches, failed in Ranking(codes, labels, asked, depths):
        assert np.array_equal(matches[~failed], truth[rows[~failed]])
        failures += int(failed.sum())
        seen.append(rows)
    assert np.array_equal(np.sort(np.concatenate(seen)), asked)
    assert np.array_equal(codes, before)
    if decided:
        assert failures < len(codes) / 20


@pytest.mark.parametrize(
    "name", ["clustered", "two decimals", "unit digits", "whole numbers, many ties"]
)
def test_deep_ranks_are_those_of_full_search(name):
    """Where one item of a few is asked for, candidates are found and ranked many at a time."""
    codes, labels, _ = KINDS[name]
    asked, depth = np.arange(len(codes)), len(codes) // 5
    truth = expected(codes, labels, asked, depth)
    found = Ranking(codes, labels, asked, np.full(len(codes), depth))
    left = 0
    for rows, matches, failed in found:
        assert np.array_equal(matches[~failed], truth[rows[~failed]])
        left += int(failed.sum())
    if name != "whole numbers, many ties":  # of which more are in doubt than it is worth to measure
        assert left < len(codes) / 20


def test_a_panel_of_too_many_candidates_is_left_to_full_search(monkeypatch):
    codes, labels, _ = KINDS["clustered"]
    monkeypatch.setattr(ranking, "_MOST", 1000)
    found = Ranking(codes, labels, np.arange(len(codes)), np.full(len(codes), 17))
    assert all(failed.all() for _, _, failed in found)


def test_what_is_in_doubt_is_measured():
    codes, labels, _ = KINDS["two decimals"]
    truth = truth_of("two decimals")
    sure = Ranking(codes, labels, np.arange(len(codes)), np.full(len(codes), 17))
    for panel in sure._panels:
        panel.error[:] = 0
    assert not all(np.array_equal(m[~f], truth[r[~f]]) for r, m, f in sure)


@pytest.mark.parametrize(
    "name", ["clustered", "far from zero", "huge", "one far away", "unit digits"]
)
def test_the_error_bound_holds_for_every_pair(name):
    codes, labels, _ = KINDS[name]
    found = Ranking(codes, labels, np.arange(len(codes)), np.full(len(codes), 5))
    scaled = codes.astype(np.float64) * 2.0 ** -np.frexp(np.abs(codes).max())[1]
    scaled = torch.from_numpy(scaled[found._order])
    every = np.concatenate([panel.factors for panel in found._panels])
    for panel in found._panels:
        halves = ranking._turned(panel.factors) @ every.T
        own = scaled[panel.start : panel.start + len(panel.factors)]
        apart = torch.cdist(own, scaled, compute_mode="donot_use_mm_for_euclid_dist").numpy()
        error = np.abs(halves - apart**2 / 2)
        assert (2 * error <= panel.error[:, None]).all()
        assert error.max() > 0


@pytest.mark.parametrize("itself", [True, False])
def test_classes_of_every_size_and_singletons(itself):
    """Depths from 1 to more than a ranking takes, and items that nothing is asked of."""
    codes, _ = clustered(4000)
    sizes = np.repeat([1200, 300, 3, 1], [1, 1, 698, 406])
    labels = GENERATOR.permutation(np.repeat(np.arange(1106), sizes))
    others = codes[::3] + np.float32(0.1), labels[::3]
    queries, query_class = (codes, labels) if itself else others
    relevant = np.bincount(labels)[query_class] - int(itself)
    asked = np.flatnonzero(relevant > 0)
    asked = asked[np.argsort(relevant[asked], kind="stable")]
    gallery = None if itself else codes
    search = Search(queries, gallery)
    truth = expected(queries, query_class, np.arange(len(queries)), 1200, gallery, labels)
    seen = []
    for rows, matches in matching(search, query_class, labels, asked, relevant[asked]):
        assert matches.shape[1] >= relevant[rows].max()
        assert np.array_equal(matches, truth[rows, : matches.shape[1]])
        seen.append(rows)
    assert np.array_equal(np.sort(np.concatenate(seen)), np.sort(asked))


def test_a_ranking_decides_where_it_can_and_full_search_elsewhere(monkeypatch):
    searched, inner = [], Search.blocks

    def noted(self, asked, depths):
        searched.append(len(asked))
        return inner(self, asked, depths)

    monkeypatch.setattr(Search, "blocks", noted)
    for name, most in (("clustered", 0.02), ("all the same", 1)):
        codes, labels, _ = KINDS[name]
        every = np.arange(len(codes)), np.full(len(codes), 9)
        list(matching(Search(codes, None), labels, labels, *every))
        assert sum(searched) <= most * len(codes)
        searched.clear()
    codes, labels, _ = KINDS["clustered"]
    every = np.arange(len(codes)), np.full(len(codes), 9)
    list(matching(Search(codes, None, distance=torch.cdist), labels, labels, *every))
    assert searched == [len(codes)]
