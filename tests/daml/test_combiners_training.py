"""The combiners in training: K = 1 is the plain case, each part on its own, the log, resume,
refusals.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning import losses
from retrieval.errors import RecipeError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.recipe.read import Recipe, check_recipe
from retrieval.run import checkpoint
from retrieval.run.open import Run
from retrieval.training.trainer import train
from sklearn.datasets import load_digits
from torch import Tensor

from retrieval_daml.local_metrics import Discriminator, UniformMetrics

Make = Callable[..., Recipe]
Both = pytest.mark.parametrize("name", ["daml.discriminator", "daml.uniform"])


@pytest.fixture
def make(tmp_path):
    """A checked recipe on the digits' pixels as vectors, changed by tables."""
    digits = load_digits()
    file = tmp_path / "digits.npz"
    np.savez(file, features=digits.data[:600] / 16.0, labels=digits.target[:600])

    def build(**tables: Any) -> Recipe:
        base: dict[str, Any] = {
            "data": {"name": "core.features", "file": str(file)},
            "split": {"by": "class"},
            "sampler": {"classes": 4, "items": 4, "batches": 4},
            "backbone": {"name": "core.features"},
            "head": {"embedding_size": 12},
            "combiner": {"name": "daml.discriminator", "metrics": 3, "hidden": 8},
            "loss": {"name": "pml.triplet_margin"},
            "optimizer": {"lr": 0.01},
            "train": {"epochs": 2},
        }
        return check_recipe({k: v for k, v in (base | tables).items() if v is not None})

    return build


def fit(folder: Path, made: Recipe, name: str = "run", **options: Any) -> Run:
    return train(folder / name, made, **options)


def last(run: Run) -> dict[str, Tensor]:
    return dict(checkpoint.load(run.last)["model"])


def log(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics_file.read_text().splitlines()]


# --- K = 1


@Both
@pytest.mark.parametrize("loss", ["daml.contrastive"])
def test_one_metric_is_the_plain_case_bit_for_bit(name, loss, make, tmp_path):
    left = fit(tmp_path, make(combiner={"name": name, "metrics": 1}, loss={"name": loss}), "one")
    plain = fit(tmp_path, make(combiner=None, loss={"name": loss}), "plain")
    ours, theirs = last(left), last(plain)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    for key in ("loss", "validation_map_at_r", "validation_recall_at_1"):
        assert [line[key] for line in log(left)] == [line[key] for line in log(plain)]
    metrics = [evaluate(Run.open(run.path)).metrics["trained"] for run in (left, plain)]
    assert metrics[0] == metrics[1]


def test_one_metric_called_from_python_is_lp_distance_bit_for_bit():
    torch.manual_seed(0)
    for combiner in (Discriminator(6, 12, 1), UniformMetrics(12, 1)):
        head = combiner.build_head(6)
        codes = head(torch.randn(40, 6)).detach()
        labels = torch.arange(40) % 5
        actual = []
        for distance in (combiner, None):
            leaf = codes.clone().requires_grad_()
            loss = losses.TripletMarginLoss(**({"distance": distance} if distance else {}))(
                leaf, labels
            )
            loss.backward()
            actual.append((loss, leaf.grad))
        assert torch.equal(actual[0][0], actual[1][0]) and torch.equal(actual[0][1], actual[1][1])
        assert combiner.exact and not list(combiner.parameters())


# --- whose objective, whose weights


def test_the_objective_joins_the_loss_where_the_combiner_trains_and_only_there(make, tmp_path):
    from accelerate import Accelerator
    from retrieval.run.open import build_run
    from retrieval.training.trainer import Trainer

    built = make(
        combiner={"name": "daml.discriminator", "metrics": 3, "hidden": 8, "mu": 0.5, "rho": 3.0}
    )
    checkpoint.seed_everything(0)
    run = build_run(tmp_path, built)
    combiner = run.model.combiner
    assert isinstance(combiner, Discriminator) and run.objective is not None
    torch.nn.init.normal_(combiner.out.weight)
    trainer = Trainer(run, Accelerator(cpu=True))
    inputs, labels = next(iter(trainer.batches.epoch(0)))
    codes = run.model(inputs)[1]
    alone, own = run.objective.loss(codes, labels), combiner.objective(codes, labels, None)[0]
    assert own is not None and abs(own.item()) > 1e-4
    both = trainer.step.losses(inputs, labels)
    assert both.metric is not None and both.metric.item() == pytest.approx(
        (alone + own).item(), abs=1e-6
    )
    assert both.metrics["combiner_loss"] == pytest.approx(own.item(), abs=1e-6)
    trainer.step.phase = trainer.phase.model_copy(update={"train": ["head"]})
    without = trainer.step.losses(inputs, labels)
    assert without.metric is not None and torch.equal(without.metric, alone)
    assert "load_1" in without.metrics and "combiner_loss" not in without.metrics


def test_what_the_head_shares_with_the_discriminator_is_the_discriminators(make, tmp_path):
    """Algorithm 2: the local metrics first, Γ = 1/K and still; then the discriminator alone."""
    metric = {"name": "metric", "epochs": 1, "train": ["head"]}
    weights = {"name": "weights", "epochs": 1, "train": ["combiner"]}
    start, first = last_of_none(make, tmp_path), last(fit(tmp_path, make(phase=[metric]), "first"))
    both = last(fit(tmp_path, make(phase=[metric, weights]), "both"))
    own = {
        "combiner.flows.weight",
        "combiner.flows.bias",
        "combiner.out.weight",
        "combiner.out.bias",
    }
    shared = {"head.flows.weight", "head.flows.bias"}
    embedding = {"head.embedding.0.weight", "head.embedding.0.bias"}
    assert both.keys() == own | shared | embedding
    assert all(torch.equal(start[key], first[key]) for key in own | shared)
    assert not any(torch.equal(start[key], first[key]) for key in embedding)
    assert all(torch.equal(first[key], both[key]) for key in embedding)
    assert not any(torch.equal(first[key], both[key]) for key in own | shared)
    assert torch.equal(both["head.flows.weight"], both["combiner.flows.weight"])
    assert log(fit(tmp_path, make(phase=[metric]), "again"))[-1]["load_1"] == pytest.approx(1 / 3)


def last_of_none(make: Make, tmp_path: Path) -> dict[str, Tensor]:
    from retrieval.run.open import build_run

    checkpoint.seed_everything(0)
    return {
        k: v.clone() for k, v in build_run(tmp_path / "none", make()).model.state_dict().items()
    }


# --- the log


def test_loads_are_in_every_epochs_log_and_low_ones_are_warned_of(make, tmp_path):
    """The paper's μ, without balance, leaves one metric in use."""
    lines: list[str] = []
    paper = {"name": "daml.discriminator", "metrics": 3, "hidden": 8, "mu": 1e5, "rho": 0.0}
    optimizer = {"lr": 0.05}
    run = fit(
        tmp_path,
        make(combiner=paper, optimizer=optimizer, train={"epochs": 4}),
        report=lines.append,
    )
    for line in log(run):
        loads = [line[f"load_{k}"] for k in (1, 2, 3)]
        assert sum(loads) == pytest.approx(1, abs=1e-5)
        assert [k for k, load in enumerate(loads, 1) if load < 0.05] == [
            int(warning.split()[2]) for warning in line.get("warnings", [])
        ]
        for k, load in enumerate(loads, 1):
            low, high = line[f"gamma_{k}_p10"], line[f"gamma_{k}_p90"]
            assert (
                0 <= low <= line[f"gamma_{k}_p50"] <= high <= 1 and low - 0.2 <= load <= high + 0.2
            )
    assert max(log(run)[-1][f"load_{k}"] for k in (1, 2, 3)) > 0.9
    sentence = [line for line in lines if line.startswith("warning: local metric")]
    assert len(sentence) == sum(len(line.get("warnings", [])) for line in log(run)) >= 2
    from retrieval.training.check import run_one_batch

    balanced = {"name": "daml.discriminator", "metrics": 3, "hidden": 8}
    assert any("load_1 0.3333," in line for line in run_one_batch(make(combiner=balanced)))
    quiet = fit(
        tmp_path, make(combiner=balanced, optimizer=optimizer, train={"epochs": 4}), "balanced"
    )
    assert all(abs(line[f"load_{k}"] - 1 / 3) < 0.1 for line in log(quiet) for k in (1, 2, 3))
    assert not any("warnings" in line for line in log(quiet))


# --- resume


# --- refusals and odd batches


@Both
def test_a_loss_without_distance_is_refused_with_what_to_use(name, make):
    with pytest.raises(RecipeError) as refused:
        make(combiner={"name": name}, loss={"name": "pml.arc_face"})
    assert (
        f"[combiner] {name} needs a loss that takes a `distance`, and pml.arc_face takes none"
        in str(refused.value)
    )
    assert "Use one that does" in str(refused.value)


def test_the_combiner_of_the_docs_trains_exports_and_warns(make, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "daml.md").read_text(encoding="utf-8")
    body = page.split(":caption: my_parts.py", 1)[1].split("```", 1)[0]
    (tmp_path / "my_parts.py").write_text(body, encoding="utf-8")
    combiner = {"name": "my_parts.learned", "parts": 3, "evenness": 2.0}
    run = fit(tmp_path, make(plugins=[str(tmp_path / "my_parts.py")], combiner=combiner))
    weights = [log(run)[-1][f"weight_{k}"] for k in (1, 2, 3)]
    assert sum(weights) == pytest.approx(1, abs=1e-5) and "combiner_loss" in log(run)[-1]
    assert not torch.equal(last(run)["combiner.logits"], torch.zeros(3))
    (sentence,) = run.model.combiner.warnings({"weight_1": 0.01, "weight_2": 0.99, "loss": 0.0})  # type: ignore[union-attr]
    assert sentence == "weight_1 is 0.010."
    from retrieval.export.export_run import export

    assert export(Run.open(run.path)).bundle.manifest.rescorer is not None
