"""Distances (smaller is closer) and similarities (larger is closer) between embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pytorch_metric_learning import distances

from retrieval_pml.common import Positive
from retrieval_pml.forward import forwards
from retrieval_pml.margins import SNRDistance


@forwards(distances.CosineSimilarity)
def cosine_similarity(p: Positive = 2, power: Positive = 1) -> distances.CosineSimilarity:
    """Cosine similarity, from −1 to 1; larger is closer.

    Args:
        p: the norm that scales embeddings to length 1; another than 2 gives no cosine.
        power: the similarity is raised to it; an even one forgets the sign.
    """


@forwards(distances.DotProductSimilarity)
def dot_product_similarity(
    normalize_embeddings: bool = True, p: Positive = 2, power: Positive = 1
) -> distances.DotProductSimilarity:
    """Dot product; larger is closer.

    Args:
        normalize_embeddings: whether embeddings are scaled to length 1 first.
        p: the norm that measures this length.
        power: the similarity is raised to it; an even one forgets the sign.
    """


@forwards(distances.LpDistance)
def lp(
    normalize_embeddings: bool = True, p: Positive = 2, power: Positive = 1
) -> distances.LpDistance:
    """The p-norm of the difference, Euclidean by default; on unit vectors from 0 to 2.

    Args:
        normalize_embeddings: whether embeddings are scaled to length 1 first.
        p: the norm.
        power: the distance is raised to it; 2 with p = 2 is the squared Euclidean distance.
    """


@forwards(SNRDistance)
def snr(
    normalize_embeddings: bool = True, p: Positive = 2, power: Positive = 1
) -> distances.SNRDistance:
    """The variance of the difference over that of the first embedding (noise over signal); not
    symmetric.

    Yuan, Deng, Tang, Tang & Chen, Signal-to-Noise Ratio: A Robust Distance Metric for Deep Metric
    Learning, CVPR 2019.

    Args:
        normalize_embeddings: whether embeddings are scaled to length 1 first.
        p: the norm that measures this length.
        power: the distance is raised to it.
    """


FACTORIES: Mapping[str, Callable[..., Any]] = {
    make.__name__: make for make in (cosine_similarity, dot_product_similarity, lp, snr)
}
