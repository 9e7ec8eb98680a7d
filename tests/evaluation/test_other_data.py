"""A run on other data, whose protocol lists what is relevant, and its hits as a TREC run."""

from __future__ import annotations

import json
from pathlib import Path

import layouts
import numpy as np
import protocols_by_loops as loops
import pytest
from PIL import Image
from retrieval.base.trec import read_qrels, read_run
from retrieval.errors import DataError, RecipeError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.evaluation.evaluation import evaluate as measure
from retrieval.run.open import Run

RECIPE = """
name = "r"
data = { name = "core.csv", manifest = "items.csv" }
split.validation = 0
sampler = { classes = 2, items = 2, batches = 1 }
backbone = { name = "core.pixels", size = 8 }
head.embedding_size = 4
loss.name = "pml.contrastive"
train.epochs = 1
evaluate.metrics = ["recall_at_1", "precision_at_5", "r_precision", "map", "ndcg_at_5"]
"""
OXFORD = """
data = { name = "sets.roxford5k", folder = "oxford", counts = "any" }
[evaluate]
metrics = ["sets.oxford_ap", { name = "sets.oxford_precision_at", k = 1 }, "map"]
relevant = ["easy", "hard"]
ignored = ["junk"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a recipe, its pictures, and a small ROxford."""
    folder = tmp_path_factory.mktemp("other")
    random = np.random.default_rng(0)
    rows = ["path,label,split"]
    for number in range(36):
        label = number // 4
        pixels = random.integers(0, 200, (8, 8), dtype=np.uint8) + np.uint8(4 * label)
        Image.fromarray(pixels).save(folder / f"{number} x.png")
        rows.append(f"{number} x.png,{label},{'train' if label < 4 else 'test'}")
    (folder / "items.csv").write_text("\n".join(rows) + "\n")
    (folder / "r.toml").write_text(RECIPE)
    (folder / "oxford.toml").write_text(OXFORD)
    layouts.revisited(folder / "oxford")
    return folder


@pytest.fixture
def trained(cli, folder, monkeypatch):
    """The folder, with a trained run in it."""
    monkeypatch.chdir(folder)
    if not Path("runs/r").exists():
        done = cli("train", "r.toml")
        assert done.code == 0, done.err
    return folder


def test_a_run_is_measured_by_the_protocol_of_other_data(cli, trained):
    done = cli("evaluate", "runs/r", "--on", "oxford.toml", "--rankings", "hits.trec", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert (report["split"], report["queries"], report["gallery"]) == ("on-oxford", 2, 6)
    assert json.loads(Path("runs/r/evaluation-on-oxford.json").read_text()) == report
    assert not Path("runs/r/evaluation-test.json").exists()
    # the run's hits, which lack the junk, and the lists give the same metrics by loops
    hits, qrels = read_run(Path("hits.trec")), read_qrels(Path("hits.qrels"))
    gate = [f"jpg/tower_{i:06d}.jpg" for i in (0, 1, 2)]
    assert qrels["jpg/gate_000001.jpg"] == dict.fromkeys(gate, 1.0)
    assert {query: len(keys) for query, keys in hits.items()} == {
        "jpg/gate_000001.jpg": 5,
        "jpg/tower_000009.jpg": 6,
    }
    expected = [loops.revisited(hits[query], set(qrels[query]), set(), [1]) for query in hits]
    values = report["metrics"]["trained"]
    average = np.mean([average for average, _ in expected])
    assert values["sets.oxford_ap"] == pytest.approx(average, abs=1e-12)
    precision = np.mean([precisions[0] for _, precisions in expected])
    assert values["sets.oxford_precision_at(k=1)"] == pytest.approx(precision, abs=1e-12)


def test_the_numbers_of_trec_eval(cli, trained):
    done = cli("evaluate", "runs/r", "--rankings", "own.trec", "--json")
    assert done.code == 0, done.err
    values = json.loads(done.out)["metrics"]["trained"]
    qrels = read_qrels(Path("own.qrels"))
    assert len(qrels) == 20 and all(len(grades) == 3 for grades in qrels.values())
    assert "16%20x.png 0 17%20x.png 1\n" in Path("own.qrels").read_text()
    pytrec_eval = pytest.importorskip("pytrec_eval")
    with Path("own.qrels").open() as judged, Path("own.trec").open() as run:
        tables = pytrec_eval.parse_qrel(judged), pytrec_eval.parse_run(run)
    names = {
        "recall_at_1": "success_1",
        "precision_at_5": "P_5",
        "r_precision": "Rprec",
        "map": "map",
        "ndcg_at_5": "ndcg_cut_5",
    }
    measured = pytrec_eval.RelevanceEvaluator(tables[0], set(names.values())).evaluate(tables[1])
    for ours, theirs in names.items():
        mean = np.mean([row[theirs] for row in measured.values()])
        assert values[ours] == pytest.approx(mean, abs=1e-12), ours


def test_fixed_numbers_of_trec_eval():
    """Right, wrong, right, wrong: success_1, P_2, Rprec, map and ndcg_cut_5 of pytrec_eval."""
    metrics = ["recall_at_1", "precision_at_2", "r_precision", "map", "ndcg_at_5"]
    gallery = np.array([[1.0], [2.0], [3.0], [4.0]])
    actual = measure(
        np.zeros((1, 1)), ["a"], gallery=gallery, gallery_labels=list("abab"), metrics=metrics
    )
    expected = [1.0, 0.5, 0.5, 0.8333333333333333, 0.9197207891481876]
    assert list(actual.values.values()) == pytest.approx(expected, abs=1e-12)


def test_other_data_that_cannot_be_tested_on(cli, trained):
    run = Run.open("runs/r")
    path = trained / "wrong.toml"
    np.savez("v.npz", features=np.eye(4), labels=["a", "a", "b", "b"])
    for text, error, says in (
        ("[evaluate]\n", RecipeError, r"must have \[data\]"),
        (OXFORD + "[train]\nepochs = 2\n", RecipeError, "and nothing else"),
        (OXFORD.replace("junk", "junks"), RecipeError, "no metadata column 'junks'"),
        (OXFORD + 'by = "easy"\nexclude = "hard"\n', RecipeError, "exclude cannot be combined"),
        (OXFORD.replace('relevant = ["easy", "hard"]', ""), RecipeError, "ignored needs the lists"),
        (OXFORD.replace('["easy", "hard"]', '["easy", "junk"]'), DataError, "as relevant and as"),
        ('data = { name = "core.features", file = "v.npz" }\n', DataError, "the model takes image"),
    ):
        path.write_text(text)
        with pytest.raises(error, match=says):
            evaluate(run, on=path, progress=False)
    with pytest.raises(DataError, match="no validation side"):
        evaluate(run, on="oxford.toml", side="validation")
    done = cli("evaluate", "runs/r", "--rankings", "x.qrels")
    assert done.code == 2 and "needs another suffix" in done.err
