"""Metric learning from a stream of triplets: `OAHU`, `Warm`, linear baselines, and a deep loss.

Gao et al., "Towards Self-Adaptive Metric Learning On the Fly", WWW 2019. The learners do not need
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.helpers import lazy_names
from retrieval.plugin import Factories, hookimpl

# `lazy_names` reads this list.
if TYPE_CHECKING:
    from retrieval_oahu.abtl import ABTL as ABTL
    from retrieval_oahu.combiners import HedgeScore as HedgeScore, HedgeSum as HedgeSum
    from retrieval_oahu.learner import OAHU as OAHU
    from retrieval_oahu.linear import LEGO as LEGO, OASIS as OASIS, OPML as OPML, RDML as RDML
    from retrieval_oahu.spaces import Spaces as Spaces
    from retrieval_oahu.streams import (
        ClickLog as ClickLog,
        Closure as Closure,
        from_labels as from_labels,
        in_chunks as in_chunks,
        with_closure as with_closure,
    )
    from retrieval_oahu.warm import Warm as Warm


@hookimpl
def retrieval_learners() -> Factories:
    """Learners from a stream of triplets: OAHU, Warm, and four linear methods."""
    return {
        "lego": "retrieval_oahu.linear:LEGO",
        "oahu": "retrieval_oahu.learner:OAHU",
        "oasis": "retrieval_oahu.linear:OASIS",
        "opml": "retrieval_oahu.linear:OPML",
        "rdml": "retrieval_oahu.linear:RDML",
        "warm": "retrieval_oahu.warm:Warm",
    }


@hookimpl
def retrieval_combiners() -> Factories:
    """OAHU's hedge: a weighted combination of metric spaces, searched in one or several indexes."""
    home = "retrieval_oahu.combiners"
    return {"hedge": f"{home}:HedgeScore", "hedge_sum": f"{home}:HedgeSum"}


@hookimpl
def retrieval_losses() -> Factories:
    """The adaptive-bound triplet loss."""
    return {"abtl": "retrieval_oahu.abtl:ABTL"}


# The package also exports the factories themselves, and imports each on first use.
__getattr__, __dir__, __all__ = lazy_names(__name__)
