"""Losses that wrap others: cross-batch memory, several losses at once, and pairs of views."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses as upstream
from retrieval.errors import RecipeError
from retrieval.host.plugins import load_plugins
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PLUGINS = load_plugins()
GIVEN = {"embedding_size": 6, "classes": 4}


def make(name: str, /, **values: Any) -> Any:
    return PLUGINS.build("losses", {"name": f"pml.{name}", **values}, GIVEN)


def batches(number: int, items: int = 8) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(5)
    return [
        (torch.randn(items, 10, generator=g), torch.randint(0, 4, (items,), generator=g))
        for _ in range(number)
    ]


def train(
    model: nn.Module, loss: nn.Module, data: list[tuple[Tensor, Tensor]], miner: Any = None
) -> list[float]:
    seen = []
    for x, y in data:
        codes = model(x)
        value = loss(codes, y, miner(codes, y) if miner else None)
        model.zero_grad()
        value.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        seen.append(value.item())
    return seen


class TestCrossBatchMemory:
    @pytest.mark.parametrize("stop", [1, 3, 5])  # before, at and after the queue of 20 is full
    def test_resumes_identically(self, tmp_path, stop):
        values = {"loss": "pml.contrastive", "memory_size": 20, "miner": "pml.multi_similarity"}
        torch.manual_seed(0)
        model, loss, data = nn.Linear(10, 6), make("cross_batch_memory", **values), batches(9)
        train(model, loss, data[:stop])
        save_file(loss.state_dict(), tmp_path / "loss.safetensors")
        resumed_model, resumed = copy.deepcopy(model), make("cross_batch_memory", **values)
        resumed.load_state_dict(load_file(tmp_path / "loss.safetensors"))
        straight = train(model, loss, data[stop:])
        assert train(resumed_model, resumed, data[stop:]) == straight
        assert torch.equal(resumed_model.weight, model.weight)
        for key, tensor in loss.state_dict().items():
            assert torch.equal(resumed.state_dict()[key], tensor), key

    def test_by_loops(self):
        loss = make("cross_batch_memory", loss="pml.contrastive", memory_size=20)
        queue: list[tuple[Tensor, int, int]] = []
        for step, (x, y) in enumerate(batches(6)):
            codes = nn.functional.normalize(x[:, :6])
            queue = (queue + [(c, int(label), step) for c, label in zip(codes, y, strict=True)])[
                -20:
            ]
            costs: dict[bool, list[float]] = {True: [], False: []}
            for i, (c, label) in enumerate(zip(codes, y, strict=True)):
                for j, (other, other_label, when) in enumerate(queue):
                    if when == step and j == len(queue) - len(codes) + i:
                        continue  # the item itself
                    d, same = (c - other).norm().item(), other_label == int(label)
                    costs[same].append(d if same else 1 - d)
            expected = 0.0
            for part in costs.values():
                kept = [cost for cost in part if cost > 0]
                expected += sum(kept) / len(kept) if kept else 0
            assert loss(codes, y).item() == pytest.approx(expected, rel=1e-4)
        assert loss.has_been_filled and loss.queue_idx == 48 % 20

    def test_an_outer_miners_indices_point_at_the_batch(self):
        loss = make("cross_batch_memory", loss="pml.contrastive", memory_size=20)
        for x, y in batches(2):
            loss(x[:, :6], y)
        x, y = batches(3)[2]
        mined = tuple(torch.tensor([i]) for i in range(3))
        loss.add_to_memory(x[:, :6], y, 8)
        actual = loss.create_indices_tuple(
            x[:, :6], y, loss.embedding_memory, loss.label_memory, mined, True
        )
        places = [(16 + i) % 20 for i in range(8)]
        assert [index[-1].item() for index in actual] == [0, places[1], 0, places[2]]

    def test_one_item_is_not_compared_with_itself(self):
        loss = make("cross_batch_memory", loss="pml.contrastive", memory_size=4)
        assert loss(torch.randn(1, 6), torch.tensor([0])).item() == 0

    def test_trains_with_every_loss_that_accepts_a_reference_set(self):
        for name, factory in PLUGINS.factories("losses").items():
            wraps = name in ("pml.multiple", "pml.cross_batch_memory")
            if not name.startswith("pml.") or wraps:
                continue
            if factory.supports_ref_emb:
                model = nn.Linear(10, 6)
                before = model.weight.detach().clone()
                train(model, make("cross_batch_memory", loss=name, memory_size=20), batches(4))
                assert model.weight.isfinite().all(), name
                assert not torch.equal(model.weight, before), name
            elif not any(p.required for p in factory.parameters):
                with pytest.raises(RecipeError, match="accepts a reference set"):
                    make("cross_batch_memory", loss=name)

    def test_errors(self):
        loss = make("cross_batch_memory", loss="pml.contrastive", memory_size=4)
        with pytest.raises(
            ValueError, match=r"memory_size \(4\) must be at least the batch size \(8\)"
        ):
            loss(torch.randn(8, 6), torch.zeros(8, dtype=torch.long))
        with pytest.raises(ValueError, match="accepts no ref_emb"):
            loss(torch.randn(2, 6), torch.zeros(2, dtype=torch.long), ref_emb=torch.randn(2, 6))


class TestMultiple:
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    y = torch.arange(4).repeat_interleave(3)

    def test_weighted_sum_and_miners(self):
        loss = make(
            "multiple",
            losses=["pml.contrastive", {"name": "pml.triplet_margin", "margin": 0.3}],
            weights=[0.5, 2.0],
            miners=[{"name": "pml.triplet_margin", "type_of_triplets": "hard"}],
            miner_for=[1],
        )
        miner = PLUGINS.build("miners", {"name": "pml.triplet_margin", "type_of_triplets": "hard"})
        expected = 0.5 * upstream.ContrastiveLoss()(self.x, self.y)
        triplets = miner(self.x, self.y)
        expected += 2 * upstream.TripletMarginLoss(margin=0.3)(self.x, self.y, triplets)
        assert loss(self.x, self.y).item() == pytest.approx(expected.item())
        with pytest.raises(ValueError, match="losses have miners"):
            loss(self.x, self.y, (self.y, self.y, self.y))

    def test_a_reference_set_reaches_every_loss(self):
        reference: dict[str, Any] = {"ref_emb": self.x.flip(0) * 2, "ref_labels": self.y}
        expected = upstream.ContrastiveLoss()(self.x, self.y, **reference)
        expected += upstream.SupConLoss()(self.x, self.y, **reference)
        loss = make("multiple", losses=["pml.contrastive", "pml.sup_con"])
        assert loss(self.x, self.y, **reference).item() == pytest.approx(expected.item())
        loss = make("multiple", losses=["pml.contrastive", "pml.smooth_ap"])
        with pytest.raises(ValueError, match="SmoothAPLoss does not"):
            loss(self.x, self.y, **reference)

    def test_parameters_of_the_parts_are_its_own(self):
        loss = make("multiple", losses=["pml.proxy_anchor", "pml.arc_face"])
        assert sorted(name for name, _ in loss.named_parameters()) == [
            "losses.0.proxies",
            "losses.1.W",
        ]

    @pytest.mark.parametrize(
        ("values", "sentence"),
        [
            ({"weights": [1.0]}, "2 losses, but 1 weights"),
            ({"miners": ["pml.hdc"]}, "need different losses"),
            ({"miners": ["pml.hdc"], "miner_for": [2]}, "need different losses"),
            ({"miner_for": [0]}, "there are no miners"),
        ],
    )
    def test_errors(self, values, sentence):
        with pytest.raises(RecipeError, match=sentence):
            make("multiple", losses=["pml.contrastive", "pml.circle"], **values)


@pytest.mark.parametrize("symmetric", [True, False])
def test_self_supervised_finds_the_views(symmetric):
    first, second = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1)).unbind()
    expected = upstream.SelfSupervisedLoss(upstream.NTXentLoss(), symmetric)(first, second)
    loss = make("self_supervised", loss="pml.nt_xent", symmetric=symmetric)
    labels = torch.tensor([7, 7, 3, 3, 9, 9, 1, 1, 0, 0])  # two views of each item
    value = loss(torch.stack([first, second], 1).flatten(0, 1), labels)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
