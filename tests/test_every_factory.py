"""Every installed loss and miner builds, trains, and survives unusual batches and precisions."""

from __future__ import annotations

import functools
import math
import tempfile
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from retrieval.errors import DataError, RecipeError
from retrieval.host.factory import KINDS, Factory
from retrieval.host.plugins import Plugins, load_plugins
from retrieval.model.contracts import Combiner
from retrieval.model.loss import CheckedLoss
from torch import Tensor, nn

PLUGINS = load_plugins()
GIVEN = {"embedding_size": 8, "classes": 4, "features": 8}
PARTS = {"losses": "pml.contrastive", "miners": "pml.triplet_margin", "reducers": "pml.mean"}
LABELS = torch.arange(4).repeat_interleave(3)


def names(kind: str) -> list[str]:
    return list(PLUGINS.factories(kind))


def values(plugins: Plugins, factory: Factory) -> dict[str, Any]:
    """Return a value for each parameter that a recipe must set."""
    table: dict[str, Any] = {"name": factory.name}
    for p in factory.parameters:
        if not p.required:
            continue
        if p.part:
            part = PARTS.get(p.part) or next(iter(plugins.factories(p.part)))
            table[p.name] = [part] if p.many else part
        else:
            table[p.name] = smallest(p.annotation)
    return table


def smallest(annotation: Any) -> Any:
    """Return a plain value of a type, within its limits."""
    limits = [m for extra in get_args(annotation)[1:] for m in getattr(extra, "metadata", [extra])]
    kind = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(kind) in (list, Union, types.UnionType):
        first = smallest(get_args(kind)[0])
        return [first] if get_origin(kind) is list else first
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    least = max(
        [getattr(m, "ge", 0) for m in limits if getattr(m, "ge", None) is not None], default=1
    )
    if kind is Path:
        return str(teacher_file())
    plain: dict[Any, Any] = {int: max(least, 1), float: float(least or 1), str: "loss", bool: False}
    return plain[kind]


@functools.cache
def teacher_file() -> Path:
    """Return a file with a teacher's embeddings of twelve items, for `core.distillation`."""
    path = Path(tempfile.mkdtemp()) / "teacher.npz"
    vectors = torch.randn(12, GIVEN["embedding_size"], generator=torch.Generator().manual_seed(1))
    np.savez(path, vectors=vectors.numpy(), classes=np.arange(12) // 3)
    return path


class Weighted(Combiner):
    """Weighted squared differences: a combiner with parameters, whose codes have any length."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.linspace(0.5, 1.5, GIVEN["embedding_size"]))

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return (self.weights * (query_emb.unsqueeze(1) - ref_emb) ** 2).sum(2)

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return (self.weights * (query_emb - ref_emb) ** 2).sum(1)


def build(plugins: Plugins, kind: str, name: str) -> Any:
    return plugins.build(kind, values(plugins, plugins.find(kind, name)), GIVEN)


def batch(dtype: torch.dtype = torch.float32, items: int = 12) -> Tensor:
    vectors = torch.randn(
        items, GIVEN["embedding_size"], generator=torch.Generator().manual_seed(0)
    )
    return vectors.to(dtype).requires_grad_()


def checked_backward(loss: Tensor, embeddings: Tensor) -> None:
    assert loss.numel() == 1 and math.isfinite(loss.item())
    loss.backward()
    if embeddings.grad is not None:
        assert embeddings.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_factory_is_documented(kind):
    for factory in PLUGINS.factories(kind).values():
        assert factory.summary.strip(), factory.name
        assert not factory.hints, factory.hints
        assert all(p.doc for p in factory.parameters), factory.name


@pytest.mark.parametrize("name", names("losses"))
class TestLoss:
    def test_trains_embeddings_and_own_parameters(self, name):
        torch.manual_seed(0)
        loss = build(PLUGINS, "losses", name)
        for _ in range(2):  # some losses keep a state
            embeddings = batch()
            loss.zero_grad()
            value = loss(embeddings, LABELS)
            checked_backward(value, embeddings)
            assert value.dtype == torch.float32
        assert embeddings.grad is not None and embeddings.grad.abs().sum() > 0
        for parameter, tensor in loss.named_parameters():
            assert tensor.grad is not None and tensor.grad.isfinite().all(), parameter
        assert sum(float(p.grad.abs().sum()) for p in loss.parameters()) > 0 or not list(
            loss.parameters()
        )

    @pytest.mark.parametrize("labels", [range(12), [0] * 12], ids=["distinct", "alike"])
    def test_batch_without_triplets(self, name, labels):
        torch.manual_seed(0)
        table = values(PLUGINS, PLUGINS.find("losses", name))
        loss = PLUGINS.build("losses", table, GIVEN | {"classes": 12})
        embeddings = batch()
        checked_backward(loss(embeddings, torch.tensor(list(labels))), embeddings)

    @pytest.mark.parametrize("items", [1, 12])
    def test_equal_embeddings(self, name, items):
        torch.manual_seed(0)
        embeddings = batch(items=1).detach().repeat(items, 1).requires_grad_()
        loss = build(PLUGINS, "losses", name)
        checked_backward(loss(embeddings, LABELS[:items]), embeddings)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_half_precision_and_autocast(self, name, dtype):
        torch.manual_seed(0)
        loss = build(PLUGINS, "losses", name)
        before = {key: tensor.dtype for key, tensor in loss.state_dict().items()}
        embeddings = batch()
        head = nn.Linear(8, 8)
        with torch.autocast("cpu", dtype=dtype):
            codes = head(embeddings)
            value = loss(codes, LABELS)
        assert codes.dtype == dtype
        checked_backward(value, embeddings)
        assert {key: tensor.dtype for key, tensor in loss.state_dict().items()} == before

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
    def test_the_loss_has_the_type_of_the_embeddings(self, name, dtype):
        embeddings = batch().detach().to(dtype).requires_grad_()
        value = build(PLUGINS, "losses", name)(embeddings, LABELS)
        assert value.dtype == dtype
        low = torch.bfloat16 if dtype == torch.float64 else dtype
        with torch.autocast("cpu", dtype=low):  # a scaled loss would overflow half precision
            value_within = build(PLUGINS, "losses", name)(embeddings, LABELS)
            assert value_within.dtype in (torch.float32, torch.float64)
        value.backward()
        assert embeddings.grad is not None and bool(torch.isfinite(embeddings.grad).all())

    def test_reference_set_as_stated(self, name):
        loss, other = build(PLUGINS, "losses", name), batch(items=20).detach().flip(0)
        labels = torch.arange(20) % 4

        def call(reference: Tensor) -> Tensor:
            torch.manual_seed(0)
            return loss(batch(), LABELS, None, ref_emb=reference, ref_labels=labels)

        if not PLUGINS.find("losses", name).supports_ref_emb:
            with pytest.raises(ValueError):
                call(other)
            return
        value = call(other.requires_grad_())
        checked_backward(value, other)
        assert other.grad is not None and other.grad.abs().sum() > 0
        assert call(torch.randn_like(other)).item() != value.item()

    def test_combiner(self, name):
        factory = PLUGINS.find("losses", name)
        if not factory.takes("distance"):
            pytest.skip("takes no distance: a recipe with both is refused")
        torch.manual_seed(0)
        combiner = Weighted()
        try:
            loss = PLUGINS.build("losses", values(PLUGINS, factory), GIVEN | {"distance": combiner})
        except RecipeError as refused:
            if "similarity" not in str(refused):
                raise
            return
        embeddings = batch()
        checked_backward(loss(embeddings / 4, LABELS), embeddings)
        assert combiner.weights.grad is not None and combiner.weights.grad.abs().sum() > 0

    def test_miner_as_stated(self, name):
        torch.manual_seed(0)
        stated = PLUGINS.find("losses", name).supports_miner
        loss, embeddings = build(PLUGINS, "losses", name), batch()
        triplets = (torch.tensor([0, 3, 3]), torch.tensor([1, 4, 5]), torch.tensor([4, 8, 0]))
        for indices in (triplets, (*triplets[:2], triplets[0], triplets[2])):
            if stated:
                checked_backward(loss(embeddings, LABELS, indices), embeddings)
            else:
                with pytest.raises(ValueError):
                    loss(embeddings, LABELS, indices)
        if stated:
            none = torch.zeros(0, dtype=torch.long)
            checked_backward(loss(embeddings, LABELS, (none, none, none)), embeddings)


@pytest.mark.parametrize("name", names("losses"))
def test_input_that_a_checked_loss_refuses(name):
    loss, broken = build(PLUGINS, "losses", name), batch().detach()
    if not isinstance(loss, CheckedLoss):
        pytest.skip("it wraps a loss, which checks the input")
    broken[2, 1] = math.nan
    with pytest.raises(DataError, match="NaN or infinite numbers: 1 of 12 items"):
        loss(broken, LABELS)
    for labels in (None, ["a"] * 12, LABELS[:4]):
        with pytest.raises(ValueError, match="labels must be a tensor of 12 class ids, one per"):
            loss(batch(), labels)


@pytest.mark.parametrize("name", names("miners"))
class TestMiner:
    def indices(self, name: str, **reference: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return build(PLUGINS, "miners", name)(batch().detach(), LABELS, **reference)

    def check(self, indices: tuple[Tensor, ...], labels: Tensor, by_label: bool = True) -> None:
        pairs = [(indices[0], indices[1], True)]
        assert len(indices) in (3, 4)
        pairs.append((indices[-2] if len(indices) == 4 else indices[0], indices[-1], False))
        for anchor, other, same in pairs:
            assert anchor.dtype == other.dtype == torch.int64 and anchor.shape == other.shape
            assert anchor.ndim == 1
            if by_label:
                assert ((LABELS[anchor] == labels[other]) == same).all()

    def test_indices_are_of_the_stated_kind(self, name):
        by_label = "already_packaged" not in name
        indices = self.indices(name)
        self.check(indices, LABELS, by_label)
        assert (indices[0] != indices[1]).all()

    def test_reference_set_as_stated(self, name):
        labels = torch.arange(20) % 4
        reference = {"ref_emb": batch(items=20).detach().flip(0), "ref_labels": labels}
        if PLUGINS.find("miners", name).supports_ref_emb:
            self.check(self.indices(name, **reference), labels)
        else:
            with pytest.raises(ValueError):
                self.indices(name, **reference)

    def test_combiner(self, name):
        factory = PLUGINS.find("miners", name)
        if not factory.takes("distance"):
            pytest.skip("takes no distance")
        miner = PLUGINS.build("miners", values(PLUGINS, factory), GIVEN | {"distance": Weighted()})
        self.check(miner(batch().detach() / 4, LABELS), LABELS)

    @pytest.mark.parametrize("labels", [range(12), [0] * 12], ids=["distinct", "alike"])
    def test_batch_without_triplets(self, name, labels):
        indices = build(PLUGINS, "miners", name)(batch().detach(), torch.tensor(list(labels)))
        if len(indices) == 3 and "already_packaged" not in name:
            assert all(len(x) == 0 for x in indices)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_half_precision_and_autocast(self, name, dtype):
        miner = build(PLUGINS, "miners", name)
        with torch.autocast("cpu", dtype=dtype):
            self.check(miner(batch(dtype).detach(), LABELS), LABELS, "already_packaged" not in name)
