"""One small, working thing for every factory hook, which recipes of the tests name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from pytorch_metric_learning.distances import BaseDistance, LpDistance
from pytorch_metric_learning.reducers import MeanReducer
from pytorch_metric_learning.regularizers import LpRegularizer
from retrieval.plugin import (
    Backbone,
    Combiner,
    Dataset,
    Generator,
    IndexBackend,
    Part,
    hookimpl,
    traits,
)
from retrieval.serving.store.address import Address
from retrieval.serving.store.local import LocalPlace
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
    """A loss with a distance of its own, and no use for references or a miner."""

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


class Scan(IndexBackend):
    """A plain scan."""

    def __init__(self, block: int = 100) -> None:
        self.block = block

    def build(self, vectors: Any) -> None:
        self.vectors = vectors

    def search(self, queries: Any, k: int) -> Any:
        distances = np.linalg.norm(queries[:, None] - self.vectors[None], axis=-1)
        rows = distances.argsort(axis=1)[:, :k]
        return np.take_along_axis(distances, rows, axis=1), rows

    def save(self, path: Path) -> None:
        path.write_bytes(self.vectors.tobytes())

    def load(self, path: Path) -> None:
        self.vectors = np.frombuffer(path.read_bytes(), dtype=np.float32)


class Shelf(LocalPlace):
    """A folder, as a store of its own."""

    def __init__(self, address: Address, timeout: int = 1) -> None:
        super().__init__(address)
        self.timeout = timeout


retrieval_backbones = hookimpl(lambda: {"same": Same})
retrieval_datasets = hookimpl(lambda: {"items": Items})
retrieval_losses = hookimpl(lambda: {"margin": Margin, "fixed": Fixed, "several": Several})
retrieval_miners = hookimpl(lambda: {"all_pairs": AllPairs})
retrieval_generators = hookimpl(lambda: {"middle": Middle})
retrieval_combiners = hookimpl(lambda: {"cosine": Cosine})
retrieval_learners = hookimpl(lambda: {"centre": Centre})
retrieval_metrics = hookimpl(lambda: {"best": Best})
retrieval_indexes = hookimpl(lambda: {"scan": Scan})
retrieval_stores = hookimpl(lambda: {"shelf": Shelf})
retrieval_distances = hookimpl(lambda: {"euclidean": euclidean})
retrieval_reducers = hookimpl(lambda: {"mean": mean})
retrieval_regularizers = hookimpl(lambda: {"lp": lp})


class Silent:
    """A tracker that keeps nothing."""

    def __init__(self) -> None:
        """Keep nothing."""

    def begin(self, run: Any) -> tuple[str, str]:
        return "key", "nowhere"

    def log(self, metrics: Mapping[str, float], epoch: int | None) -> None: ...

    def end(self, how: str) -> None: ...


retrieval_trackers = hookimpl(lambda: {"silent": Silent})


@hookimpl
def retrieval_steps_end(run: Any, step: int, metrics: Mapping[str, float]) -> None: ...
