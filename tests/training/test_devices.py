"""Groups of two and four processes, by gloo on the loopback, train what one process would."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from retrieval.export.export_run import export
from retrieval.recipe.read import to_toml
from retrieval.run.folder import claimed
from retrieval.run.open import Run
from retrieval.training.trainer import train_run
from trained_weights import STEADY, apart, log

from .conftest import answers

SIMILAR = {"name": "pml.multi_similarity"}
# losses that are divided by anchors (with a miner, over triplets, over a combiner's distance), by
# items, and not at all
DIVIDED: dict[str, dict[str, Any]] = {
    "anchors": {"loss": SIMILAR, "miner": SIMILAR},
    "triplets": {"loss": {"name": "pml.triplet_margin", "margin": 0.3}},
    "combiner": {"loss": {"name": "pml.contrastive"}, "combiner": {"name": "toolbox.local"}},
    "items": {"loss": {"name": "pml.normalized_softmax"}},
    "whole": {"loss": {"name": "pml.lifted_structure"}},
}


@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_train_as_one_and_gather_codes_only(make, trains_as_one, world):
    names = list(DIVIDED) if world == 2 else ["anchors"]
    recipes = {name: make(**STEADY, **DIVIDED[name]) for name in names}
    for line, name in zip(trains_as_one(recipes, world, loss=1e-5), names, strict=True):
        assert not line["error"]
        assert line["widths"] == ([] if name == "items" else [12])  # features have 16, images 64


def test_processes_begin_a_run_together_or_not_at_all(make, processes, tmp_path):
    for name in ("first", "held", "late"):
        (tmp_path / f"{name}.toml").write_text(to_toml(make(**STEADY)))
    words = ["first", "held", "late~", "late+~"]
    with claimed(tmp_path / "held"):
        output = processes(2, "train_process.py", str(tmp_path), *words)
    errors = [line["error"] for line in answers(output)]
    assert "Another process" in errors.pop(1) and errors == ["", "", ""]
    assert (tmp_path / "late" / "summary.json").is_file()


def test_recipes_without_steps_are_refused_in_several_processes(make, processes, tmp_path):
    frozen = {"name": "toolbox.net", "frozen": True}
    recipes = {
        "learner": make(loss=None, learner={"name": "core.pca"}, split={"by": "item"}),
        "untrained": make(backbone=frozen, head={"identity": True}, train={"epochs": 1}),
    }
    for name, recipe in recipes.items():
        (tmp_path / f"{name}.toml").write_text(to_toml(recipe))
    for line in answers(processes(2, "train_process.py", str(tmp_path), *recipes)):
        assert "Start the command in one process" in line["error"]
    assert not any((tmp_path / name).exists() for name in recipes)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("script", ["blocks_process.py", "norm_process.py", "fc_process.py"])
def test_loss_norm_and_classes_of_all_shares_are_those_of_the_whole_batch(processes, world, script):
    processes(world, script)


def test_a_run_of_two_processes_with_batch_norm_is_that_of_one(make, processes, tmp_path):
    table = {"backbone": {"name": "toolbox.net", "dropout": 0.0}, "optimizer": STEADY["optimizer"]}
    for name, sync in (("whole", True), ("shares", False)):
        recipe = make(**table, train={"epochs": 1, "sync_batch_norm": sync})
        (tmp_path / f"{name}.toml").write_text(to_toml(recipe))
    processes(2, "train_process.py", str(tmp_path), "whole", "shares")
    one, whole, shares = (tmp_path / name for name in ("one", "whole", "shares"))
    train_run(one, make(**table, train={"epochs": 1}))
    assert apart(one, whole) < 1e-5 < 1e-3 < apart(one, shares)
    assert "warnings" not in log(whole)[0]
    assert any("sync_batch_norm = true" in line for line in log(shares)[0]["warnings"])
    export(Run.open(whole), tmp_path / "bundle", progress=False)
    nodes = [node.op_type for node in onnx.load(tmp_path / "bundle" / "encoder.onnx").graph.node]
    assert nodes.count("BatchNormalization") <= 1  # none if merged into the convolution
    assert not set(nodes) & {"Sqrt", "Sub", "ReduceSum"}
