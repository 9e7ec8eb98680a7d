"""A score that cannot be measured is refused before training, and is never the best score."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import retrieval
from comparing import go
from PIL import Image
from refusals import refusal
from retrieval.errors import DataError
from retrieval.recipe.read import check_recipe, to_toml
from retrieval.run.resume import Position
from retrieval.training.check import run_one_batch
from retrieval.training.monitor import Monitor
from retrieval.training.trainer import train
from trained_weights import SMALL

PARTS = {
    "net": {"loss": {"name": "pml.contrastive"}},
    "frozen": {"backbone": {"name": "core.pixels", "size": 8}, "loss": {"name": "pml.contrastive"}},
    "learner": {
        "learner": {"name": "core.lda"},
        "sampler": None,
        "head": None,
        "loss": None,
        "train": {"device": "cpu"},
    },
}


def items(folder: Path, **sides: list[int]) -> Path:
    """A table of random photos: `train=[4, 4]` has two classes of four photos, by two cameras."""
    random = np.random.default_rng(0)
    rows = ["path,label,split,camera,genus"]
    for side, counts in sides.items():
        for number, count in enumerate(counts):
            for photo in range(count):
                name = f"{side}-{number}-{photo}.png"
                pixels = random.integers(0, 255, (8, 8)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / name)
                rows.append(f"{name},{side} {number},{side},{photo % 2},genus")
    (folder / "items.csv").write_text("\n".join(rows) + "\n")
    return folder / "items.csv"


def recipe(table: Path, kind: str = "net", **tables: Any) -> Any:
    """A recipe over the items of a table."""
    data = {"name": "core.csv", "manifest": str(table)}
    merged = {**SMALL, "split": {"by": "given"}, **PARTS[kind], "data": data, **tables}
    return check_recipe({k: v for k, v in merged.items() if v is not None})


@pytest.mark.parametrize("kind", PARTS)
def test_a_validation_side_without_pairs_is_refused_before_training(kind, tmp_path):
    table = items(tmp_path, train=[4, 4, 4, 4], validation=[1, 1, 1], test=[4, 4])
    for call in (lambda r: train(tmp_path / "run", r), run_one_batch):
        said = refusal(DataError, call, recipe(table, kind))
        assert said.startswith("No item of the validation side has another of its class to find")
        assert "or train without a validation side" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("evaluate", "counts", "said"),
    [
        ({"exclude": "genus"}, [4, 4], "as [evaluate] exclude = 'genus' hides the others"),
        ({"exclude": "genus", "gallery_items": 1}, [4, 4], "exclude = 'genus' hides the others"),
        ({"exclude": "camera", "levels": ["genus"]}, [1, 1, 2, 1], None),
        ({"exclude": "genus", "levels": ["genus"]}, [4, 4], "exclude = 'genus' hides the others"),
        ({"open_set": [0.1]}, [4, 4], "open_set: no query is unknown"),
    ],
)
def test_a_protocol_that_hides_every_right_answer_is_refused_before_training(
    evaluate, counts, said, tmp_path
):
    table = items(tmp_path, train=[4, 4, 4, 4], test=counts)
    checked = recipe(table, evaluate=evaluate, split={"by": "given", "validation": 0.0})
    if said is None:
        run = train(tmp_path / "run", checked)
        assert retrieval.load(run.path).evaluate(progress=False).queries == 2
    else:
        assert said in refusal(DataError, train, tmp_path / "run", checked)
        assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_be_measured_is_a_sentence(tmp_path):
    table = items(tmp_path, train=[4, 4, 4, 4], test=[4, 4])
    none = {"by": "given", "validation": 0.0}
    folder = train(tmp_path / "run", recipe(table, split=none)).path
    written = (folder / "recipe.toml").read_text()
    changed = written.replace("[evaluate]\n", "")
    (folder / "recipe.toml").write_text(f'{changed}\n[evaluate]\nexclude = "genus"\n')
    said = refusal(DataError, retrieval.load(folder).evaluate, progress=False)
    assert "No item of the test side has another of its class to find" in said
    assert not (folder / "evaluation-test.json").exists()


def test_a_fold_that_cannot_be_measured_is_refused_before_any_fold_is_trained(tmp_path):
    table = items(tmp_path, train=[8, 8, 8, 8, 1, 1], test=[4, 4])
    tables = {"search": {"optimizer": {"lr": {"low": 1e-4, "high": 1e-2}}}}
    source = tmp_path / "hunt.toml"
    source.write_text(to_toml(recipe(table, name="hunt", **tables)))
    said = refusal(DataError, go, [source], tmp_path / "out", folds=3, repeats=6)
    assert said.startswith("hunt, in the search, where fold ")
    assert "no test class has two items" in said and "fold_by=item" in said
    assert not list((tmp_path / "out").rglob("fold-*"))


@pytest.mark.parametrize("metric", ["recall_at_1", "map_at_r"])
def test_nan_is_never_the_best(metric):
    monitor = Monitor(check_recipe({**SMALL, "train": {"monitor": metric}}))
    progress = Position(total=4)
    assert not monitor.note(progress, {metric: math.nan}, True)
    assert progress.best is None and progress.with_trained is None
    assert monitor.note(progress, {metric: 0.3}, True)
    assert not monitor.note(progress, {metric: math.nan}, True)
    assert progress.best == progress.with_trained == 0.3


def test_a_group_without_an_answerable_query_has_no_means():
    codes, labels = np.eye(4, 2), ["a", "a", "b", "c"]
    groups = retrieval.evaluate(codes, labels, by=["x", "x", "y", "y"]).groups
    assert groups["y"] == {"queries": 0.0}
    json.dumps(groups, allow_nan=False)
