"""Gallery items that are hidden from a query: against plain definitions, and in a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from metrics_by_loops import ALL, metrics_by_loops, nearest_by_loops, random_items
from PIL import Image
from retrieval.errors import DataError
from retrieval.evaluation.evaluate_run import Protocol, open_set
from retrieval.evaluation.evaluation import evaluate, resolve_metrics
from retrieval.evaluation.neighbors import Exclusion, Neighbors, NeighborSearch
from retrieval.run.open import ItemCodes, Run

from retrieval_lab.report import measured
from retrieval_lab.report.measured import SHOWN


def seen_by(i, labels, cameras, theirs, their_cameras, itself, same_label=False):
    """Return the rows of the gallery that query i may see."""
    shared = [cameras[i] not in (None, "") and cameras[i] == c for c in their_cameras]
    hidden = [s and (not same_label or labels[i] == t) for s, t in zip(shared, theirs, strict=True)]
    return [j for j in range(len(theirs)) if not (itself and i == j) and not hidden[j]]


def items(seed: int, count: int, tied: bool):
    codes, labels, random = random_items(seed, count, tied)
    return codes, labels, [["a", "b", "c", "", None][i] for i in random.integers(0, 5, count)]


@pytest.mark.parametrize("same_label", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("parted", [False, True])
def test_against_the_definitions(same_label, tied, parted):
    codes, labels, cameras = items(1, 70, tied)
    gallery, theirs, their_cameras = items(2, 50, tied) if parted else (None, None, None)
    other = (theirs, their_cameras) if parted else (labels, cameras)

    def seen(i: int) -> list[int]:
        return seen_by(i, labels, cameras, *other, not parted, same_label)

    expected, queries = metrics_by_loops(codes, labels, gallery, theirs, seen)
    sides = {"gallery": gallery, "gallery_labels": theirs, "metrics": ALL}
    exclude = Exclusion(cameras, their_cameras, same_label)
    found = evaluate(codes, labels, **sides, exclude=exclude)
    assert found.values == pytest.approx(expected, abs=1e-12)
    assert (found.queries, found.singletons) == (queries, 70 - queries)
    assert found.values != pytest.approx(evaluate(codes, labels, **sides).values, abs=1e-3)


def test_values_that_exclude_nothing_and_block_sizes_change_no_metric(monkeypatch):
    codes, labels, _ = items(3, 3000, False)  # so many that `Ranking` serves the plain search
    alone = Exclusion(list(range(3000)))
    assert evaluate(codes, labels, exclude=alone) == evaluate(codes, labels)
    codes, labels, cameras = items(4, 120, True)
    first = evaluate(codes, labels, metrics=ALL, exclude=Exclusion(cameras))
    for block in (1, 7, 119):
        monkeypatch.setattr(Neighbors, "block", lambda self, k, block=block: block)
        assert evaluate(codes, labels, metrics=ALL, exclude=Exclusion(cameras)) == first


def test_as_many_values_as_items_are_needed():
    codes, labels, cameras = items(6, 20, False)
    with pytest.raises(DataError, match="20 queries and 19 values to exclude by"):
        evaluate(codes, labels, exclude=Exclusion(cameras[1:]))
    few = Exclusion(cameras, ["a"] * 3)
    with pytest.raises(DataError, match="20 gallery items and 3 values"):
        evaluate(codes, labels, gallery=codes, gallery_labels=labels, exclude=few)
    every = evaluate(codes, labels, exclude=Exclusion(["one"] * 20))
    assert every.queries == 0 and every.singletons == 20


def rates_of(codes, labels, gallery, theirs, *fars, exclude=None):
    hidden = None if exclude is None else exclude.hidden(labels, theirs)
    return open_set(NeighborSearch(codes, gallery, hidden), labels, theirs, fars)


@pytest.mark.parametrize("same_label", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("parted", [False, True])
def test_open_set_by_the_definition(same_label, tied, parted):
    codes, labels, cameras = items(1, 70, tied)
    labels[:8] = np.arange(90, 98)  # classes of one item
    gallery, theirs, their_cameras = items(2, 50, tied) if parted else (codes, labels, cameras)
    best, known = [], []
    for i in range(70):
        seen = seen_by(i, labels, cameras, theirs, their_cameras, not parted, same_label)
        known.append(any(theirs[j] == labels[i] for j in seen))
        best.append((nearest_by_loops(codes[i], gallery, seen) or [(np.inf, -1)])[0])
    assert 0 < sum(known) < 70
    expected = {}
    for far in (0.0, 0.1, 0.5):
        rates = []
        for t in {a for a, j in best if j >= 0}:
            accepted = [i for i, (a, _) in enumerate(best) if a <= t]
            false = sum(not known[i] for i in accepted) / known.count(False)
            right = sum(known[i] and theirs[best[i][1]] == labels[i] for i in accepted)
            rates.append(right / sum(known) if false <= far else 0.0)
        expected[f"dir_at_far_{far:g}"] = max(rates)
    exclude = Exclusion(cameras, their_cameras if parted else None, same_label)
    sides = codes, np.asarray(labels), gallery if parted else None, np.asarray(theirs)
    rates = rates_of(*sides, 0.0, 0.1, 0.5, exclude=exclude)
    assert rates == pytest.approx(expected, abs=1e-12)


def test_an_open_set_has_known_and_unknown_queries():
    codes, labels, _ = items(6, 60, False)
    for classes, kind in ((labels + 20, "known"), (labels, "unknown")):
        with pytest.raises(DataError, match=f"no query is {kind}"):
            rates_of(codes, classes, codes, labels, 0.1)


def test_a_query_that_may_see_nothing_is_never_accepted():
    codes, labels = np.array([[0.0], [0.1], [0.2], [5.0]]), np.array([0, 0, 1, 2])
    exclude = Exclusion(["a", "a", "b", "c"], ["x", "x", "b", "b", "c"])
    gallery, theirs = np.array([[0.0], [9.0], [0.2], [0.3], [5.0]]), np.array([0, 0, 1, 1, 2])
    every = rates_of(codes, labels, gallery, theirs, 1.0, exclude=exclude)
    assert every == {"dir_at_far_1": 1.0}  # both of class 0, the only ones that see their own
    blind = Exclusion(["a", "a", "b", "b"], ["b"] * 5)
    rates = rates_of(codes, labels, gallery, theirs, 0.0, exclude=blind)
    assert rates == {"dir_at_far_0": 1.0}


@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize("block", [3, 1024])
def test_the_nearest_that_are_visible(parted, block, monkeypatch):
    monkeypatch.setattr(Neighbors, "block", lambda self, k: block)
    codes, labels, cameras = items(7, 40, True)
    gallery, theirs, their_cameras = items(8, 30, True) if parted else (codes, labels, cameras)
    hidden = Exclusion(cameras, their_cameras if parted else None).hidden(labels, theirs)
    queries = np.array([39, 0, 7, 7, 12])
    rows, apart = NeighborSearch(codes, gallery if parted else None, hidden).nearest(38, queries)
    for place, i in enumerate(queries.tolist()):
        seen = seen_by(i, labels, cameras, theirs, their_cameras, not parted)
        near = nearest_by_loops(codes[i], gallery, seen)[:38]
        squared, nearest = zip(*near, *[(np.inf, -1)] * (38 - len(near)), strict=True)
        assert rows[place].tolist() == list(nearest)
        assert apart[place].tolist() == np.sqrt(np.array(squared, np.float32)).tolist()
    assert (rows < 0).any()


RECIPE = """
name = "r"
data = { name = "core.csv", manifest = "items.csv" }
split.validation = 0.5
sampler = { classes = 2, items = 2, batches = 2 }
backbone = { name = "core.pixels", size = 8 }
head.embedding_size = 4
loss.name = "pml.contrastive"
train.epochs = 1
evaluate.exclude = "camera"
"""


def test_in_a_run(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    rows = ["path,label,split,role,camera"]
    for number in range(32):
        item, camera = number // 4, number % 2
        side = "train," if item < 4 else f"test,{'query' if number % 4 == 0 else 'gallery'}"
        pixels = random.integers(0, 99, (8, 8), dtype=np.uint8) + 40 * camera
        Image.fromarray(pixels.astype(np.uint8)).save(f"{number}.png")
        rows.append(f"{number}.png,{item},{side},c{camera}")
    Path("items.csv").write_text("\n".join(rows) + "\n")
    Path("r.toml").write_text(RECIPE)
    assert cli("train", "r.toml").code == 0
    done = cli("evaluate", "runs/r", "--json")
    assert done.code == 0, done.err
    assert (json.loads(done.out)["queries"], json.loads(done.out)["gallery"]) == (4, 12)
    check_the_report(check_the_open_set())
    refused = cli("evaluate", "runs/r", "--bundle", "none")
    assert refused.code == 2
    assert "[evaluate] exclude: a bundle cannot be measured under this protocol" in refused.err
    wrong = cli("train", "r.toml", "--set", "evaluate.exclude=camra", "--set", "name=other")
    assert (
        wrong.code == 2
        and "[evaluate] exclude: the data have no metadata column 'camra'" in wrong.err
    )
    assert "Did you mean 'camera'?" in wrong.err and not Path("runs/other").exists()
    changes = ("--set", "evaluate.by=shop", "--set", 'evaluate.levels=["brand", "camera"]')
    wrong = cli("check", "r.toml", *changes)
    assert wrong.code == 2 and "r.toml has 2 problems" in wrong.err and "'brand'" in wrong.err
    assert "[evaluate] by: the data have no metadata column 'shop' (they have: ca" in wrong.err


def check_the_open_set() -> Any:
    """Open-set rates use the items that a query may see, and no pair of items is measured twice.

    Return the codes of all items.
    """
    run = Run.open(Path("runs/r"))
    table = run.recipe.evaluate.model_copy(update={"open_set": [0.5]})
    run.recipe = run.recipe.model_copy(update={"evaluate": table})
    codes, labels = ItemCodes(run, torch.device("cpu"))(np.arange(32)).numpy(), run.splits.labels
    cameras = [row["camera"] for row in run.dataset.metadata or []]
    query, gallery = run.splits.query, run.splits.gallery
    gallery = gallery[labels[gallery] != 7]  # the last class is unknown
    protocol = Protocol(run, query, gallery)
    pairs = []

    def counting(a, b):
        pairs.append(len(a) * len(b))
        return torch.cdist(a.double(), b.double())

    metrics = resolve_metrics("recall_at_1")
    row = protocol.measure(codes[query], codes[gallery], counting, metrics=metrics)
    assert sum(pairs) == len(query) * len(gallery)
    exclude = Exclusion([cameras[i] for i in query], [cameras[i] for i in gallery])
    sides = codes[query], labels[query], codes[gallery], labels[gallery]
    rates = rates_of(*sides, 0.5, exclude=exclude)
    assert row.values["dir_at_far_0.5"] == rates["dir_at_far_0.5"]
    return codes


def check_the_report(codes: Any) -> None:
    """The report's neighbours, metrics and pairs use the items that a query may see."""
    run = Run.open(Path("runs/r"))
    labels, cameras = run.splits.labels, [row["camera"] for row in run.dataset.metadata or []]
    results = measured.measure(run, 100)
    for place, query in enumerate(results.query.tolist()):
        seen = [j for j in run.splits.gallery.tolist() if cameras[j] != cameras[query]]
        order = [j for _, j in nearest_by_loops(codes[query], codes, seen)][:SHOWN]
        assert results.neighbours[place].tolist() == order + [-1] * (SHOWN - len(order))
        assert results.metrics["recall_at_1"][place] == (labels[order[0]] == labels[query])
    pairs = results.pairs
    firsts, seconds = pairs.items[pairs.first], pairs.items[pairs.second]
    assert all(cameras[a] != cameras[b] for a, b in zip(firsts, seconds, strict=True))
