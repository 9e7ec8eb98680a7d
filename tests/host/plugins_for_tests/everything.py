"""One small, working factory for almost every hook, for the tests' recipes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from pytorch_metric_learning.distances import BaseDistance, LpDistance
from pytorch_metric_learning.reducers import MeanReducer
from pytorch_metric_learning.regularizers import LpRegularizer
from retrieval.plugin import Backbone, Combiner, Dataset, Generator, Part, hookimpl, traits
from torch import Tensor, nn

Loss = Annotated[nn.Module, Part("losses")]


class Items(Dataset):
    """Random vectors."""

    kind = "features"

    def __init__(self, count: Annotated[int, Field(ge=1)] = 4) -> None:
        self.arrays = np.random.default_rng(0).normal(size=(3 * count, 5)).astype(np.float32)
        self.labels = [str(i % 3) for i in range(3 * count)]
        self.keys = [str(i) for i in range(3 * count)]

    def __getitem__(self, index: int) -> NDArray[Any]:
        assert self.arrays is not None
        return self.arrays[index]


class Same(Backbone):
    """Vectors as they are."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        return x


class Margin(nn.Module):
    """A loss with parts.

    Args:
        margin: how far.
        scale: has no default.
        distance: how it measures.
        reducer: how it sums.
    """

    def __init__(
        self,
        scale: Annotated[float, Field(gt=0)],
        margin: float = 0.1,
        distance: Annotated[BaseDistance | None, Part("distances")] = None,
        reducer: Annotated[nn.Module | None, Part("reducers")] = None,
    ) -> None:
        super().__init__()
        self.scale, self.margin, self.distance, self.reducer = scale, margin, distance, reducer

    def forward(self, embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
        return embeddings.square().mean() * self.scale


@traits(ref_emb=False, miner=False)
class Fixed(nn.Module):
    """A loss that accepts neither a reference set nor a miner's indices."""

    def __init__(self, classes: int, embedding_size: int) -> None:
        super().__init__()
        self.shape = (classes, embedding_size)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return embeddings.mean()


class Several(nn.Module):
    """A loss of losses."""

    def __init__(
        self,
        losses: list[Loss],
        first: Annotated[nn.Module | None, Part("losses")] = None,
        weights: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.losses, self.first, self.weights = nn.ModuleList(losses), first, weights

    def forward(self, embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
        return sum(loss(embeddings, labels) for loss in self.losses)


class AllPairs(nn.Module):
    """A miner of all pairs."""

    def __init__(self, distance: BaseDistance | None = None) -> None:
        super().__init__()

    def forward(self, embeddings, labels, ref_emb=None, ref_labels=None):
        same = labels[:, None] == labels
        return *torch.where(same.triu(1)), *torch.where(~same)


class Middle(Generator):
    """A generator between anchor and negative."""

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return (anchor + negative) / 2


class Cosine(Combiner):
    """A combiner that measures one distance."""

    def __init__(self, embedding_size: int, weight: float = 1.0) -> None:
        super().__init__()
        self.embedding_size = embedding_size

    def build_head(self, features: int) -> nn.Module:
        return nn.Linear(features, self.embedding_size)


class Centre:
    """A learner that subtracts the mean."""

    def __init__(self, mode: Literal["mean", "median"] = "mean") -> None:
        self.mode = mode


def euclidean(p: float = 2.0) -> BaseDistance:
    """The Lp distance."""
    return LpDistance(p=p)


def mean(pad: Annotated[nn.Module | None, Part("regularizers")] = None, low: float = 0.0) -> Any:
    """The mean."""
    reducer = MeanReducer()
    reducer.pad = pad
    return reducer


def lp(p: int = 2) -> nn.Module:
    """The Lp norm."""
    return LpRegularizer(p=p)


class Best:
    """Whether the nearest matches."""

    depth = 1

    def __call__(self, matches: NDArray[np.bool_], relevant: NDArray[np.int64]) -> Any:
        return matches[:, 0].astype(np.float64)


retrieval_backbones = hookimpl(lambda: {"same": Same})
retrieval_datasets = hookimpl(lambda: {"items": Items})
retrieval_losses = hookimpl(lambda: {"margin": Margin, "fixed": Fixed, "several": Several})
retrieval_miners = hookimpl(lambda: {"all_pairs": AllPairs})
retrieval_generators = hookimpl(lambda: {"middle": Middle})
retrieval_combiners = hookimpl(lambda: {"cosine": Cosine})
retrieval_learners = hookimpl(lambda: {"centre": Centre})
retrieval_metrics = hookimpl(lambda: {"best": Best})
retrieval_distances = hookimpl(lambda: {"euclidean": euclidean})
retrieval_reducers = hookimpl(lambda: {"mean": mean})
retrieval_regularizers = hookimpl(lambda: {"lp": lp})
