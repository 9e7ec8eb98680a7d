"""The matches of `Ranking` against those of full search, on real and on unusual codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from retrieval.evaluation import block_ranking
from retrieval.evaluation.block_ranking import Ranking
from retrieval.evaluation.evaluation import evaluate, matching
from retrieval.evaluation.neighbors import NeighborSearch, exact_neighbors
from sklearn.datasets import load_digits

GENERATOR = np.random.default_rng(0)


def expected(codes, labels, depth, gallery=None, gallery_labels=None):
    """Return the matches (Q, depth) of full search."""
    exclude = np.arange(len(codes)) if gallery is None else None
    gallery, gallery_labels = (codes, labels) if gallery is None else (gallery, gallery_labels)
    rows, _ = exact_neighbors(codes, gallery, depth, exclude=exclude)
    return gallery_labels[rows] == labels[:, None]


def images():
    digits = load_digits()
    pixels = np.concatenate([digits.images, digits.images[:, ::-1]])
    return pixels.reshape(-1, 64).astype(np.float32), np.tile(digits.target, 2)


def clustered(size=3000, width=24, classes=150):
    labels = GENERATOR.integers(0, classes, size)
    codes = GENERATOR.normal(size=(classes, width))[labels] + GENERATOR.normal(size=(size, width))
    return codes.astype(np.float32), labels


def kinds():
    """Return by name: codes, labels, and whether `Ranking` should decide nearly all queries."""
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


def ranking_of(name, depth):
    """Return a `Ranking` of all items, each of which needs `depth` ranks."""
    codes, labels, _ = KINDS[name]
    return Ranking(codes, labels, np.arange(len(codes)), np.full(len(codes), depth))


DEEP = ["clustered", "two decimals", "unit digits", "whole numbers, many ties"]


@pytest.mark.parametrize(("name", "share"), [(n, None) for n in KINDS] + [(n, 5) for n in DEEP])
def test_matches_are_those_of_full_search(name, share):
    """To depth 17, or to a fifth of the items."""
    codes, labels, decided = KINDS[name]
    depth = 17 if share is None else len(codes) // share
    assert Ranking.serves(len(codes), np.full(len(codes), depth)) == len(codes)
    truth, seen, failures, before = expected(codes, labels, depth), [], 0, codes.copy()
    for rows, matches, failed in ranking_of(name, depth):
        assert np.array_equal(matches[~failed], truth[rows[~failed]])
        failures += int(failed.sum())
        seen.append(rows)
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(len(codes)))
    assert np.array_equal(codes, before)
    # in a deep ranking, too many of the many ties are in doubt
    if decided and (share is None or name != "whole numbers, many ties"):
        assert failures < len(codes) / 20


def test_a_panel_of_too_many_candidates_is_left_to_full_search(monkeypatch):
    monkeypatch.setattr(block_ranking, "_MOST", 1000)
    assert all(failed.all() for _, _, failed in ranking_of("clustered", 17))


def test_items_in_doubt_are_measured():
    """With an error bound of 0, no item would be in doubt, and some matches would be wrong."""
    codes, labels, _ = KINDS["two decimals"]
    truth, sure = expected(codes, labels, 17), ranking_of("two decimals", 17)
    for panel in sure._panels:
        panel.error[:] = 0
    assert not all(np.array_equal(m[~f], truth[r[~f]]) for r, m, f in sure)


@pytest.mark.parametrize(
    "name", ["clustered", "far from zero", "huge", "one far away", "unit digits"]
)
def test_the_error_bound_holds_for_every_pair(name):
    codes, found = KINDS[name][0], ranking_of(name, 5)
    scaled = codes.astype(np.float64) * 2.0 ** -np.frexp(np.abs(codes).max())[1]
    scaled = torch.from_numpy(scaled[found._order])
    every = np.concatenate([panel.factors for panel in found._panels])
    for panel in found._panels:
        halves = block_ranking._turned(panel.factors) @ every.T
        own = scaled[panel.start : panel.start + len(panel.factors)]
        apart = torch.cdist(own, scaled, compute_mode="donot_use_mm_for_euclid_dist").numpy()
        error = np.abs(halves - apart**2 / 2)
        assert (2 * error <= panel.error[:, None]).all()
        assert error.max() > 0


@pytest.mark.parametrize("itself", [True, False])
def test_classes_of_every_size_and_singletons(itself):
    """Depths from 1 to more than `Ranking` serves, and items that are no queries."""
    codes, _ = clustered(4000)
    sizes = np.repeat([1200, 300, 3, 1], [1, 1, 698, 406])
    labels = GENERATOR.permutation(np.repeat(np.arange(1106), sizes))
    others = codes[::3] + np.float32(0.1), labels[::3]
    queries, query_class = (codes, labels) if itself else others
    relevant = np.bincount(labels)[query_class] - int(itself)
    order = np.argsort(relevant, kind="stable")
    order = order[relevant[order] > 0]
    gallery = None if itself else codes
    search = NeighborSearch(queries, gallery)
    truth = expected(queries, query_class, 1200, gallery, labels)
    seen = []
    for rows, matches in matching(search, query_class, labels, order, relevant[order]):
        assert matches.shape[1] >= relevant[rows].max()
        assert np.array_equal(matches, truth[rows, : matches.shape[1]])
        seen.append(rows)
    assert np.array_equal(np.sort(np.concatenate(seen)), np.sort(order))


def test_full_search_serves_only_other_distances_and_the_few_queries_in_doubt(monkeypatch):
    searched, inner = [], NeighborSearch.blocks

    def noted(self, asked, depths):
        searched.append(len(asked))
        return inner(self, asked, depths)

    monkeypatch.setattr(NeighborSearch, "blocks", noted)
    for name, distance, least, most in (
        ("clustered", None, 0, 0.02),
        ("all the same", None, 0, 1),
        ("clustered", torch.cdist, 1, 1),
    ):
        codes, labels, _ = KINDS[name]
        queries = np.arange(len(codes)), np.full(len(codes), 9)
        list(matching(NeighborSearch(codes, None, distance=distance), labels, labels, *queries))
        assert least <= sum(searched) / len(codes) <= most
        searched.clear()


def test_map_at_r_of_codes_whose_queries_are_all_in_doubt():
    pixels, digit = images()
    bits = np.sign((pixels - 8) @ GENERATOR.normal(size=(64, 10))).astype(np.float32)
    relevant = np.bincount(digit)[digit] - 1
    matches = expected(bits, digit, int(relevant.max()))
    by_loops = []
    for row, count in zip(matches, relevant, strict=True):
        hits = np.flatnonzero(row[:count])
        by_loops.append(sum((n + 1) / (rank + 1) for n, rank in enumerate(hits)) / count)
    values = evaluate(bits, digit, metrics=["map_at_r"]).values
    assert values["map_at_r"] == pytest.approx(np.mean(by_loops), abs=1e-12)
