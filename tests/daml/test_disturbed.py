"""Disturbed negatives: against plain loops, what they leave alone, and what trains on them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from retrieval.host.plugins import load_plugins
from retrieval.model.model import build_head
from retrieval.recipe.read import check_recipe
from retrieval.run.open import Run
from retrieval.training.trainer import train
from torch import nn

from retrieval_daml import DisturbedNegative, SemiHard

F, T = 5, 7
A, P, N = (
    torch.randn(T, F, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
    for s in (1, 2, 3)
)
HEAD = build_head(F, 3).double()
for parameter in HEAD.parameters():
    nn.init.normal_(parameter, generator=torch.Generator().manual_seed(7))


def code(x: list[float]) -> list[float]:
    weight, bias = (HEAD.state_dict()[f"0.{part}"].tolist() for part in ("weight", "bias"))
    out = [
        sum(w * v for w, v in zip(row, x, strict=True)) + b
        for row, b in zip(weight, bias, strict=True)
    ]
    length = math.sqrt(sum(v * v for v in out))
    return [v / length for v in out]


def by_loops(by: str, step: float, tries: int) -> list[list[float]]:
    """Return the synthetic negatives, with the same random numbers."""
    a, p, n = A.tolist(), P.tolist(), N.tolist()
    added = []
    for _ in range(tries):
        if by == "noise":
            noise = torch.randn(T, F, dtype=torch.float64).tolist()
            lengths = [math.sqrt(sum(v * v for v in row)) / math.sqrt(F) for row in n]
            added.append(
                [[v * size for v in row] for row, size in zip(noise, lengths, strict=True)]
            )
        else:
            order = torch.randperm(T).tolist()
            added.append(
                [[x - y for x, y in zip(a[other], p[other], strict=True)] for other in order]
            )
    actual = []
    for row in range(T):
        drawn = []
        for differences in added:
            moved = [v + step * d for v, d in zip(n[row], differences[row], strict=True)]
            scale = math.sqrt(sum(v * v for v in n[row])) / math.sqrt(sum(v * v for v in moved))
            moved = [v * scale for v in moved]
            apart = sum((x - y) ** 2 for x, y in zip(code(moved), code(a[row]), strict=True))
            drawn.append((apart, moved))
        actual.append(min(drawn, key=lambda pair: pair[0])[1])
    return actual


@pytest.mark.parametrize("step", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("tries", [1, 2, 5])
@pytest.mark.parametrize("by", ["noise", "classmates"])
def test_output_by_loops(by: Literal["noise", "classmates"], step: float, tries: int) -> None:
    generator = DisturbedNegative(by, step, tries)
    generator.bind(HEAD)
    torch.manual_seed(0)
    expected = by_loops(by, step, tries)
    torch.manual_seed(0)
    built = generator(A, P, N)
    assert [row.tolist() for row in built] == [pytest.approx(row, rel=1e-12) for row in expected]
    assert torch.allclose(built, N) == (step == 0)


@pytest.mark.parametrize("by", ["noise", "classmates"])
def test_more_tries_come_nearer_and_keep_the_length(by: Literal["noise", "classmates"]) -> None:
    mean = []
    for tries in (1, 3, 9):
        generator = DisturbedNegative(by, 1.0, tries)
        generator.bind(HEAD)
        torch.manual_seed(1)
        runs = [generator(A, P, N) for _ in range(10)]
        mean.append(np.mean([(HEAD(built) - HEAD(A)).norm(dim=1).mean().item() for built in runs]))
        torch.testing.assert_close(runs[0].norm(dim=1), N.norm(dim=1))
    assert mean[0] > mean[1] > mean[2]


def test_it_has_no_parameters_and_leaves_the_head_alone_and_only_the_negative_has_a_gradient() -> (
    None
):
    head = nn.Sequential(nn.Linear(F, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    generator = DisturbedNegative()
    generator.bind(head)
    assert list(generator.parameters()) == [] and list(generator.children()) == []
    before = {k: v.clone() for k, v in head.state_dict().items()}
    triplet = [x.clone().requires_grad_() for x in (A, P, N)]
    generator(*triplet).square().sum().backward()
    assert [x.grad is not None and bool(x.grad.any()) for x in triplet] == [False, False, True]
    assert all(value.grad is None for value in head.parameters())
    assert all(torch.equal(v, before[k]) for k, v in head.state_dict().items())
    assert all(module.training for module in head.modules())


def test_without_a_head_only_one_try_is_possible() -> None:
    assert DisturbedNegative(tries=1)(A, P, N).shape == N.shape
    with pytest.raises(ValueError, match=r"bind\(head\) first, or set tries = 1"):
        DisturbedNegative(tries=2)(A, P, N)


@pytest.mark.parametrize(
    "value", [{"step": -0.1}, {"step": math.nan}, {"tries": 0}, {"by": "style"}]
)
def test_wrong_parameters_are_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(value))} is"):
        DisturbedNegative(**value)
    assert load_plugins().check(
        "generators", {"name": "daml.disturbed_negative", **value}, "[generator]"
    )


def recipe(file: Path, **more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 1, 8)) + 0.5 * rng.normal(size=(6, 10, 8))
    np.savez(file, features=x.reshape(60, 8).astype(np.float32), labels=np.repeat([*"abcdef"], 10))
    return {
        "name": "disturbed",
        "data": {"name": "core.features", "file": str(file)},
        "backbone": {"name": "core.features"},
        "split": {"by": "class", "test": ["e", "f"], "validation": 0.0},
        "head": {"embedding_size": 4},
        "sampler": {"classes": 4, "items": 4, "batches": 3},
        "train": {"epochs": 2, "device": "cpu"},
        "miner": {"name": "daml.semi_hard", "pick": "hardest"},
        "loss": {"name": "daml.triplet", "margin": 0.5},
        "generator": {"name": "daml.disturbed_negative"},
        **more,
    }


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"combiner": {"name": "daml.discriminator", "metrics": 2}},
        {"train": {"epochs": 2, "device": "cpu", "real_weight": 1.0, "mine": "after"}},
    ],
    ids=["plain", "combiner", "mined after"],
)
def test_a_recipe_trains_with_it_and_repeats_itself(tmp_path: Path, more: dict[str, Any]) -> None:
    runs = []
    for name in "xy":
        train(tmp_path / name, check_recipe(recipe(tmp_path / "data.npz", **more)))
        runs.append(Run.open(tmp_path / name))
    weights = [dict(run.model.state_dict()) for run in runs]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


@pytest.mark.parametrize("margin", [0.3, 2.0])
def test_the_hardest_semi_hard_negative_by_loops(margin: float) -> None:
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    codes = torch.randn(8, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    rows = codes.tolist()
    apart = [[sum((u - v) ** 2 for u, v in zip(x, y, strict=True)) for y in rows] for x in rows]
    expected = []
    for a in range(8):
        for p in range(8):
            if a == p or labels[a] != labels[p]:
                continue
            fit = [
                (apart[a][n], n)
                for n in range(8)
                if labels[n] != labels[a] and apart[a][p] < apart[a][n] < apart[a][p] + margin
            ]
            if fit:
                expected.append((a, p, min(fit)[1]))
    actual = SemiHard(margin, pick="hardest")(codes, labels)
    assert list(zip(*(x.tolist() for x in actual), strict=True)) == expected
    with pytest.raises(ValueError, match="pick is"):
        SemiHard(1.0, pick="nearest")
