"""DAML trained by recipes: which objective reaches what, phases, mining before and after, other losses, bad input."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from retrieval.errors import DataError, RecipeError
from retrieval.recipe.read import check_recipe, read_recipe
from retrieval.run import checkpoint
from retrieval.run.build import Called
from retrieval.run.open import build_run
from retrieval.training.synthetic import choose_triplets, extend, mine
from retrieval.training.trainer import Trainer, train

BASE: dict[str, Any] = {
    "name": "daml",
    "data": {"name": "core.digits"},
    "split": {"by": "class"},
    "sampler": {"classes": 3, "items": 4, "batches": 4},
    "backbone": {"name": "core.convnet", "size": 8, "width": 4, "depth": 2},
    "head": {"embedding_size": 8},
    "loss": {"name": "daml.triplet"},
    "generator": {"name": "daml.hard_negative"},
    "train": {"epochs": 1, "device": "cpu"},
}
METRIC = ["backbone", "head", "combiner", "loss"]
ALGORITHM = [
    {"name": "metric", "epochs": 1, "train": METRIC, "synthetic": False},
    {"name": "generator", "epochs": 1, "train": ["generator"]},
    {"name": "both", "epochs": 1},
]
LOSSES: list[dict[str, Any]] = [
    {
        "loss": {"name": "daml.contrastive"},
        "generator": {"name": "daml.hard_negative", "form": "contrastive"},
    },
    {"loss": {"name": "daml.triplet"}},
    {"loss": {"name": "daml.lifted"}, "miner": {"name": "daml.one_per_class"}},
    {"loss": {"name": "daml.lifted", "form": "original"}},
    {"loss": {"name": "daml.npair"}, "miner": {"name": "daml.one_per_class", "anchors": "one"}},
    {"loss": {"name": "daml.triplet"}, "generator": {"name": "daml.hard_positive"}},
    {"loss": {"name": "pml.contrastive"}},
    {
        "loss": {"name": "pml.triplet_margin", "margin": 2.0},
        "miner": {"name": "pml.batch_hard"},
    },
    {"loss": {"name": "pml.multi_similarity"}, "miner": {"name": "pml.multi_similarity"}},
    {"loss": {"name": "pml.nt_xent"}},
    {"loss": {"name": "pml.circle"}},
    {"loss": {"name": "anml.danml"}},
    {
        "loss": {"name": "anml.danml"},
        "miner": {"name": "anml.pair_miner"},
        "generator": {"name": "daml.hard_positive"},
    },
]


def made(**tables: Any) -> Any:
    return check_recipe({k: v for k, v in {**BASE, **tables}.items() if v is not None})


def trainer(folder: Path, **tables: Any) -> Trainer:
    """A trainer before its first step, its generator not at the identity any more."""
    recipe = made(**tables)
    checkpoint.seed_everything(recipe.seed)
    run = build_run(folder, recipe)
    assert run.objective is not None and run.objective.generator is not None
    for parameter in run.objective.generator.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return Trainer(run, Accelerator(cpu=True))


def batch(of: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = next(iter(of.batches.epoch(0)))
    return inputs, labels


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = checkpoint.load(folder / "checkpoints" / "last.safetensors")
    return {f"model.{k}": v for k, v in state["model"].items()} | {
        f"generator.{k}": v for k, v in state["modules"].get("generator", {}).items()
    }


def start(folder: Path, recipe: Any) -> dict[str, torch.Tensor]:
    checkpoint.seed_everything(recipe.seed)
    run = build_run(folder, recipe)
    assert run.objective is not None and run.objective.generator is not None
    both = (("model", run.model), ("generator", run.objective.generator))
    return {f"{name}.{k}": v.clone() for name, module in both for k, v in module.state_dict().items()}


def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {
        name
        for name in before
        if not torch.equal(before[name], after[name]) and "running" not in name and "num_b" not in name
    }


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- which objective reaches what ----------------------------------------------------------------------------


@pytest.mark.parametrize("tables", LOSSES, ids=lambda t: t["loss"]["name"])
@pytest.mark.parametrize("coupling", ["separate", "joint"])
def test_gradients_are_those_of_the_couplings_objectives(
    tmp_path: Path, tables: dict[str, Any], coupling: str
) -> None:
    """Separate: J_m's for the metric, through what the generator made too, J_gen's for the generator, bit for bit. Joint: the sum's for all."""
    of = trainer(tmp_path, **tables, train={"device": "cpu", "coupling": coupling})
    inputs, labels = batch(of)
    random = checkpoint.random_state()
    losses = of.step.losses(inputs, labels)
    assert losses.metric is not None and losses.generator is not None
    assert of.objective.generator is not None
    metric, generator = list(of.run.model.parameters()), list(of.objective.generator.parameters())
    total = losses.metric + losses.generator

    def gradients(value: torch.Tensor, of: list[Any]) -> list[Any]:
        return list(torch.autograd.grad(value, of, retain_graph=True, allow_unused=True))

    for value, others in (
        (losses.metric, generator),
        (losses.generator, [*of.run.model.backbone.parameters()]),
    ):
        assert any(g is not None and bool(g.any()) for g in gradients(value, others))
    if coupling == "joint":
        expected = gradients(total, metric + generator)
    else:
        expected = gradients(losses.metric, metric) + gradients(losses.generator, generator)
    assert all(bool(g.any()) for g in expected[len(metric) :])
    checkpoint.restore_random_state(random)
    for parameter in metric + generator:
        parameter.grad = None
    again = of.step.losses(inputs, labels)
    of.step.backward(again)
    for parameter, gradient in zip(metric + generator, expected, strict=True):
        if coupling == "separate":
            assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
        else:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["daml.hard_negative", "daml.hard_positive", "daml.disturbed_negative"])
def test_the_loss_trains_the_backbone_through_what_was_generated(tmp_path: Path, name: str) -> None:
    """A triplet: the backbone has the gradient of the loss written out, with the generator's weights as constants."""
    generator = {"name": name} | ({"tries": 1, "step": 0.0} if "disturbed" in name else {})
    of = trainer(tmp_path, generator=generator, loss={"name": "daml.triplet", "margin": 3.0})
    images, labels = batch(of)
    labels = torch.arange(len(images)) // 2
    of.run.model.eval()
    of.objective.miner = Called(lambda *_: tuple(torch.tensor([i]) for i in (0, 1, 2)))
    losses = of.step.losses(images, labels)
    assert losses.metric is not None
    of.step.backward(losses)
    trained = [p.grad.clone() for p in of.run.model.backbone.parameters() if p.grad is not None]

    made = copy.deepcopy(of.objective.generator)
    assert made is not None
    made.requires_grad_(False)
    features, _ = of.run.model(images, False)
    a, p, n = (features[i : i + 1] for i in range(3))
    synthetic = made(a, p, n)
    p, n = (synthetic, n) if made.replaces == "positive" else (p, synthetic)
    ea, ep, en = (of.run.model.head(x) for x in (a, p, n))
    value = ((ea - ep).square().sum() - (ea - en).square().sum() + 3.0).relu()
    assert losses.metric.item() == pytest.approx(value.item(), rel=1e-5)
    slope, *expected = torch.autograd.grad(value, [features, *of.run.model.backbone.parameters()])
    assert all(bool(slope[row].any()) for row in range(3)) and not slope[3:].any()
    assert len(trained) == len(expected)
    for found, each in zip(trained, expected, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("generator", ["daml.hard_negative", "daml.hard_positive"])
def test_a_rate_of_zero_leaves_either_side_bit_identical(tmp_path: Path, generator: str) -> None:
    table = {"name": generator, "margin": 0.0}
    still = dict.fromkeys(METRIC, 0.0)
    recipe = made(generator=table, optimizer={"lr_factor": still})
    train(tmp_path / "metric", recipe)
    changed = moved(start(tmp_path, recipe), weights(tmp_path / "metric"))
    assert changed and all(name.startswith("generator.") for name in changed)
    recipe = made(generator=table, generator_optimizer={"lr_factor": {"generator": 0.0}})
    train(tmp_path / "generator", recipe)
    changed = moved(start(tmp_path, recipe), weights(tmp_path / "generator"))
    assert any(name.startswith("model.backbone") for name in changed)
    assert any(name.startswith("model.head") for name in changed)
    assert not any(name.startswith("generator.") for name in changed)


def test_the_loss_on_real_negatives_is_added_with_its_weight(tmp_path: Path) -> None:
    values = []
    for weight in (0.0, 1.0, 2.5):
        of = trainer(tmp_path, train={"device": "cpu", "real_weight": weight})
        inputs, labels = batch(of)
        checkpoint.seed_everything(3)
        losses = of.step.losses(inputs, labels)
        assert losses.metric is not None
        values.append(losses.metric.item())
    real = of.objective.loss(of.run.model(inputs)[1], labels).item()
    assert values[1] - values[0] == pytest.approx(real, rel=1e-4)
    assert values[2] - values[0] == pytest.approx(2.5 * real, rel=1e-4)


@pytest.mark.parametrize("tables", LOSSES, ids=lambda t: t["loss"]["name"])
def test_any_loss_with_a_reference_set_trains_with_synthetic_samples(
    tmp_path: Path, tables: dict[str, Any]
) -> None:
    """And the synthetic samples matter: with others the loss is another."""
    of = trainer(tmp_path, **tables)
    inputs, labels = batch(of)
    values = []
    for scale in (0.3, 1.5):
        assert of.objective.generator is not None
        for seed, parameter in enumerate(of.objective.generator.parameters()):
            torch.nn.init.normal_(parameter, std=scale, generator=torch.Generator().manual_seed(seed))
        checkpoint.seed_everything(0)
        losses = of.step.losses(inputs, labels)
        assert losses.metric is not None and torch.isfinite(losses.metric)
        assert float(losses.figures["synthetic_shift"]) > 0
        values.append(losses.metric.item())
    assert values[0] != values[1]


# --- phases --------------------------------------------------------------------------------------------------


def test_the_phases_of_algorithm_1_train_what_they_say(tmp_path: Path) -> None:
    recipe = made(phase=ALGORITHM)
    seen: list[tuple[str, set[str]]] = []
    before = start(tmp_path, recipe)
    for upto in (1, 2, 3):
        shorter = made(phase=ALGORITHM[:upto])
        train(tmp_path / str(upto), shorter)
        after = weights(tmp_path / str(upto))
        seen.append((ALGORITHM[upto - 1]["name"], {name.partition(".")[0] for name in moved(before, after)}))
        before = after
    assert seen == [("metric", {"model"}), ("generator", {"generator"}), ("both", {"model", "generator"})]
    lines = log(tmp_path / "3")
    assert "generator_loss" not in lines[0] and "synthetic_shift" not in lines[0]
    assert "loss" not in lines[1] and lines[1]["generator_loss"] > 0
    assert {"loss", "generator_loss", "synthetic_shift", "triplets"} <= lines[2].keys()


def test_a_phase_trains_both_while_the_metric_sees_real_samples_only(tmp_path: Path) -> None:
    """`synthetic = false` where the generator trains too: J_gen for it, the plain loss for the metric, bit for bit."""
    of = trainer(tmp_path, phase=[{"name": "apart", "epochs": 1, "synthetic": False}])
    inputs, labels = batch(of)
    losses = of.step.losses(inputs, labels)
    assert losses.metric is not None and losses.generator is not None
    assert torch.equal(losses.metric, of.objective.loss(of.run.model(inputs)[1], labels))
    of.step.backward(losses)
    assert of.objective.generator is not None
    assert all(p.grad is not None and bool(p.grad.any()) for p in of.objective.generator.parameters())


def test_new_layers_take_their_rates_factor(tmp_path: Path) -> None:
    """One step of plain gradient descent: ten times the rate, ten times the way."""
    ways = []
    for factor in (1.0, 10.0):
        tables = {
            "optimizer": {"name": "SGD", "lr": 1e-3, "lr_factor": {"head": factor}},
            "generator_optimizer": {"name": "SGD", "lr": 1e-3, "lr_factor": {"generator": factor}},
            "sampler": {"classes": 3, "items": 4, "batches": 1},
        }
        recipe = made(**tables)
        before = start(tmp_path, recipe)
        train(tmp_path / str(factor), recipe)
        after = weights(tmp_path / str(factor))
        ways.append({name: after[name] - before[name] for name in moved(before, after)})
    assert ways[0].keys() == ways[1].keys()
    for name, way in ways[0].items():
        times = 1.0 if "backbone" in name else 10.0
        torch.testing.assert_close(ways[1][name], times * way, rtol=2e-3, atol=1e-6)


# --- semi-hard selection before and after generation ---------------------------------------------------------

SEMI_HARD = [
    {"name": "daml.semi_hard", "margin": 0.5},
    {"name": "pml.batch_hard"},
    {"name": "pml.multi_similarity"},
]


@pytest.mark.parametrize("miner", SEMI_HARD, ids=lambda t: t["name"])
@pytest.mark.parametrize("generator", ["daml.hard_negative", "daml.hard_positive"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_miner_picks_before_or_after_generation(
    tmp_path: Path, miner: dict[str, Any], generator: str, when: str
) -> None:
    of = trainer(
        tmp_path,
        miner=miner,
        generator={"name": generator},
        train={"device": "cpu", "mine": when, "real_weight": 0.5},
    )
    inputs, labels = batch(of)
    calls: list[tuple[int, bool]] = []
    assert of.objective.miner is not None and of.objective.generator is not None
    forward = of.objective.miner.forward

    def spy(codes: Any, labels: Any, ref_emb: Any = None, ref_labels: Any = None) -> Any:
        calls.append((len(codes), ref_emb is not None))
        return forward(codes, labels, ref_emb, ref_labels)

    of.objective.miner.forward = spy  # type: ignore[method-assign]
    losses = of.step.losses(inputs, labels)
    assert losses.metric is not None and torch.isfinite(losses.metric)
    picked_from_both = [call for call in calls if call[1]]
    assert len(picked_from_both) == (0 if when == "before" else 3)  # once a class
    if when == "after":
        assert losses.figures["triplets"] == 36  # each positive pair of the batch


def test_what_is_mined_after_generation_by_loops() -> None:
    """Semi-hard triplets among real and synthetic negatives, no synthetic positive, nobody its own positive."""
    from pytorch_metric_learning.miners import TripletMarginMiner

    torch.manual_seed(0)
    labels = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    codes = torch.nn.functional.normalize(torch.randn(7, 3))
    a, p, n = choose_triplets(None, labels)
    made = torch.nn.functional.normalize(torch.randn(len(a), 3))
    for replaces in ("negative", "positive"):
        extended = extend(codes, labels, made, (a, p, n), replaces)  # type: ignore[arg-type]
        assert extended.labels[7:].tolist() == labels[n if replaces == "negative" else a].tolist()
        found = mine(TripletMarginMiner(margin=0.4, type_of_triplets="semihard"), codes, labels, extended)
        d = torch.cdist(codes, extended.codes)
        expected = set()
        for i in range(7):
            for j in range(len(extended.codes)):
                for k in range(len(extended.codes)):
                    synthetic = (j >= 7 and replaces == "negative") or (k >= 7 and replaces == "positive")
                    labelled = labels[i] == extended.labels[j] and labels[i] != extended.labels[k]
                    gap = float(d[i, k] - d[i, j])
                    if labelled and not synthetic and i != j and 0 < gap <= 0.4:
                        expected.add((i, j, k))
        assert set(zip(*(x.tolist() for x in found), strict=True)) == expected
        assert any((k if replaces == "negative" else j) >= 7 for _, j, k in expected)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"train": {"mine": "after"}}, r'mine = "after" says when the miner picks, and there is none'),
        ({"generator": None, "train": {"mine": "after"}}, r"mine is of no use without a \[generator\]"),
        (
            {"miner": {"name": "pml.embeddings_already_packaged_as_triplets"}, "train": {"mine": "after"}},
            r"pick from a reference set, and pml.embeddings_already_packaged_as_triplets takes no `ref_emb`",
        ),
        ({"loss": {"name": "pml.n_pairs"}}, r"takes no `ref_emb`. Use a loss that does: pml"),
        ({"loss": {"name": "pml.normalized_softmax"}}, r"takes no `ref_emb`|picks its own pairs"),
        ({"generator": {"name": "daml.hard_negative", "lambda_reg": -1.0}}, r"\[generator\] lambda_reg"),
        ({"generator": {"name": "daml.hard_negative", "preset": "papper"}}, r"\[generator\] preset"),
    ],
)
def test_what_cannot_go_together_is_refused(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        made(**tables)


# --- odd batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tables", LOSSES, ids=lambda t: t["loss"]["name"])
@pytest.mark.parametrize("labels", [[0] * 12, list(range(12))], ids=["one class", "no positives"])
def test_a_batch_without_triplets_trains_nothing(
    tmp_path: Path, tables: dict[str, Any], labels: list[int]
) -> None:
    of = trainer(tmp_path, **tables)
    inputs, _ = batch(of)
    before = {
        k: v.clone() for k, v in of.run.model.state_dict().items() if "running" not in k and "num_b" not in k
    }
    of.step.set_modes()
    figures = of._train_batch(inputs, torch.tensor(labels))
    assert figures["triplets"] == 0 and figures["loss"] == 0
    after = of.run.model.state_dict()
    # weight decay of AdamW alone: the gradient is zero
    assert all(torch.allclose(before[k], after[k], rtol=1e-3) for k in before)


def test_two_processes_agree_with_one_on_the_synthetic_batch() -> None:
    """Triplets are drawn by the seeded generator that all processes share."""
    draw: Callable[[], Any] = lambda: choose_triplets(None, torch.tensor([0, 0, 1, 1, 2, 2]))  # noqa: E731
    torch.manual_seed(5)
    one = draw()
    torch.manual_seed(5)
    assert all(map(torch.equal, one, draw()))


# --- the page and the recipes ----------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def test_the_generator_of_the_docs_walks_towards_the_anchor_and_trains(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "daml.md").read_text(encoding="utf-8")
    body = page.split(":caption: my_steps.py", 1)[1].split("```", 1)[0]
    (tmp_path / "my_steps.py").write_text(body, encoding="utf-8")
    recipe = made(
        plugins=[str(tmp_path / "my_steps.py")], generator={"name": "my_steps.towards", "step": 0.01}
    )
    train(tmp_path / "run", recipe)
    assert log(tmp_path / "run")[0]["synthetic_shift"] == pytest.approx(0.01, rel=1e-3)
    run = build_run(tmp_path, recipe)
    assert run.objective is not None and run.objective.generator is not None
    a, p, n = torch.randn(3, 6, run.model.backbone.features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        moved = run.objective.generator(a, p, n)
        before, after = (run.model.feature_distance(x, a) for x in (n, moved))
    assert (after < before).all()


@pytest.mark.parametrize("name", ["digits-daml", "digits-damml"])
def test_the_models_recipes_run_in_each_phase(name: str) -> None:
    from retrieval.training.check import run_one_batch

    recipe = read_recipe(ROOT / "models" / name / "recipe.toml")
    lines = run_one_batch(recipe)
    assert [line.split("'")[1] for line in lines if line.startswith("one batch")] == [
        phase.name for phase in recipe.phases
    ]
    assert lines[-1].endswith("The recipe is fine.")


def test_a_set_of_one_class_is_refused(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "one.npz", features=numpy.eye(8, dtype=numpy.float32), labels=["a"] * 8)
    recipe = made(
        data={"name": "core.features", "file": str(tmp_path / "one.npz")},
        backbone={"name": "core.features"},
        split={"by": "item"},
    )
    with pytest.raises(DataError, match="only the class 'a' is left to train on; there must be two at least"):
        train(tmp_path / "run", recipe)
    assert not list((tmp_path / "run").glob("checkpoints/*"))
