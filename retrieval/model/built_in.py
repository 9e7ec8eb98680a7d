"""The built-in metrics as a plugin of the package itself, found without loading any other, and by
their short names.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import TYPE_CHECKING, cast

from retrieval.errors import RetrievalError, did_you_mean
from retrieval.host.hookspecs import Factories, hookimpl

if TYPE_CHECKING:
    from retrieval.host.factory import Factory
    from retrieval.model.contracts import Metric


@hookimpl
def retrieval_metrics() -> Factories:
    """The figures of retrieval, also under their short names."""
    from retrieval.model import metrics

    return {
        "map": metrics.MeanAveragePrecision,
        "map_at_r": metrics.MAPAtR,
        "ndcg_at": metrics.NDCGAt,
        "precision_at": metrics.PrecisionAt,
        "r_precision": metrics.RPrecision,
        "recall_at": metrics.RecallAt,
    }


def metric(name: str) -> Metric:
    """Return the built-in metric of a name: "recall_at_K", "precision_at_K" and "ndcg_at_K" for any
    K, "r_precision", "map_at_r", "map".

    Raises:
        RetrievalError: no metric has that name; the sentence suggests the closest.
    """
    with_k = {short: factory for short, factory in _own().items() if factory.parameters}
    plain = {short: factory for short, factory in _own().items() if short not in with_k}
    if name in plain:
        return cast("Metric", plain[name].build({}))
    found = re.fullmatch(r"(.+)_(\d{1,9})", name)
    if found and found[1] in with_k:
        return cast("Metric", with_k[found[1]].build({"k": int(found[2])}))
    known = [
        *plain,
        *(
            f"{stem}_{k}"
            for stem in with_k
            for k in sorted({1, 2, 4, 8, 10, int(found[2]) if found else 1})
        ),
    ]
    raise RetrievalError(
        f"There is no metric '{name}'.{did_you_mean(name.lower().replace('@', '_at_'), known)}"
        " Built in are recall_at_K, precision_at_K, ndcg_at_K (K a number), r_precision, map_at_r"
        " and map."
    )


@cache
def _own() -> dict[str, Factory]:
    """Return the built-in metrics by short name."""
    from retrieval.host.built_in import own_factories

    return own_factories("metrics", sys.modules[__name__])
