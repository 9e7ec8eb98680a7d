"""The Matryoshka wrapper against plain loops in double precision, with every loss, and errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from retrieval import create
from retrieval.errors import RecipeError
from retrieval.host.plugins import load_plugins
from retrieval.recipe.read import check_recipe
from torch import Tensor, nn

from retrieval_core.matryoshka_loss import Matryoshka

PLUGINS = load_plugins()
GIVEN = {"embedding_size": 12, "classes": 4, "features": 12}
LABELS = torch.arange(4).repeat_interleave(3)
WIDTHS, WEIGHTS = [2, 5], [0.5, 2.0, 1.5]


def make(loss: Any = "pml.contrastive", **values: Any) -> Any:
    table = {"name": "core.matryoshka", "loss": loss, "widths": WIDTHS, **values}
    return PLUGINS.build("losses", table, GIVEN)


def batch(items: int = 12) -> Tensor:
    built = torch.randn(items, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return nn.functional.normalize(built).requires_grad_()


def contrastive(rows: list[list[float]], labels: list[int], width: int, unit: bool) -> float:
    """The loss `pml.contrastive` with margins 0 and 1: the mean over positive pairs with a loss
    above 0, plus the same for negative pairs.
    """

    def scaled(row: Sequence[float]) -> list[float]:
        length = math.sqrt(sum(x * x for x in row))
        return [x / length for x in row]

    cut = [scaled(row[:width]) if unit else row[:width] for row in rows]
    sides: dict[bool, list[float]] = {True: [], False: []}
    for i, left in enumerate(cut):
        for j, other in enumerate(cut):
            if i != j:
                away = math.dist(scaled(left), scaled(other))
                same = labels[i] == labels[j]
                if (lost := away if same else 1 - away) > 0:
                    sides[same].append(lost)
    return sum(sum(side) / len(side) for side in sides.values() if side)


@pytest.mark.parametrize("unit", [True, False])
def test_is_the_weighted_sum_of_the_loss_at_each_width(unit):
    loss, embeddings = make(weights=WEIGHTS, normalise=unit), batch()
    value = loss(embeddings, LABELS)
    rows, labels = embeddings.tolist(), LABELS.tolist()

    def expected(rows: list[list[float]]) -> float:
        return sum(
            weight * contrastive(rows, labels, width, unit)
            for width, weight in zip([*WIDTHS, 12], WEIGHTS, strict=True)
        )

    assert value.item() == pytest.approx(expected(rows), rel=1e-9)
    value.backward()
    step = 1e-6
    for item in (0, 7):
        for number in (0, 1, 3, 6, 11):
            ends = []
            for side in (step, -step):
                moved = [list(row) for row in rows]
                moved[item][number] += side
                ends.append(expected(moved))
            slope = (ends[0] - ends[1]) / (2 * step)
            assert embeddings.grad[item, number].item() == pytest.approx(slope, abs=1e-6)


def test_prefixes_have_unit_length():
    seen: list[Tensor] = []

    class Seen(nn.Module):
        def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
            seen.append(embeddings)
            return embeddings.sum()

    embeddings = batch() * 3
    Matryoshka([Seen(), Seen(), Seen()], [2, 5, 12], [1, 1, 1])(embeddings, LABELS)
    assert [left.shape[1] for left in seen] == [2, 5, 12]
    assert torch.allclose(seen[0].norm(dim=1), torch.ones(12, dtype=torch.float64))
    assert torch.allclose(seen[1] * embeddings[:, :5].norm(dim=1, keepdim=True), embeddings[:, :5])
    assert seen[2] is embeddings
    seen.clear()
    Matryoshka([Seen(), Seen()], [2, 12], [1, 1], normalise=False)(embeddings, LABELS)
    assert torch.equal(seen[0], embeddings[:, :2])


@pytest.mark.parametrize("name", list(PLUGINS.factories("losses")))
def test_every_loss_trains_prefixes(name):
    """Each width has its own proxies or class weights, which get gradients."""
    torch.manual_seed(0)
    factory = PLUGINS.find("losses", name)
    inner: dict[str, Any] = {"name": name}
    for p in factory.parameters:
        if p.required and p.part == "losses":
            inner[p.name] = ["pml.contrastive"] if p.many else "pml.contrastive"
        elif p.required:
            inner[p.name] = [1] if p.name == "widths" else 0.5
    try:
        loss = make(inner)
    except RecipeError as refused:
        pytest.skip(str(refused))
    embeddings = torch.randn(12, 12, generator=torch.Generator().manual_seed(1)).requires_grad_()
    value = loss(embeddings, LABELS)
    value.backward()
    assert math.isfinite(value.item()) and len(loss.losses) == 3
    assert embeddings.grad is not None and bool(embeddings.grad.isfinite().all())
    assert embeddings.grad[:, :2].abs().sum() > 0 and embeddings.grad[:, 5:].abs().sum() > 0
    for parameter in loss.parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all())


def test_a_miners_indices_and_a_reference_set_serve_each_width():
    loss, embeddings, reference = make(), batch(), batch(20).detach()
    triplets = (torch.tensor([0, 3, 3]), torch.tensor([1, 4, 5]), torch.tensor([4, 8, 0]))
    names = torch.arange(20) % 4
    single = create("loss", "pml.contrastive")
    unit = nn.functional.normalize

    def by_width(indices: Any = None, ref: Tensor | None = None) -> float:
        parts = []
        for width in (2, 5, 12):
            other = {} if ref is None else {"ref_emb": unit(ref[:, :width]), "ref_labels": names}
            parts.append(single(unit(embeddings[:, :width]), LABELS, indices, **other).item())
        return sum(parts)

    assert loss(embeddings, LABELS, triplets).item() == pytest.approx(by_width(triplets))
    actual = loss(embeddings, LABELS, None, reference, names).item()
    assert actual == pytest.approx(by_width(ref=reference)) and actual != pytest.approx(by_width())


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"widths": [2, 12]}, "must be smaller than the embedding"),
        ({"widths": [5, 2]}, "ascend"),
        ({"widths": [2, 2]}, "ascend"),
        ({"weights": [1.0]}, "Set 3"),
        ({"weights": [0.0, 0.0, 0.0]}, "not all 0"),
    ],
)
def test_wrong_widths_and_weights_are_refused(values, fault):
    with pytest.raises(RecipeError, match=fault):
        make(**values)


def test_a_combiner_is_refused():
    combiner = next(iter(PLUGINS.factories("combiners")))
    recipe = {
        "data": {"name": "core.digits"},
        "backbone": {"name": "core.convnet"},
        "combiner": {"name": combiner},
        "loss": {"name": "core.matryoshka", "loss": "pml.contrastive", "widths": [8]},
    }
    with pytest.raises(RecipeError, match="trains shortened embeddings"):
        check_recipe(recipe)
