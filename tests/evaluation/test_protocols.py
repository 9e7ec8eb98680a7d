"""Graded relevance, groups and random galleries: against plain loops, and in a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from metrics_by_loops import nearest_by_loops, random_items
from PIL import Image
from retrieval.errors import DataError
from retrieval.evaluation import evaluation
from retrieval.evaluation.evaluation import Levels, Tags, evaluate
from retrieval.evaluation.neighbors import Exclusion
from retrieval.metrics.recall_map_ndcg import NDCGAt, RecallAt

GRADED = {"ndcg": NDCGAt(5), "exp": NDCGAt(3, "exponential"), "recall": RecallAt(1)}


def ranked(codes, gallery, i, itself, hidden=lambda i, j: False):
    """Return the rows of the gallery that query i may see, nearest first."""
    seen = [j for j in range(len(gallery)) if not (itself and i == j) and not hidden(i, j)]
    return [j for _, j in nearest_by_loops(codes[i], gallery, seen)]


def plain(codes, gallery, grade, match, itself, hidden=lambda i, j: False):
    """Return the mean of each metric of `GRADED`, and the number of queries."""
    sums, queries = dict.fromkeys(GRADED, 0.0), 0
    for i in range(len(codes)):
        order = [grade(i, j) for j in ranked(codes, gallery, i, itself, hidden)]
        if not any(g >= match for g in order):
            continue
        queries += 1
        best = sorted(order, reverse=True)
        for name, k, gain in (("ndcg", 5, lambda g: g), ("exp", 3, lambda g: 2**g - 1)):
            dcg, ideal = (
                sum(gain(g) / math.log2(rank + 2) for rank, g in enumerate(grades[:k]))
                for grades in (order, best)
            )
            sums[name] += dcg / ideal
        sums["recall"] += order[0] >= match
    return {name: value / queries for name, value in sums.items()}, queries


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("parted", [False, True])
def test_levels_of_classes(tied, parted):
    codes, labels, random = random_items(1, 40, tied)
    genus = [f"g{n // 2}" if n > 2 else None for n in labels]  # two classes of no genus
    family = [f"f{n // 4}" for n in labels]
    rest = random_items(2, 30, tied)
    genera = [f"g{n // 2}" if n > 2 else "" for n in rest[1]]
    others = (list(rest[1]), genera, [f"f{n // 4}" for n in rest[1]])
    ours = (list(labels), genus, family)
    gallery, theirs = (rest[0], others) if parted else (codes, ours)
    cameras = random.integers(0, 3, 40).tolist()
    their_cameras = random.integers(0, 3, 30).tolist() if parted else cameras

    def grade(i, j):
        same = [ours[n][i] == theirs[n][j] and ours[n][i] not in (None, "") for n in range(3)]
        return max((3 - level for level in range(3) if same[level]), default=0)

    expected, asked = plain(
        codes, gallery, grade, 3, not parted, lambda i, j: cameras[i] == their_cameras[j]
    )
    sides = {"gallery": gallery, "gallery_labels": rest[1]} if parted else {}
    relevance = Levels(ours, others if parted else None)
    exclude = Exclusion(cameras, their_cameras if parted else None)
    options = {"metrics": GRADED, "relevance": relevance, "exclude": exclude}
    found = evaluate(codes, labels, **sides, **options)
    assert found.values == pytest.approx(expected, abs=1e-12) and found.queries == asked


def test_items_of_several_labels(monkeypatch):
    codes, labels, random = random_items(3, 40)
    tags = [
        [f"t{t}" for t in random.choice(12, size=random.integers(0, 4), replace=False)]
        for _ in range(40)
    ]
    expected, asked = plain(codes, codes, lambda i, j: len({*tags[i]} & {*tags[j]}), 1, True)
    found = evaluate(codes, labels, metrics=GRADED, relevance=Tags(tags))
    assert found.values == pytest.approx(expected, abs=1e-12) and found.queries == asked < 40
    monkeypatch.setattr(evaluation, "_GRADES", 3 * 40)  # three queries at once
    assert evaluate(codes, labels, metrics=GRADED, relevance=Tags(tags)) == found
    says = "40 queries and 40 gallery items, but relevance has grades for 39 and 39"
    with pytest.raises(DataError, match=says):
        evaluate(codes, labels, metrics=GRADED, relevance=Tags(tags[1:]))


def test_one_level_equals_plain_labels():
    codes, labels, _ = random_items(4, 60)
    expected, _ = plain(codes, codes, lambda i, j: float(labels[i] == labels[j]), 1, True)
    for relevance in (None, Levels([list(labels)])):
        values = evaluate(codes, labels, metrics=GRADED, relevance=relevance).values
        assert values == pytest.approx(expected, abs=1e-12)


def test_metrics_by_group():
    codes, labels, random = random_items(5, 50)
    vendors, counts = [f"v{n}" for n in random.integers(0, 3, 50)], np.bincount(labels)
    found = evaluate(codes, labels, metrics=["recall_at_1"], by=vendors)
    for vendor in ("v0", "v1", "v2"):
        own = [i for i in np.flatnonzero(counts[labels] > 1) if vendors[i] == vendor]
        hits = [labels[ranked(codes, codes, i, True)[0]] == labels[i] for i in own]
        expected = {"recall_at_1": pytest.approx(np.mean(hits)), "queries": len(hits)}
        assert found.groups[vendor] == expected
    assert found.values == evaluate(codes, labels, metrics=["recall_at_1"]).values
    with pytest.raises(DataError, match="50 queries and 2 values to group by"):
        evaluate(codes, labels, by=["a", "b"])


RECIPE = """
name = "r"
data = { name = "core.csv", manifest = "items.csv" }
split.validation = 0
sampler = { classes = 2, items = 2, batches = 1 }
backbone = { name = "core.pixels", size = 8 }
head.embedding_size = 4
loss.name = "pml.contrastive"
train.epochs = 1
[evaluate]
metrics = ["recall_at_1", "ndcg_at_5"]
levels = ["genus"]
by = "vendor"
gallery_items = 1
repetitions = 2
"""


def test_everything_in_a_run(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    rows = ["path,label,split,vendor,genus"]
    for number in range(48):
        label = number // 4
        pixels = random.integers(0, 100, (8, 8), dtype=np.uint8) + np.uint8(8 * label)
        Image.fromarray(pixels).save(f"{number}.png")
        side = "train" if label < 4 else "test"
        rows.append(f"{number}.png,{label},{side},v{number % 2},g{label // 2}")
    Path("items.csv").write_text("\n".join(rows) + "\n")
    Path("r.toml").write_text(RECIPE)
    done = cli("train", "r.toml")
    assert done.code == 0, done.err
    done = cli("evaluate", "runs/r", "--baseline", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    rows = ["trained", "raw pixels"]
    assert list(found["metrics"]) == rows and (found["queries"], found["gallery"]) == (24, 8)
    assert set(found["groups"]["trained"]) == {"v0", "v1"}
    for kind in ("spread", "metrics"):
        assert found[kind]["trained"].keys() == {"recall_at_1", "ndcg_at_5"}
    table = cli("evaluate", "runs/r").out
    again = json.loads(Path("runs/r/evaluation-test.json").read_text())["metrics"]
    # random galleries are the same ones
    assert again == {"trained": found["metrics"]["trained"]}
    assert "trained, by group:" in table and "over random galleries" in table
