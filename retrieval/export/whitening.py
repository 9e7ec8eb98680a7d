"""PCA whitening as a head: decorrelated features of equal variance, learnt from photos without
labels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from retrieval.data.encode import evaluating
from retrieval.errors import DataError
from retrieval.host.plugin_calls import calling
from retrieval.model.guard import check_width
from retrieval.model.model import Model, Normalize, linear_head

DIMENSIONS = 128
"""Width of whitened vectors where nobody names one."""

_FEATURE_BYTES = 1 << 29
"""Of the features that whitening is fitted on, as float32."""
_RANK = 1e-9
"""A direction with less than this share of the largest variance is noise of float32."""
_SMALL = 1e-6
"""What is added to each variance, as a share of the largest: no direction is scaled up by more than
a thousand times the first's.
"""
_EXACT_WIDTH = 4096
"""Wider features go to scikit-learn's randomised solver: their covariance matrix would not fit."""


def affordable(features: int, most: int) -> int:
    """Return how many photos whitening is fitted on at most: `most`, or as many as half a gigabyte
    of features (F each) has room for.
    """
    return max(1, min(most, _FEATURE_BYTES // (4 * features)))


def features_of(model: Model, batches: Iterable[NDArray[np.uint8]]) -> NDArray[np.float32]:
    """Return the backbone's features (N, F) of raw pixels in batches.

    Raises:
        PluginError: the backbone fails, or gives features of another width than it says.
        DataError: features are NaN or infinite.
    """
    what = f"The backbone {type(model.backbone).__name__}"
    parts: list[Tensor] = []
    with evaluating(model):
        for batch in batches:
            with calling(what):
                parts.append(model.features(torch.from_numpy(batch)).float())
    features: NDArray[np.float32] = torch.cat(parts).numpy()
    check_width(features, what, model.backbone.features)
    if not np.isfinite(features).all():
        raise DataError(f"{what} gives NaN or infinite features of these photos.")
    return features


def whitening_head(
    features: NDArray[np.floating[Any]], dimensions: int | None = None
) -> nn.Sequential:
    """Return the module x ↦ u / ‖u‖, u = D^(−1/2) Vᵀ (x − mean): features (B, F) to unit vectors
    (B, C).

    V holds the C directions of largest variance, D their variances plus a millionth of the largest.
    Jégou & Chum, "Negative Evidences and Co-occurrences in Image Retrieval: the Benefit of PCA and
    Whitening" (ECCV 2012).

    Args:
        features: (N, F) that it is fitted on.
        dimensions: C; by default 128, or F where that is less.

    Raises:
        DataError: there are too few rows for so many dimensions, or they do not vary in so many.
    """
    from sklearn.decomposition import PCA

    photos, width = features.shape
    wanted = min(DIMENSIONS, width) if dimensions is None else dimensions
    if not 1 <= wanted <= width:
        raise DataError(
            f"{wanted:,} dimensions cannot be had: the backbone has {width:,} features. Ask for 1"
            f" to {width:,} (--dimensions)."
        )
    if photos <= wanted:
        raise DataError(
            f"{photos:,} photos are too few to whiten {wanted:,} dimensions: more photos than"
            " dimensions are needed. Name more photos, or ask for fewer dimensions (--dimensions"
            f" {max(1, photos // 4)})."
        )
    # what rounding alone makes of equal features of this size
    noise = float(np.finfo(np.float32).eps * np.abs(features).max())
    if float(np.ptp(features, axis=0).max()) <= noise:
        raise DataError(
            f"The backbone gives the same features for all {photos:,} photos: there is nothing to"
            " whiten. Name photos that differ."
        )
    exact = width <= _EXACT_WIDTH
    pca = PCA(wanted, svd_solver="covariance_eigh" if exact else "randomized", random_state=0)
    pca.fit(features.astype(np.float64) if exact else features)
    variance = pca.explained_variance_.astype(np.float64)
    largest = float(variance[0])
    varied = int((variance > max(_RANK * largest, noise**2)).sum())
    if varied < wanted:
        raise DataError(
            f"The features of the {photos:,} photos vary in {varied:,} directions only: name more"
            f" photos that differ, or ask for {varied:,} dimensions or fewer (--dimensions)."
        )
    components = pca.components_ / np.sqrt(variance + _SMALL * largest)[:, None]
    return nn.Sequential(*linear_head(components, pca.mean_), Normalize())
