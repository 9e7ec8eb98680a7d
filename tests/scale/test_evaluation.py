"""Evaluation of 60,000 vectors; every threshold is the product's own.

A sample of the queries is searched by plain loops; float64 holds their whole numbers exactly.
"""

import csv

import numpy as np
import pytest
from numpy.typing import NDArray
from retrieval import evaluate
from retrieval.evaluation import evaluation, pairwise, verify_run
from retrieval.evaluation.evaluation import Levels
from retrieval.evaluation.pairwise import evaluate_vectors
from retrieval.evaluation.verification import FOLDS, PER_FOLD
from retrieval.index.write_embeddings import embed_sources
from retrieval.training.comparison.compare import compare
from retrieval.training.train import train

from retrieval_engines.testing.small_bundles import make_bundle

pytestmark = pytest.mark.scale

COUNT = 60_000
WIDTH = 32
PER_CLASS = 10
SAMPLE = np.arange(7, COUNT, COUNT // 100)
METRICS = ["recall_at_1", "recall_at_8", "r_precision", "map_at_r"]

Ints = NDArray[np.int64]


@pytest.fixture(scope="module")
def labels():
    return np.random.default_rng(1).permutation(np.arange(COUNT) // PER_CLASS)


@pytest.fixture(scope="module")
def codes(labels):
    """Whole numbers, so that distances are exact in every precision, and many are equal."""
    random = np.random.default_rng(0)
    centres = random.integers(-12, 13, (COUNT // PER_CLASS, WIDTH))
    return (centres[labels] + random.integers(-8, 9, (COUNT, WIDTH))).astype(np.float32)


def ranking(query: NDArray, gallery: NDArray, leave_out: int | None = None) -> Ints:
    """Return the rows of the gallery, nearest first; equal distances are ordered by row."""
    gallery, query = gallery.astype(float), query.astype(float)
    squared = np.einsum("ij,ij->i", gallery, gallery) - 2 * gallery @ query + query @ query
    order = squared.argsort(kind="stable")
    return order[order != leave_out]


def metrics_of(matches: NDArray[np.bool_]) -> list[float]:
    """Return `METRICS` of one query, whose ranking is right where `matches` is True."""
    relevant = int(matches.sum())
    first = matches[:relevant]
    precision = np.cumsum(first) / np.arange(1, relevant + 1)
    return [
        matches[:1].any(),
        matches[:8].any(),
        first.mean(),
        (precision * first).sum() / relevant,
    ]


def test_each_item_searches_among_all_others(codes, labels):
    result = evaluate(codes, labels, metrics=METRICS)
    assert (result.queries, result.gallery) == (COUNT, COUNT)
    assert 0.1 < result.values["map_at_r"] < 0.9
    for row in SAMPLE:
        expected = metrics_of(labels[ranking(codes[row], codes, row)] == labels[row])
        actual = [result.per_query[name][row] for name in METRICS]
        np.testing.assert_allclose(actual, expected, atol=1e-12)


def test_grades_of_60_000_items_are_made_in_blocks(codes, labels):
    chosen = np.arange(0, COUNT, COUNT // 300)
    assert len(chosen) * COUNT > evaluation._GRADES
    genus = labels // 20
    result = evaluate(
        codes[chosen],
        labels[chosen],
        gallery=codes,
        gallery_labels=labels,
        metrics=["ndcg_at_10"],
        relevance=Levels([labels[chosen], genus[chosen]], [labels, genus]),
    )
    discount = 1 / np.log2(np.arange(2, 12))
    for place in range(0, len(chosen), 10):
        row = chosen[place]
        grades = np.where(labels == labels[row], 2, np.where(genus == genus[row], 1, 0))
        ideal = np.sort(grades)[::-1][:10] @ discount
        expected = grades[ranking(codes[row], codes)[:10]] @ discount / ideal
        assert result.per_query["ndcg_at_10"][place] == pytest.approx(expected)


def test_embedded_folders_are_searched_in_blocks_of_queries_and_gallery(tmp_path):
    """Few queries of each block have items of their class in the gallery."""
    width = 512
    bundle = make_bundle(tmp_path / "bundle", features=8, width=width)
    gallery = pairwise._GALLERY_BYTES // (8 * width) + 100
    queries = pairwise._QUERIES + 100
    random = np.random.default_rng(2)
    centres = random.integers(-9, 10, (gallery // 8 + 1, 8))
    classes = {"gallery": np.arange(gallery) // 8, "queries": np.arange(queries) + gallery}
    answerable = np.arange(5, queries, 300)
    classes["queries"][answerable] = answerable % (gallery // 8)
    vectors = {}
    for name, numbers in classes.items():
        near = centres[numbers % len(centres)] + random.integers(-3, 4, (len(numbers), 8))
        vectors[name] = near @ np.random.default_rng(0).integers(-9, 10, (8, width))
        text = np.array([f"c{number}" for number in numbers])
        np.savez(tmp_path / f"{name}.npz", features=near.astype(np.float32), labels=text)
        embed_sources(bundle, tmp_path / f"{name}.npz", tmp_path / name, progress=False)
    folders = tmp_path / "queries", tmp_path / "gallery"
    result = evaluate_vectors(folders[0], gallery=folders[1], metrics=METRICS, progress=False)
    assert (result.queries, result.gallery) == (len(answerable), gallery)
    expected = []
    for row in answerable:
        order = ranking(vectors["queries"][row], vectors["gallery"])
        expected.append(metrics_of(classes["gallery"][order] == classes["queries"][row]))
    assert list(result.values.values()) == pytest.approx(np.mean(expected, axis=0))
    assert 0.05 < result.values["map_at_r"] < 0.95


def recipe(**more):
    """A recipe that trains nothing, so that the codes are the data's own vectors."""
    return {
        "name": "scale",
        "split": {"by": "class", "test": 0.5, "validation": 0.0},
        "sampler": {"classes": 16, "items": 4, "batches": 4},
        "backbone": {"name": "core.features"},
        "head": {"identity": True},
        "loss": {"name": "pml.contrastive"},
        "train": {"epochs": 1, "device": "cpu"},
    } | more


def test_pairs_of_wide_vectors_are_measured_in_blocks(tmp_path):
    pairs = 2 * FOLDS * PER_FOLD
    width = verify_run._NUMBERS_PER_CALL // pairs + 10
    random = np.random.default_rng(3)
    labels = np.arange(8_000) // 8
    x = random.integers(-3, 4, (1_000, width))[labels] + random.integers(-9, 10, (8_000, width))
    data = x.astype(np.float32), [f"c{n:04}" for n in labels]
    run = train(recipe(), dataset=data, output=tmp_path / "run", progress=False)
    result = run.verify(progress=False)
    assert result.pairs["same"] + result.pairs["different"] == pairs
    with (run.path / "verification-test-pairs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == pairs
    for row in rows[::50]:
        first, second = (data[0][int(row[key])].astype(float) for key in ("first", "second"))
        assert float(row["distance"]) == pytest.approx(np.linalg.norm(first - second))


def test_a_recipe_is_compared_with_its_baselines_on_60_000_vectors(tmp_path, codes, labels):
    """The recipe only scales the data's vectors, so that each run measures what `evaluate` does."""
    text = [f"c{n:05}" for n in labels]
    np.savez(tmp_path / "data.npz", features=codes, labels=np.array(text))
    table = recipe(data={"name": "core.features", "file": str(tmp_path / "data.npz")})
    del table["name"]
    result = compare(
        [table | {"name": "one"}],
        tmp_path / "comparison",
        seeds=2,
        progress=False,
    )
    rows = {row.name: row for row in result.contestants}
    test = train(table, output=tmp_path / "run", progress=False).splits.query
    assert len(test) == COUNT // 2
    expected = evaluate(codes[test], labels[test], metrics=["map_at_r"]).values["map_at_r"]
    assert [row["map_at_r"] for row in rows["one"].metrics] == pytest.approx([expected] * 2)
