"""A plugin whose parts break their contracts; the parameter `how` names the fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from retrieval.plugin import Backbone, Combiner, Dataset, Generator, hookimpl
from torch import nn


class Items(Dataset):
    kind = "features"

    def __init__(self):
        self.arrays = np.random.default_rng(0).normal(size=(48, 5)).astype(np.float32)
        self.labels = [str(i % 3) for i in range(48)]
        self.keys = [str(i) for i in range(48)]

    def __getitem__(self, index):
        return self.arrays[index]


class Same(Backbone):
    def __init__(self, features, how="right"):
        super().__init__()
        self.how, self.features = how, 7 if how == "width" else features
        if how == "preprocessing":
            self.preprocessing = (8, 8)

    def forward(self, x):
        return x / len(x[0][0]) if self.how == "raises" else x


class Broken(nn.Module):
    def __init__(self, how="right"):
        super().__init__()
        self.how = how


class Loss(Broken):
    def forward(self, embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
        costs = embeddings.square().sum(1)
        return {
            "right": lambda: costs.mean(),
            "vector": lambda: costs,
            "float": lambda: costs.mean().item(),
            "dictionary": lambda: {"loss": {"losses": costs}},
            "none": lambda: None,
            "nan": lambda: costs.mean() * float("nan"),
            "detached": lambda: costs.mean().detach(),
            "raises": lambda: {}["no such key"],
            "memory": lambda: torch.empty(10**15),
            "in_place": lambda: (
                costs.exp_().sum() + embeddings.exp().mul_(2).add_(1).log().exp_().sqrt_().sum()
            ),
        }[self.how]()


class NoForward(nn.Module):
    pass


class WrongCall(nn.Module):
    def forward(self, embeddings):
        return embeddings.mean()


class Miner(Broken):
    def forward(self, embeddings, labels, ref_emb=None, ref_labels=None):
        a, p, n = torch.arange(4), torch.arange(4), torch.arange(4)
        return {
            "right": (a, p, n),
            "lists": (a.tolist(), p.tolist(), n.tolist()),
            "two": (a, p),
            "high": (a, p, n + len(labels)),
            "floats": (a.float(), p.float(), n.float()),
            "lengths": (a, p[:3], n),
            "device": tuple(x.to("meta") for x in (a, p, n)),
        }[self.how]


class Synthetic(Generator):
    def __init__(self, features, how="right"):
        super().__init__()
        self.how, self.scale = how, nn.Parameter(torch.ones(features))
        if how == "replaces":
            self.replaces = "anchor"

    def bind(self, head):
        if self.how == "bind":
            raise KeyError("head")

    def forward(self, anchor, positive, negative):
        made = negative * self.scale
        return made[:, :2] if self.how == "narrow" else made

    def objective(self, anchor, positive, negative, synthetic, distance):
        costs = distance(anchor, synthetic)
        return costs if self.how == "objective" else costs.mean()


class Parts(Broken, Combiner):
    def build_head(self, features):
        return None if self.how == "no_head" else nn.Linear(features, 3)

    def compute_mat(self, query_emb, ref_emb):
        mat = torch.cdist(query_emb, ref_emb)
        return mat.flatten() if self.how == "flat" else mat

    def pairwise_distance(self, query_emb, ref_emb):
        if self.how == "rows":
            return torch.cdist(query_emb, ref_emb)
        return (query_emb - ref_emb).norm(dim=1)

    def objective(self, codes, labels, indices):
        if self.how == "objective":
            return codes.mean()
        return None, {"width": codes if self.how == "metrics" else codes.mean()}


class NoBuildHead(Combiner):
    pass


class Measured(nn.Module):
    def __init__(self, distance=None):
        super().__init__()
        self.distance = distance

    def forward(self, embeddings, labels):
        return self.distance(embeddings, embeddings).mean()


class Learner:
    def __init__(self, how="right"):
        self.how = how

    def fit(self, X, y):
        if self.how == "fit":
            raise AttributeError("nothing to fit")
        if self.how == "refuses":
            raise ValueError("These features do not serve.")
        self.width_ = X.shape[1]
        return self

    def transform(self, X):
        return X

    def to_model_parts(self):
        head = nn.Linear(self.width_, 3)
        return {"alone": head, "combiner": (head, 3)}.get(self.how, (head, None))


class NoParts:
    def fit(self, X, y):
        return self


def metric(how):
    class Metric:
        depth: Any = 3

        def __call__(self, matches, relevant):
            return 1.0 if how == "number" else matches[:, 0]

    return Metric


LOSSES = {"loss": Loss, "no_forward": NoForward, "wrong_call": WrongCall, "measured": Measured}
retrieval_datasets = hookimpl(lambda: {"items": Items})
retrieval_backbones = hookimpl(lambda: {"same": Same})
retrieval_losses = hookimpl(lambda: {**LOSSES, "object": lambda: 3})
retrieval_miners = hookimpl(lambda: {"miner": Miner})
retrieval_generators = hookimpl(lambda: {"generator": Synthetic})
retrieval_combiners = hookimpl(lambda: {"combiner": Parts, "no_build_head": NoBuildHead})
retrieval_learners = hookimpl(lambda: {"learner": Learner, "no_parts": NoParts})
retrieval_metrics = hookimpl(lambda: {how: metric(how) for how in ("right", "number")})
