"""Losses and miners as public projects write them: no types, no docstrings, `**kwargs`."""

# ruff: noqa: UP004, UP032  (the styles are the point)

import numpy as np
import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import BaseMetricLossFunction
from pytorch_metric_learning.miners import BaseMiner
from pytorch_metric_learning.reducers import AvgNonZeroReducer
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from retrieval.plugin import hookimpl
from torch import nn


# The style that pytorch-metric-learning documents: a base class, **kwargs, a dictionary for the
# reducer.
class Documented(BaseMetricLossFunction):
    def __init__(self, margin=0.1, **kwargs):
        super().__init__(**kwargs)
        self.margin = margin
        self.add_to_recordable_attributes(list_of_names=["margin"], is_stat=False)

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        a, p, n = lmu.convert_to_triplets(indices_tuple, labels, ref_labels, t_per_anchor="all")
        if len(a) == 0:
            return self.zero_losses()
        mat = self.distance(embeddings, ref_emb)
        losses = F.relu(mat[a, p] - mat[a, n] + self.margin)
        return {"loss": {"losses": losses, "indices": (a, p, n), "reduction_type": "triplet"}}

    def get_default_reducer(self):
        return AvgNonZeroReducer()


# Proxies, with other names for the numbers of classes and dimensions.
class Proxies(torch.nn.Module):
    def __init__(self, nb_classes, sz_embed, mrg=0.1, alpha=32):
        torch.nn.Module.__init__(self)
        self.proxies = nn.Parameter(torch.randn(nb_classes, sz_embed))
        nn.init.kaiming_normal_(self.proxies, mode="fan_out")
        self.nb_classes, self.mrg, self.alpha = nb_classes, mrg, alpha

    def forward(self, X, T):
        cos = F.linear(F.normalize(X), F.normalize(self.proxies))
        one_hot = F.one_hot(T, self.nb_classes)
        pos = torch.where(
            one_hot == 1, torch.exp(-self.alpha * (cos - self.mrg)), torch.zeros_like(cos)
        ).sum(0)
        neg = torch.where(
            one_hot == 0, torch.exp(self.alpha * (cos + self.mrg)), torch.zeros_like(cos)
        ).sum(0)
        return (
            torch.log(1 + pos).sum() / len(T.unique()) + torch.log(1 + neg).sum() / self.nb_classes
        )


# Contrastive with a temperature, a distance chosen by a word, and a result of shape (1,).
class SupervisedContrastive(nn.Module):
    def __init__(
        self, temperature=0.07, contrast_mode="all", distance="cosine", base_temperature=None
    ):
        super().__init__()
        if contrast_mode not in ("all", "one"):
            raise ValueError("Unknown mode: {}".format(contrast_mode))
        self.t, self.distance, self.base = temperature, distance, base_temperature or temperature

    def forward(self, features, labels=None):
        labels = labels.contiguous().view(-1, 1)
        mask = torch.eq(labels, labels.T).float().to(features.device)
        logits = torch.div(torch.matmul(features, features.T), self.t)
        logits = logits - torch.max(logits, dim=1, keepdim=True)[0].detach()
        itself = torch.scatter(torch.ones_like(mask), 1, torch.arange(len(mask)).view(-1, 1), 0)
        mask = mask * itself
        log_prob = logits - torch.log((torch.exp(logits) * itself).sum(1, keepdim=True))
        return (
            (-(self.t / self.base) * (mask * log_prob).sum(1) / mask.sum(1).clamp(min=1))
            .mean()
            .view(1)
        )


# Not a torch module, but an object that is called.
class Center(object):
    def __init__(self, weights=[1.0, 0.5]):  # noqa: B006
        self.weights = weights

    def __call__(self, embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None):
        total = 0
        for label in labels.unique():
            rows = embeddings[labels == label]
            total = total + self.weights[0] * ((rows - rows.mean(0)) ** 2).sum(1).mean()
        return total * self.weights[1]


def angular(alpha=45, **kwargs):
    return lambda embeddings, labels: Documented(margin=np.tan(np.deg2rad(alpha)) ** 2)(
        embeddings, labels
    )


# The documented style of a miner.
class DocumentedMiner(BaseMiner):
    def __init__(self, margin=0.2, **kwargs):
        super().__init__(**kwargs)
        self.margin = margin

    def mine(self, embeddings, labels, ref_emb, ref_labels):
        mat = self.distance(embeddings, ref_emb)
        a, p, n = lmu.get_all_triplets_indices(labels, ref_labels)
        keep = mat[a, n] - mat[a, p] <= self.margin
        return a[keep], p[keep], n[keep]


@hookimpl
def retrieval_losses():
    return {
        "documented": Documented,
        "proxies": Proxies,
        "contrastive": SupervisedContrastive,
        "center": Center,
        "angular": angular,
    }


@hookimpl
def retrieval_miners():
    return {"documented": DocumentedMiner}
