"""Regularisers: penalties on embeddings or on class weights (proxies), one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pytorch_metric_learning import regularizers

from retrieval_pml.common import Distance, Positive, Reducer, Several, require_similarity
from retrieval_pml.forward import forwards


@forwards(regularizers.CenterInvariantRegularizer)
def center_invariant(reducer: Reducer = None) -> regularizers.CenterInvariantRegularizer:
    """Draws the lengths of class weights together: (‖w‖² − mean ‖w‖²)² / 4.

    Wu, Liu, Li, Wu & Xia, Deep Face Recognition with Center Invariant Loss, ACM MM Workshops 2017.

    Args:
        reducer: how the rows' penalties become one number; the mean by default.
    """


@forwards(regularizers.LpRegularizer)
def lp(
    p: Positive = 2.0, power: Positive = 1.0, reducer: Reducer = None
) -> regularizers.LpRegularizer:
    """The length of each row, by the p-norm, to a power.

    Args:
        p: the norm.
        power: lengths are raised to it; 2 with p = 2 is the usual weight decay.
        reducer: how the rows' penalties become one number; the mean by default.
    """


@forwards(regularizers.RegularFaceRegularizer)
def regular_face(
    distance: Distance = None, reducer: Reducer = None
) -> regularizers.RegularFaceRegularizer:
    """Drives class weights apart: each row's similarity to its nearest other row.

    Zhao, Xu & Cheng, RegularFace: Deep Face Recognition via Exclusive Regularization, CVPR 2019.

    Args:
        distance: how two rows are compared, a similarity; cosine by default.
        reducer: how the rows' penalties become one number; the mean by default.
    """
    require_similarity(distance, "pml.regular_face")


@forwards(regularizers.SparseCentersRegularizer)
def sparse_centers(
    classes: int, centers_per_class: Several, reducer: Reducer = None
) -> regularizers.SparseCentersRegularizer:
    """Merges the centres of a class that has several: √(2 − 2 cos) between each two of them.

    Qian, Shang, Sun, Hu, Li & Jin, SoftTriple Loss, ICCV 2019; the weight regulariser of
    `pml.soft_triple`.

    Args:
        centers_per_class: as in the loss, at least 2.
        reducer: how the pairs' penalties become one number; by default their sum over twice the
            number of pairs.
    """


@forwards(regularizers.ZeroMeanRegularizer)
def zero_mean(reducer: Reducer = None) -> regularizers.ZeroMeanRegularizer:
    """The absolute sum of each row's dimensions; belongs to
    `pml.signal_to_noise_ratio_contrastive`.

    Yuan, Deng, Tang, Tang & Chen, Signal-to-Noise Ratio: A Robust Distance Metric for Deep Metric
    Learning, CVPR 2019.

    Args:
        reducer: how the rows' penalties become one number; the mean by default.
    """


FACTORIES: Mapping[str, Callable[..., Any]] = {
    make.__name__: make for make in (center_invariant, lp, regular_face, sparse_centers, zero_mean)
}
