"""The distances that `retrieval.evaluate` takes: names, functions, and other libraries' objects."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from retrieval.errors import DataError, did_you_mean
from retrieval.evaluation.neighbors import Codes, DistanceBlock, Neighbors, as_tensor
from retrieval.host.factory import calling
from retrieval.model.contracts import Combiner, in_words, refuse_class

Distance: TypeAlias = "Literal['euclidean', 'cosine'] | DistanceBlock | Any"
"""A name, a function, or an object that measures distances; see `retrieval.evaluate`."""

NAMES = ("euclidean", "cosine")

_PROBED = 32
"""Number of gallery items by which a similarity is told from a distance."""
_SHARE = 0.9
"""Of all excesses of a similarity, added up, more than this share is positive."""


def measuring(
    codes: Codes, gallery: Codes | None, distance: Distance | None
) -> tuple[Codes, Codes | None, DistanceBlock | None]:
    """Return the codes, the gallery and the function for an exact search by a distance.

    The function is `None` for the Euclidean distance. "cosine" is the Euclidean distance of codes
    scaled to unit length, which gives the same order.

    Raises:
        DataError: there is no distance of that name, it is a similarity, or a code has no cosine.
        PluginError: the distance is a class, or it fails.
    """
    if distance is None:
        return codes, gallery, None
    if isinstance(distance, str):
        if distance == "euclidean":
            return codes, gallery, None
        if distance == "cosine":
            if gallery is None:
                scaled = None
            else:
                scaled = _unit(gallery, "gallery codes")
            return _unit(codes, "codes"), scaled, None
        raise DataError(
            f"There is no distance '{distance}'.{did_you_mean(distance, NAMES)} The names are"
            " 'euclidean' and 'cosine'. Pass any other distance as a function, such as"
            " sklearn.metrics.pairwise.manhattan_distances."
        )
    owner = getattr(distance, "__self__", distance)
    if isinstance(owner, Combiner):
        return codes, gallery, distance
    measure = _function(distance, owner)
    _refuse_similarity(measure, as_tensor(codes if gallery is None else gallery, "gallery"))
    return codes, gallery, measure


def _function(distance: Any, owner: Any) -> DistanceBlock:
    """Return a distance as a function of two tensors; a similarity's values change their sign."""
    what = f"The distance {getattr(distance, '__name__', type(distance).__name__)}"
    refuse_class(distance, what)
    # an object of scikit-learn's `DistanceMetric` has this method
    call: Any = distance if callable(distance) else getattr(distance, "pairwise", None)
    if call is None:
        raise DataError(
            f"The distance is {in_words(distance)}: it must be 'euclidean', 'cosine' or a function"
            " from codes (B, C) and (R, C) to distances (B, R)."
        )
    # pytorch-metric-learning's similarities say by this attribute that larger is closer
    if getattr(owner, "is_inverted", False):
        sign = -1
    else:
        sign = 1

    def measure(queries: Tensor, items: Tensor) -> Tensor:
        with calling(what, "Evaluate fewer items at once."):
            return sign * torch.as_tensor(call(queries, items))

    return measure


def _refuse_similarity(measure: DistanceBlock, gallery: Tensor) -> None:
    """Raise a `DataError` if items are farther from themselves than from one another.

    A distance has d(x, x) + d(y, y) <= d(x, y) + d(y, x), and a similarity the opposite. This holds
    for each pair of a metric or of a kernel; a learned function may have exceptions.
    """
    items = gallery[:: max(1, len(gallery) // _PROBED)][:_PROBED]
    table = Neighbors(items, distance=measure).measured(items, measure)
    own = table.diagonal()
    excess = own[:, None] + own - table - table.T
    if excess.clamp(min=0).sum() > _SHARE * excess.abs().sum():
        raise DataError(
            "The distance is a similarity: it is larger for an item and itself than for two items,"
            " so the search would rank backwards. Pass a distance, such as 'cosine' or"
            " lambda a, b: -similarity(a, b)."
        )


def _unit(codes: Codes, what: str) -> Tensor:
    """Return codes scaled to unit length, at least in single precision."""
    rows = as_tensor(codes, what)
    lengths = rows.double().norm(dim=1, keepdim=True)
    if zeros := int((lengths == 0).sum()):
        raise DataError(
            f"{zeros:,} of {len(rows):,} {what} are all zeros, so they have no cosine. Leave those"
            " items out, or use the Euclidean distance."
        )
    unit: Tensor = rows / lengths
    return unit.to(torch.promote_types(rows.dtype, torch.float32))
