"""DAML trained by recipes: mining before and after generation, batches without triplets, and the
example of the docs.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from daml_recipes import LOSSES, batch, made, trainer
from pytorch_metric_learning.miners import TripletMarginMiner
from retrieval.errors import RecipeError
from retrieval.run.open import build_run
from retrieval.training.synthetic import choose_triplets, extend, mine
from trained_weights import fit, log

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
