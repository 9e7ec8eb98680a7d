"""The combiners in training: K = 1 equals no combiner, phases, the log, error messages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from retrieval.errors import RecipeError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.export.export_run import export
from retrieval.run.open import Run
from retrieval.training.check import run_one_batch
from trained_weights import fit, log, moved, reported, same, start, weights

Both = pytest.mark.parametrize("name", ["daml.discriminator", "daml.uniform"])
BY_CLASS = {"generator": None, "split": {"by": "class"}}
DISCRIMINATOR = {"name": "daml.discriminator", "metrics": 3, "hidden": 8}


@Both
def test_one_metric_is_the_plain_case_bit_for_bit(name, make, tmp_path):
    loss = {"name": "daml.contrastive"}
    ours = make(**BY_CLASS, combiner={"name": name, "metrics": 1}, loss=loss)
    single = fit(tmp_path, ours, "single")
    plain = fit(tmp_path, make(**BY_CLASS, combiner=None, loss=loss), "plain")
    assert same(single, plain)
    for key in ("loss", "validation_map_at_r", "validation_recall_at_1"):
        assert [line[key] for line in log(single)] == [line[key] for line in log(plain)]
    metrics = [evaluate(Run.open(run)).metrics["trained"] for run in (single, plain)]
    assert metrics[0] == metrics[1]


def test_the_layer_that_head_and_discriminator_share_is_the_discriminators(make, tmp_path):
    """Algorithm 2: first the local metrics with Γ = 1/K, then only the discriminator."""
    metric = {"name": "metric", "epochs": 1, "train": ["head"]}
    second = {"name": "weights", "epochs": 1, "train": ["combiner"]}
    tables = {**BY_CLASS, "combiner": DISCRIMINATOR}
    recipe = make(**tables, phase=[metric])
    folder = fit(tmp_path, recipe, "first")
    both = fit(tmp_path, make(**tables, phase=[metric, second]), "both")
    states = start(tmp_path, recipe), weights(folder), weights(both)
    # the loss has the combiner, too, as its distance
    before, first, both = (
        {k: v for k, v in state.items() if k.startswith("model.")} for state in states
    )
    own = {f"model.combiner.{x}.{y}" for x in ("flows", "out") for y in ("weight", "bias")}
    shared = {"model.head.flows.weight", "model.head.flows.bias"}
    embedding = {"model.head.embedding.0.weight", "model.head.embedding.0.bias"}
    assert both.keys() == own | shared | embedding
    assert moved(before, first) == embedding and moved(first, both) == own | shared
    assert torch.equal(both["model.head.flows.weight"], both["model.combiner.flows.weight"])
    assert log(folder)[-1]["load_1"] == pytest.approx(1 / 3)


def test_every_epoch_logs_mean_weights_and_warns_of_low_ones(make, tmp_path):
    """With the paper's μ and no balance, one metric gets all the weight."""
    tables = {**BY_CLASS, "optimizer": {"lr": 0.05}, "train": {"epochs": 4}}
    paper = make(**tables, combiner={**DISCRIMINATOR, "mu": 1e5, "rho": 0.0})
    run, lines = reported(tmp_path / "paper", paper)
    for line in log(run.path):
        loads = [line[f"load_{k}"] for k in (1, 2, 3)]
        assert sum(loads) == pytest.approx(1, abs=1e-5)
        warned = [int(warning.split()[2]) for warning in line.get("warnings", [])]
        assert [k for k, load in enumerate(loads, 1) if load < 0.05] == warned
        for k, load in enumerate(loads, 1):
            low, middle, high = (line[f"gamma_{k}_p{q}"] for q in (10, 50, 90))
            assert 0 <= low <= middle <= high <= 1 and low - 0.2 <= load <= high + 0.2
    assert max(log(run.path)[-1][f"load_{k}"] for k in (1, 2, 3)) > 0.9
    sentences = [line for line in lines if line.startswith("warning: local metric")]
    assert len(sentences) == sum(len(line.get("warnings", [])) for line in log(run.path)) >= 2
    balanced = make(**tables, combiner=DISCRIMINATOR)
    assert any("load_1 0.3333," in line for line in run_one_batch(balanced))
    quiet = log(fit(tmp_path, balanced, "balanced"))
    assert all(abs(line[f"load_{k}"] - 1 / 3) < 0.1 for line in quiet for k in (1, 2, 3))
    assert not any("warnings" in line for line in quiet)


@Both
def test_a_loss_without_distance_is_refused_with_advice(name, make):
    says = rf"\[combiner\] {name} needs a loss that takes a `distance`, and pml.arc_face takes none"
    with pytest.raises(RecipeError, match=rf"{says}(.|\n)*Use one that does"):
        make(generator=None, combiner={"name": name}, loss={"name": "pml.arc_face"})


def test_the_combiner_of_the_docs_trains_exports_and_warns(make, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "daml.md").read_text(encoding="utf-8")
    body = page.split(":caption: my_parts.py", 1)[1].split("```", 1)[0]
    (tmp_path / "my_parts.py").write_text(body, encoding="utf-8")
    combiner = {"name": "my_parts.learned", "parts": 3, "evenness": 2.0}
    plugins = [str(tmp_path / "my_parts.py")]
    run = Run.open(fit(tmp_path, make(**BY_CLASS, plugins=plugins, combiner=combiner)))
    last = log(run.path)[-1]
    assert sum(last[f"weight_{k}"] for k in (1, 2, 3)) == pytest.approx(1, abs=1e-5)
    assert "combiner_loss" in last and weights(run.path)["model.combiner.logits"].any()
    (sentence,) = run.model.combiner.warnings({"weight_1": 0.01, "weight_2": 0.99, "loss": 0.0})
    assert sentence == "weight_1 is 0.010."
    assert export(run).bundle.manifest.rescorer is not None
