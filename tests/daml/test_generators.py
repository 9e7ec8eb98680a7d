"""The generators against plain loops in float64 and finite differences, and the miners for them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from discriminator_by_loops import affine
from retrieval.errors import RecipeError
from retrieval.host.plugins import load_plugins
from retrieval.model.model import build_head
from torch import Tensor, nn

from retrieval_daml.generators import PRESETS, HardNegativeGenerator, HardPositiveGenerator
from retrieval_daml.triplet_miners import OnePerClass, SemiHard

F, T = 4, 6
A, P, N = (
    torch.randn(T, F, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
    for s in (1, 2, 3)
)
HEAD = build_head(F, 3, normalise=False).double()
for parameter in HEAD.parameters():
    nn.init.normal_(parameter, generator=torch.Generator().manual_seed(7))

GENERATORS: list[tuple[type[Any], dict[str, Any]]] = [
    (HardNegativeGenerator, {}),
    (HardNegativeGenerator, {"preset": "paper", "margin": 0.3}),
    (HardNegativeGenerator, {"form": "contrastive"}),
    (HardNegativeGenerator, {"residual": False}),
    (HardNegativeGenerator, {"normalise": False, "lambda_reg": 3.0, "lambda_adv": 7.0}),
    (HardNegativeGenerator, {"residual": False, "normalise": False, "margin": -0.5}),
    (HardPositiveGenerator, {}),
    (HardPositiveGenerator, {"preset": "paper", "margin": 0.2}),
    (HardPositiveGenerator, {"normalise": False, "residual": False, "lambda_adv": 2.0}),
]


def made(cls: type[Any], args: dict[str, Any]) -> Any:
    generator = cls(F, **args).double()
    for seed, parameter in enumerate(generator.parameters()):  # a residual one begins at zero
        nn.init.normal_(parameter, std=0.4, generator=torch.Generator().manual_seed(seed))
    return generator


def distance(x: Tensor, y: Tensor) -> Tensor:
    return ((HEAD(x) - HEAD(y)).square().sum(1) + 1e-12).sqrt()


def plain(module: Any, x: list[float]) -> list[float]:
    return affine(module.weight.tolist(), module.bias.tolist(), x)


def squared(x: list[float], y: list[float]) -> float:
    return sum((a - b) ** 2 for a, b in zip(x, y, strict=True))


def forward_by_loops(generator: Any, a: list[float], p: list[float], n: list[float]) -> list[float]:
    positive = isinstance(generator, HardPositiveGenerator)
    source = p if positive else n
    second = a if getattr(generator, "form", "") == "contrastive" else p
    hidden = [max(0.0, v) for v in plain(generator.network[0], a + second + n)]
    out = plain(generator.network[2], hidden)
    if generator.residual:
        out = [s + v for s, v in zip(source, out, strict=True)]
    if generator.normalise:
        length = math.sqrt(squared(source, [0.0] * F) / squared(out, [0.0] * F))
        out = [v * length for v in out]
    return out


def objective_by_loops(generator: Any, anchors: Any, positives: Any, negatives: Any) -> float:
    total = 0.0
    for a, p, n in zip(anchors.tolist(), positives.tolist(), negatives.tolist(), strict=True):
        x = forward_by_loops(generator, a, p, n)
        code = {name: plain(HEAD[0], v) for name, v in {"a": a, "p": p, "n": n, "x": x}.items()}
        if isinstance(generator, HardPositiveGenerator):
            gap = squared(code["n"], code["a"]) - squared(code["x"], code["a"]) - generator.margin
            hard, reg = -squared(x, a), squared(x, p)
        else:
            own = 0.0 if generator.form == "contrastive" else squared(code["p"], code["a"])
            gap = squared(code["x"], code["a"]) - own - generator.margin
            hard, reg = squared(x, a), squared(x, n)
        total += hard + generator.lambda_reg * reg + generator.lambda_adv * max(0.0, gap)
    return total / len(anchors)


@pytest.mark.parametrize(("cls", "args"), GENERATORS)
def test_output_and_objective_by_loops_and_gradient_by_differences(cls, args):
    generator = made(cls, args)
    synthetic = generator(A, P, N)
    for row in range(T):
        expected = forward_by_loops(generator, A[row].tolist(), P[row].tolist(), N[row].tolist())
        assert synthetic[row].tolist() == pytest.approx(expected, rel=1e-9)
    value = generator.objective(A, P, N, synthetic, distance)
    assert value.item() == pytest.approx(objective_by_loops(generator, A, P, N), rel=1e-9)
    value.backward()
    for parameter in generator.parameters():
        gradient = parameter.grad
        index = gradient.abs().flatten().argmax()
        ends = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                parameter.view(-1)[index] += step
                ends.append(objective_by_loops(generator, A, P, N))
                parameter.view(-1)[index] -= step
        slope = (ends[0] - ends[1]) / 2e-6
        assert gradient.view(-1)[index].item() == pytest.approx(slope, rel=1e-5)


def test_a_residual_generator_begins_with_the_real_samples():
    torch.testing.assert_close(HardNegativeGenerator(F).double()(A, P, N), N)
    torch.testing.assert_close(HardPositiveGenerator(F).double()(A, P, N), P)
    assert not torch.allclose(HardNegativeGenerator(F, residual=False).double()(A, P, N), N)


def test_layers_and_presets_are_those_of_the_paper():
    widths = [tuple(p.shape) for p in HardNegativeGenerator(1024).parameters() if p.ndim == 2]
    assert widths == [(1024, 3072), (1024, 1024)]
    assert PRESETS == {"paper": (1.0, 50.0), "default": (50.0, 50.0)}
    generator = HardNegativeGenerator(F, preset="paper", lambda_reg=2.0)
    assert (generator.lambda_reg, generator.lambda_adv) == (2.0, 50.0)


@pytest.mark.parametrize("name", ["daml.hard_negative", "daml.hard_positive"])
@pytest.mark.parametrize("value", [{"lambda_reg": -1.0}, {"lambda_adv": -0.1}, {"preset": "papr"}])
def test_wrong_parameters_are_refused_in_a_recipe(name, value):
    (problem,) = load_plugins().check("generators", {"name": name, **value}, "[generator]")
    assert next(iter(value)) in problem


@pytest.mark.parametrize(
    "value", [{"lambda_reg": -1.0}, {"lambda_adv": math.nan}, {"margin": math.inf}]
)
def test_wrong_parameters_are_refused_in_code(value):
    for cls in (HardNegativeGenerator, HardPositiveGenerator):
        with pytest.raises(ValueError, match=f"{next(iter(value))} is"):
            cls(F, **value)


def test_an_objective_without_a_minimum_is_refused():
    table = {"name": "daml.hard_positive", "preset": "paper", "normalise": False}
    says = "lambda_reg is 1, and without normalise it must be above 1"
    with pytest.raises(RecipeError, match=says):
        load_plugins().build("generators", table, {"features": F})


Y = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])


@pytest.mark.parametrize("anchors", ["all", "one"])
@pytest.mark.parametrize("negatives", [0, 1, 2])
def test_one_triplet_for_each_anchor_and_other_class(anchors, negatives):
    codes = torch.randn(len(Y), 3)
    seen: set[tuple[int, int, int]] = set()
    for _ in range(60):
        a, p, n = OnePerClass(anchors, negatives)(codes, Y)[:3]
        assert (Y[a] == Y[p]).all() and (a != p).all() and (Y[a] != Y[n]).all()
        pairs = list(zip(a.tolist(), Y[n].tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
        with_positive = 9 if anchors == "all" else 3  # class 3 has no positive
        assert len(pairs) == with_positive * (negatives or 3)
        assert len(set(a.tolist())) == with_positive
        seen |= set(zip(a.tolist(), p.tolist(), n.tolist(), strict=True))
    assert {a for a, _, _ in seen} == set(range(9))
    assert {n for _, _, n in seen} == set(range(10))
    assert {p for a, p, _ in seen if a == 5} == {6, 7, 8}


def test_one_per_class_from_a_reference_set():
    ref_labels = torch.tensor([5, 3, 3, 0])
    a, p, n = OnePerClass()(torch.randn(len(Y), 3), Y, torch.randn(4, 3), ref_labels)[:3]
    assert (ref_labels[p] == Y[a]).all() and (ref_labels[n] != Y[a]).all()
    assert sorted(set(a.tolist())) == [0, 1, 2, 9]
    assert len(a) == 4 * 2


@pytest.mark.parametrize("margin", [0.3, 0.8, 2.0])
def test_semi_hard_negatives_by_loops(margin):
    codes = torch.randn(len(Y), 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    rows = codes.tolist()
    apart = [[squared(x, y) for y in rows] for x in rows]
    fits: dict[tuple[int, int], list[int]] = {}
    for a, p, n in itertools.product(range(len(Y)), repeat=3):
        if a != p and Y[a] == Y[p] != Y[n] and 0 < apart[a][n] - apart[a][p] < margin:
            fits.setdefault((a, p), []).append(n)

    def triplets(**options: Any) -> list[tuple[int, int, int]]:
        indices = SemiHard(margin, **options)(codes, Y)
        return list(zip(*(index.tolist() for index in indices), strict=True))

    seen: set[tuple[int, int, int]] = set()
    for _ in range(200):
        drawn = triplets()
        assert [(a, p) for a, p, _ in drawn] == list(fits)
        seen |= set(drawn)
    assert seen == {(*pair, n) for pair, negatives in fits.items() for n in negatives}
    hardest = [(a, p, min(fit, key=lambda n: apart[a][n])) for (a, p), fit in fits.items()]
    assert triplets(pick="hardest") == hardest


def test_wrong_parameters_of_semi_hard_are_refused():
    with pytest.raises(ValueError, match="pick is"):
        SemiHard(1.0, pick="nearest")  # type: ignore[arg-type]
    for wrong in (0.0, math.nan):
        with pytest.raises(ValueError, match="must be a number above 0"):
            SemiHard(wrong)
