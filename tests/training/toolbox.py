"""A plugin of small real parts, and of a loss that kills the process at a chosen step."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning import losses
from retrieval.plugin import Backbone, Combiner, Dataset, Generator, Preprocessing, hookimpl
from torch import Tensor, nn
from torch.utils.data import BatchSampler


class Digits(Dataset):
    """Scikit-learn's digits, 16 to 24 of a class."""

    def __init__(self, items: int = 400) -> None:
        """Take the first digits."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        self.arrays = (digits.images[:items] * 15.9).astype(np.uint8)
        self.labels = [str(label) for label in digits.target[:items]]
        self.keys = [f"digits/{i}" for i in range(items)]

    def __getitem__(self, index: int) -> Any:
        return self.arrays[index]


class Net(Backbone):
    """Two convolutions, batch norm, dropout."""

    def __init__(self, width: int = 8, batch_norm: bool = True, dropout: float = 0.1) -> None:
        super().__init__()
        self.preprocessing = Preprocessing((8, 8), 1, (0.5,), (0.5,))
        self.features = 2 * width
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1),
            nn.BatchNorm2d(width) if batch_norm else nn.Identity(),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Mover(Generator):
    """Moves the negative by a linear map of the triplet and noise; NaN in call `explode_at`."""

    def __init__(self, features: int, explode_at: int = 0) -> None:
        super().__init__()
        self.map = nn.Linear(3 * features, features)
        self.explode_at, self.calls = explode_at, 0

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        self.calls += 1
        triplet = torch.cat([anchor, positive, negative], 1)
        moved = negative + self.map(triplet) + 0.01 * torch.randn_like(negative)
        return moved * float("nan") if self.calls == self.explode_at else moved

    def objective(
        self, anchor: Tensor, positive: Tensor, negative: Tensor, synthetic: Tensor, distance: Any
    ) -> Tensor:
        return distance(anchor, synthetic).mean() + (synthetic - negative).square().sum(1).mean()


class Midpoint(Generator):
    """Returns the middle of anchor and negative, without parameters."""

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        return (anchor + negative) / 2


class Onto(Generator):
    """Returns the anchor if its code is farther than `far` from the negative's, else the negative.

    With `keep`, `bind` registers the head, which is not allowed.
    """

    def __init__(self, far: float = 0.5, keep: bool = False) -> None:
        super().__init__()
        self.far, self.keep = far, keep
        self.heads: tuple[nn.Module, ...] = ()

    def bind(self, head: nn.Module) -> None:
        self.heads = (*self.heads, head)
        if self.keep:
            self.head = head

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        (head,) = self.heads
        gap = (head(anchor) - head(negative)).norm(dim=1, keepdim=True)
        return torch.where(gap > self.far, anchor, negative)


class Local(Combiner):
    """The mean distance over several unit embeddings, in another order than their concatenation."""

    exact = False

    def __init__(self, embedding_size: int, parts: int = 4) -> None:
        super().__init__()
        self.parts, self.size = parts, embedding_size
        self.weight = nn.Parameter(torch.ones(parts))

    def build_head(self, features: int) -> nn.Module:
        return nn.Linear(features, self.size)

    def _units(self, codes: Tensor) -> Tensor:
        return nn.functional.normalize(codes.unflatten(-1, (self.parts, -1)), dim=-1)

    def _mean(self, gap: Tensor) -> Tensor:
        return ((gap.square().sum(-1) + 1e-9).sqrt() * self.weight.softmax(0)).sum(-1)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return self._mean(self._units(query_emb)[:, None] - self._units(ref_emb)[None])

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return self._mean(self._units(query_emb) - self._units(ref_emb))

    def index_vectors(self, codes: Tensor) -> Tensor:
        return self._units(codes).flatten(1)


class Deadly(nn.Module):
    """The contrastive loss; call `KILL_AT` kills the process, and call `NAN_AT` returns NaN."""

    def __init__(self, distance: nn.Module | None = None) -> None:
        super().__init__()
        self.loss = losses.ContrastiveLoss(**({} if distance is None else {"distance": distance}))
        self.calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Deadly:
        """Return a copy that never kills; trial batches before training use it."""
        loss = type(self).__new__(type(self))
        memo[id(self)] = loss
        loss.__dict__.update(copy.deepcopy(self.__dict__, memo))
        loss.calls = -1_000_000
        return loss

    def forward(self, embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
        self.calls += 1
        if self.calls == int(os.environ.get("KILL_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == int(os.environ.get("NAN_AT", "0")):
            return embeddings.sum() * float("nan")
        return self.loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)


class Deaf(nn.Module):
    """A loss whose gradient is missing, or zero."""

    def __init__(self, zero: bool = False) -> None:
        super().__init__()
        self.zero = zero

    def forward(self, embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
        return (embeddings * 0).sum() if self.zero else embeddings.detach().square().mean()


class Put(nn.Module):
    """A loss whose result depends on the order of two writes to one place."""

    def forward(self, embeddings, labels):
        return torch.zeros(2).put_(torch.tensor([0, 0]), embeddings.sum(1)[:2]).sum()


class Missed:
    """Share of queries whose first hit has another class; smaller is better."""

    depth, larger_is_better = 1, False

    def __call__(self, matches, relevant):
        return 1.0 - matches[:, 0]


def forwards(first: int = 0) -> BatchSampler:
    """Items in order."""
    return BatchSampler(range(first, 60), 8, drop_last=True)


def proxies(embedding_size: int, classes: int) -> losses.ProxyAnchorLoss:
    """A loss with parameters of its own."""
    return losses.ProxyAnchorLoss(classes, embedding_size)


retrieval_datasets = hookimpl(lambda: {"digits": Digits})
retrieval_backbones = hookimpl(lambda: {"net": Net})
retrieval_generators = hookimpl(lambda: {"mover": Mover, "midpoint": Midpoint, "onto": Onto})
retrieval_combiners = hookimpl(lambda: {"local": Local})
LOSSES = {"deadly": Deadly, "deaf": Deaf, "put": Put, "proxies": proxies}
retrieval_losses = hookimpl(lambda: LOSSES)
retrieval_metrics = hookimpl(lambda: {"missed": Missed})
retrieval_samplers = hookimpl(lambda: {"forwards": forwards})


def _note(run: Any, line: dict[str, Any]) -> None:
    with Path(run.path, "hooks.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


@hookimpl
def retrieval_run_start(run: Any) -> None:
    _note(run, {"hook": "start"})


@hookimpl
def retrieval_epoch_end(run: Any, epoch: int, metrics: Mapping[str, float]) -> None:
    _note(run, {"hook": "epoch", "epoch": epoch, "metrics": dict(metrics)})


@hookimpl
def retrieval_run_end(run: Any, metrics: Mapping[str, float]) -> None:
    _note(run, {"hook": "end", "metrics": dict(metrics)})
