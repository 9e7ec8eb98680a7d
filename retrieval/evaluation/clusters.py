"""NMI and pairwise F1 of k-means clusters, as metric-learning papers report them.

Song et al., "Deep metric learning via lifted structured feature embedding" (2016), section 6; the
same in Sohn (2016) and in Duan et al., "Deep adversarial metric learning" (equations 17 and 18).
Clusters Ω come from k-means on the codes, with as many clusters as there are classes C.

- NMI = 2 I(Ω; C) / (H(Ω) + H(C)): the mutual information over the *arithmetic* mean of the
  entropies. Other fields divide by the geometric mean, or by the larger entropy; those numbers do
  not compare.
- F1 = 2 P R / (P + R) over pairs of items: P is the share of the pairs in one cluster that are of
  one class, R the share of the pairs of one class that are in one cluster. Pairs are counted from
  the contingency table, never one by one.

k-means is FAISS's: Lloyd's algorithm in float32 on all codes, one k-means++ start, 100 rounds, a
fixed seed, one thread. It is always Euclidean on the codes, whatever distance retrieval uses. Both
metrics depend on the start: compare models with one seed, or over several.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from retrieval.errors import DataError
from retrieval.model.labels import read_labels
from retrieval.serving.runtime import load_faiss

ROUNDS = 100


def cluster_figures(
    codes: NDArray[Any] | Tensor, labels: NDArray[Any], *, seed: int = 0
) -> dict[str, float]:
    """Return {"nmi": …, "f1": …} of k-means clusters of codes (N, C) against labels (N,); see the
    module.

    Raises:
        DataError: there are no codes, not one label a code, or a label is missing.
    """
    if len(codes) != len(labels) or not len(codes):
        raise DataError(
            f"There are {len(codes):,} codes and {len(labels):,} labels to cluster: one label a"
            " code, at least one, is needed."
        )
    classes = np.unique(read_labels(labels), return_inverse=True)[1]
    found = kmeans(codes, int(classes.max()) + 1, seed=seed)
    return {"nmi": nmi(found, classes), "f1": pair_f1(found, classes)}


def kmeans(codes: NDArray[Any] | Tensor, count: int, *, seed: int = 0) -> NDArray[np.int64]:
    """Return the cluster number (N,) of each code (N, C) among `count` k-means clusters."""
    faiss = load_faiss()
    given = codes.detach().cpu().numpy() if isinstance(codes, Tensor) else np.asarray(codes)
    table = given - given.mean(0, dtype=np.float64)  # an offset would cost digits
    # A power of two changes no digit and keeps squares within float32.
    table *= 2.0 ** -np.frexp(np.abs(table).max(initial=0))[1]
    table = np.ascontiguousarray(table, np.float32)
    count = min(count, len(table))
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # sums by threads would depend on how many there are
    try:
        clusters = faiss.Kmeans(
            table.shape[1],
            count,
            niter=ROUNDS,
            seed=seed,
            init_method=faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS,
            min_points_per_centroid=1,
            max_points_per_centroid=len(table),
        )
        clusters.train(table)
        return np.asarray(clusters.assign(table)[1], np.int64)
    finally:
        faiss.omp_set_num_threads(threads)


def nmi(clusters: NDArray[Any], classes: NDArray[Any]) -> float:
    """Return 2 I(Ω; C) / (H(Ω) + H(C)); 1 where both have but one part."""
    from sklearn.metrics import normalized_mutual_info_score

    return float(normalized_mutual_info_score(classes, clusters, average_method="arithmetic"))


def pair_f1(clusters: NDArray[Any], classes: NDArray[Any]) -> float:
    """Return the F1 of pairs; 1 where neither partition puts any two items together."""
    from sklearn.metrics import pair_confusion_matrix

    (_, only_clusters), (only_classes, both) = pair_confusion_matrix(classes, clusters).tolist()
    # 2 P R / (P + R) with P = both / (both + only_clusters) and R = both / (both + only_classes)
    pairs = 2 * both + only_clusters + only_classes
    return 2 * both / pairs if pairs else 1.0
