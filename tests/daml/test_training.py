"""DAML trained by recipes: objectives, phases, mining before and after generation, odd batches, and
the example of the docs.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from daml_recipes import ALGORITHM, LOSSES, METRIC, batch, made, trainer
from pytorch_metric_learning.miners import TripletMarginMiner
from retrieval.errors import RecipeError
from retrieval.run import checkpoint_format
from retrieval.run.build import Called
from retrieval.run.open import build_run
from retrieval.training.synthetic import choose_triplets, extend, mine
from trained_weights import fit, log, moved, start, weights


@pytest.mark.parametrize("tables", LOSSES, ids=lambda t: t["loss"]["name"])
@pytest.mark.parametrize("coupling", ["separate", "joint"])
def test_gradients_are_those_of_the_couplings_objectives(tmp_path, tables, coupling):
    """Separate: J_m for the metric, also through synthetic samples, and J_gen for the generator,
    bit for bit. Joint: the sum for both.
    """
    of = trainer(tmp_path, **tables, train={"device": "cpu", "coupling": coupling})
    inputs, labels = batch(of)
    random = checkpoint_format.random_state()
    losses = of.step.losses(inputs, labels)
    metric, generator = list(of.run.model.parameters()), list(of.objective.generator.parameters())
    total = losses.metric + losses.generator

    def gradients(value: torch.Tensor, of: list[Any]) -> list[Any]:
        return list(torch.autograd.grad(value, of, retain_graph=True, allow_unused=True))

    for value, rivals in (
        (losses.metric, generator),
        (losses.generator, [*of.run.model.backbone.parameters()]),
    ):
        assert any(g is not None and bool(g.any()) for g in gradients(value, rivals))
    if coupling == "joint":
        expected = gradients(total, metric + generator)
    else:
        expected = gradients(losses.metric, metric) + gradients(losses.generator, generator)
    assert all(bool(g.any()) for g in expected[len(metric) :])
    checkpoint_format.restore_random_state(random)
    for parameter in metric + generator:
        parameter.grad = None
    again = of.step.losses(inputs, labels)
    of.step.backward(again)
    for parameter, gradient in zip(metric + generator, expected, strict=True):
        if coupling == "separate":
            assert torch.equal(parameter.grad, gradient)
        else:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["daml.hard_negative", "daml.hard_positive"])
def test_the_loss_trains_the_backbone_through_synthetic_samples(tmp_path, name):
    """The backbone's gradient for one triplet, with the generator's weights as constants."""
    of = trainer(tmp_path, generator={"name": name}, loss={"name": "daml.triplet", "margin": 3.0})
    images, labels = batch(of)
    labels = torch.arange(len(images)) // 2
    of.run.model.eval()
    of.objective.miner = Called(lambda *_: tuple(torch.tensor([i]) for i in (0, 1, 2)))
    losses = of.step.losses(images, labels)
    of.step.backward(losses)
    trained = [p.grad.clone() for p in of.run.model.backbone.parameters() if p.grad is not None]

    built = copy.deepcopy(of.objective.generator)
    built.requires_grad_(False)
    features, _ = of.run.model(images, False)
    a, p, n = (features[i : i + 1] for i in range(3))
    synthetic = built(a, p, n)
    p, n = (synthetic, n) if built.replaces == "positive" else (p, synthetic)
    ea, ep, en = (of.run.model.head(x) for x in (a, p, n))
    value = ((ea - ep).square().sum() - (ea - en).square().sum() + 3.0).relu()
    assert losses.metric.item() == pytest.approx(value.item(), rel=1e-5)
    slope, *expected = torch.autograd.grad(value, [features, *of.run.model.backbone.parameters()])
    assert all(bool(slope[row].any()) for row in range(3)) and not slope[3:].any()
    assert len(trained) == len(expected)
    for actual, entry in zip(trained, expected, strict=True):
        torch.testing.assert_close(actual, entry, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("generator", ["daml.hard_negative", "daml.hard_positive"])
def test_a_learning_rate_of_zero_changes_nothing(tmp_path, generator):
    table = {"name": generator, "margin": 0.0}
    still = dict.fromkeys(METRIC, 0.0)
    recipe = made(generator=table, optimizer={"lr_factor": still})
    changed = moved(start(tmp_path, recipe), weights(fit(tmp_path, recipe, "metric")))
    trained = {name for name in changed if "running" not in name and "num_b" not in name}
    assert trained and all(name.startswith("generator.") for name in trained)
    recipe = made(generator=table, generator_optimizer={"lr_factor": {"generator": 0.0}})
    changed = moved(start(tmp_path, recipe), weights(fit(tmp_path, recipe, "generator")))
    assert any(name.startswith("model.backbone") for name in changed)
    assert any(name.startswith("model.head") for name in changed)
    assert not any(name.startswith("generator.") for name in changed)


def test_the_phases_of_algorithm_1_train_what_they_say(tmp_path):
    before = start(tmp_path, made(phase=ALGORITHM))
    seen = []
    for upto in (1, 2, 3):
        after = weights(fit(tmp_path, made(phase=ALGORITHM[:upto]), str(upto)))
        seen.append({name.partition(".")[0] for name in moved(before, after)})
        before = after
    assert seen == [{"model"}, {"generator"}, {"model", "generator"}]
    lines = log(tmp_path / "3")
    assert "generator_loss" not in lines[0] and "synthetic_shift" not in lines[0]
    assert "loss" not in lines[1] and lines[1]["generator_loss"] > 0
    assert {"loss", "generator_loss", "synthetic_shift", "triplets"} <= lines[2].keys()


def test_a_phase_can_train_the_generator_while_the_metric_sees_real_samples_only(tmp_path):
    of = trainer(tmp_path, phase=[{"name": "apart", "epochs": 1, "synthetic": False}])
    inputs, labels = batch(of)
    losses = of.step.losses(inputs, labels)
    assert torch.equal(losses.metric, of.objective.loss(of.run.model(inputs)[1], labels))
    of.step.backward(losses)
    assert all(bool(p.grad.any()) for p in of.objective.generator.parameters())


SEMI_HARD = [
    {"name": "daml.semi_hard", "margin": 0.5},
    {"name": "pml.batch_hard"},
    {"name": "pml.multi_similarity"},
]


@pytest.mark.parametrize("miner", SEMI_HARD, ids=lambda t: t["name"])
@pytest.mark.parametrize("generator", ["daml.hard_negative", "daml.hard_positive"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_miner_picks_before_or_after_generation(tmp_path, miner, generator, when):
    options = {"device": "cpu", "mine": when, "real_weight": 0.5}
    of = trainer(tmp_path, miner=miner, generator={"name": generator}, train=options)
    inputs, labels = batch(of)
    calls: list[tuple[int, bool]] = []
    forward = of.objective.miner.forward

    def spy(codes: Any, labels: Any, ref_emb: Any = None, ref_labels: Any = None) -> Any:
        calls.append((len(codes), ref_emb is not None))
        return forward(codes, labels, ref_emb, ref_labels)

    of.objective.miner.forward = spy
    losses = of.step.losses(inputs, labels)
    assert torch.isfinite(losses.metric)
    picked_from_both = [call for call in calls if call[1]]
    assert len(picked_from_both) == (0 if when == "before" else 3)  # once a class
    if when == "after":
        assert losses.metrics["triplets"] == 36  # each positive pair of the batch


def test_what_is_mined_after_generation_by_loops():
    """Semi-hard triplets with synthetic samples in one role only, and no item its own positive."""
    miner = TripletMarginMiner(margin=0.4, type_of_triplets="semihard")
    torch.manual_seed(0)
    labels = torch.tensor([0, 0, 1, 1, 1, 2, 2])
    codes = torch.nn.functional.normalize(torch.randn(7, 3))
    a, p, n = choose_triplets(None, labels)
    built = torch.nn.functional.normalize(torch.randn(len(a), 3))
    for replaces in ("negative", "positive"):
        extended = extend(codes, labels, built, (a, p, n), replaces)
        assert extended.labels[7:].tolist() == labels[n if replaces == "negative" else a].tolist()
        actual = mine(miner, codes, labels, extended)
        d, all_rows = torch.cdist(codes, extended.codes), range(len(extended.codes))
        expected = set()
        for i, j, k in itertools.product(range(7), all_rows, all_rows):
            synthetic = (j if replaces == "negative" else k) >= 7
            labelled = labels[i] == extended.labels[j] and labels[i] != extended.labels[k]
            gap = float(d[i, k] - d[i, j])
            if labelled and not synthetic and i != j and 0 < gap <= 0.4:
                expected.add((i, j, k))
        assert set(zip(*(x.tolist() for x in actual), strict=True)) == expected
        assert any((k if replaces == "negative" else j) >= 7 for _, j, k in expected)


AFTER = {"train": {"mine": "after"}}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (AFTER, r'mine = "after" needs a \[miner\]'),
        ({"generator": None, **AFTER}, r"mine is of no use without a \[generator\]"),
        (
            {"miner": {"name": "pml.embeddings_already_packaged_as_triplets"}, **AFTER},
            r"picks from a reference set, but pml.embeddings_already\w+ takes no `ref_emb`",
        ),
        ({"loss": {"name": "pml.n_pairs"}}, r"takes no `ref_emb`. Use a loss that does: pml"),
        ({"loss": {"name": "pml.normalized_softmax"}}, r"takes no `ref_emb`|picks its own pairs"),
    ],
)
def test_impossible_combinations_are_refused(tables, words):
    with pytest.raises(RecipeError, match=words):
        made(**tables)


@pytest.mark.parametrize("tables", LOSSES, ids=lambda t: t["loss"]["name"])
@pytest.mark.parametrize("labels", [[0] * 12, list(range(12))], ids=["one class", "no positives"])
def test_a_batch_without_triplets_trains_nothing(tmp_path, tables, labels):
    of = trainer(tmp_path, **tables)
    inputs, _ = batch(of)
    before = {name: value.clone() for name, value in of.run.model.named_parameters()}
    of.step.set_modes()
    metrics = of._train_batch(inputs, torch.tensor(labels))
    assert metrics["triplets"] == 0 and metrics["loss"] == 0
    after = of.run.model.state_dict()
    # weight decay of AdamW alone: the gradient is zero
    assert all(torch.allclose(before[k], after[k], rtol=1e-3) for k in before)


def test_the_generator_of_the_docs_moves_towards_the_anchor_and_trains(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "daml.md").read_text(encoding="utf-8")
    body = page.split(":caption: my_steps.py", 1)[1].split("```", 1)[0]
    (tmp_path / "my_steps.py").write_text(body, encoding="utf-8")
    generator = {"name": "my_steps.towards", "step": 0.01}
    recipe = made(plugins=[str(tmp_path / "my_steps.py")], generator=generator)
    shift = log(fit(tmp_path, recipe))[0]["synthetic_shift"]
    assert shift == pytest.approx(0.01, rel=1e-3)
    run, random = build_run(tmp_path, recipe), torch.Generator().manual_seed(0)
    a, p, n = torch.randn(3, 6, run.model.backbone.features, generator=random)
    with torch.no_grad():
        moved = run.objective.generator(a, p, n)
        before, after = (run.model.feature_distance(x, a) for x in (n, moved))
    assert (after < before).all()
