"""Losses and miners as public projects write them: no types, no docstrings, `**kwargs`, zeros of
their own for an empty batch.
"""

# ruff: noqa: UP004, UP008, UP032  (the styles are the point)

import numpy as np
import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import BaseMetricLossFunction, GenericPairLoss
from pytorch_metric_learning.losses.mixins import WeightRegularizerMixin
from pytorch_metric_learning.miners import BaseMiner
from pytorch_metric_learning.reducers import AvgNonZeroReducer
from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
from retrieval.plugin import hookimpl
from torch import nn


# pytorch-metric-learning's documented style: a base class, kwargs, a dictionary for the reducer
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


# a base class that needs a parameter which the subclass gives
class Pairs(GenericPairLoss):
    def __init__(self, pos=0.2, neg=0.8, **kwargs):
        super().__init__(mat_based_loss=False, **kwargs)
        self.pos, self.neg = pos, neg

    def _compute_loss(self, pos_pair, neg_pair, indices_tuple):
        parts = {}
        for name, pair, at in (("pos_loss", pos_pair, (0, 1)), ("neg_loss", neg_pair, (2, 3))):
            value = (
                F.relu(pair - self.pos if name == "pos_loss" else self.neg - pair)
                if len(pair)
                else 0
            )
            where = tuple(indices_tuple[i] for i in at)
            parts[name] = {"losses": value, "indices": where, "reduction_type": name[:3] + "_pair"}
        return parts

    def _sub_loss_names(self):
        return ["pos_loss", "neg_loss"]


# a child of a child: three classes spell its parameters out
class Hinted(Documented):
    def __init__(self, *args, swap=False, **kwargs):
        super(Hinted, self).__init__(*args, **kwargs)
        self.swap = swap


# class weights with a regulariser by the library's mixin
class Classifier(WeightRegularizerMixin, BaseMetricLossFunction):
    def __init__(self, classes, embedding_size, scale=16, **kwargs):
        super().__init__(**kwargs)
        self.W = nn.Parameter(torch.empty(embedding_size, classes))
        nn.init.xavier_uniform_(self.W)
        self.scale = scale

    def compute_loss(self, embeddings, labels, indices_tuple, ref_emb, ref_labels):
        logits = F.normalize(embeddings) @ F.normalize(self.W, dim=0) * self.scale
        losses = F.cross_entropy(logits, labels, reduction="none")
        found = {
            "loss": {
                "losses": losses,
                "indices": torch.arange(len(labels)),
                "reduction_type": "element",
            }
        }
        self.add_weight_regularization_to_loss_dict(found, self.W.t())
        return found


# proxies, with names of its own for what the host knows
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


# contrastive with a temperature, a word that picks the distance, and a tensor of one number
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


# no module at all: an object that is called, and a function that makes it
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


# a miner of the library's documented style, and two without its base class
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
        "pairs": Pairs,
        "hinted": Hinted,
        "classifier": Classifier,
        "proxies": Proxies,
        "contrastive": SupervisedContrastive,
        "center": Center,
        "angular": angular,
    }


@hookimpl
def retrieval_miners():
    return {"documented": DocumentedMiner}
