"""Online adaptive metric learning: `OAHU`, `Warm`, the linear baselines, streams of triplets, and
ABTL as a deep loss.

Gao et al., "Towards Self-Adaptive Metric Learning On the Fly", WWW 2019. The learners need no torch
to learn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval import hookimpl
from retrieval.host.hookspecs import Factories
from retrieval.host.lazy import lazy

if TYPE_CHECKING:
    from retrieval_oahu.clicks import ClickLog as ClickLog
    from retrieval_oahu.closure import Closure as Closure
    from retrieval_oahu.combiners import HedgeScore as HedgeScore
    from retrieval_oahu.combiners import HedgeSum as HedgeSum
    from retrieval_oahu.learner import OAHU as OAHU
    from retrieval_oahu.lego import LEGO as LEGO
    from retrieval_oahu.loss import ABTL as ABTL
    from retrieval_oahu.oasis import OASIS as OASIS
    from retrieval_oahu.opml import OPML as OPML
    from retrieval_oahu.rdml import RDML as RDML
    from retrieval_oahu.streams import from_labels as from_labels
    from retrieval_oahu.streams import in_chunks as in_chunks
    from retrieval_oahu.streams import with_closure as with_closure
    from retrieval_oahu.uses import Spaces as Spaces
    from retrieval_oahu.warm import Warm as Warm

__getattr__, __dir__ = lazy(
    __name__,
    {
        "retrieval_oahu.loss": ["ABTL"],
        "retrieval_oahu.clicks": ["ClickLog"],
        "retrieval_oahu.closure": ["Closure"],
        "retrieval_oahu.combiners": ["HedgeScore", "HedgeSum"],
        "retrieval_oahu.lego": ["LEGO"],
        "retrieval_oahu.learner": ["OAHU"],
        "retrieval_oahu.oasis": ["OASIS"],
        "retrieval_oahu.opml": ["OPML"],
        "retrieval_oahu.rdml": ["RDML"],
        "retrieval_oahu.uses": ["Spaces"],
        "retrieval_oahu.warm": ["Warm"],
        "retrieval_oahu.streams": ["from_labels", "in_chunks", "with_closure"],
    },
)


@hookimpl
def retrieval_learners() -> Factories:
    """Metrics learned from a stream of triplets: OAHU, the warm start, and four linear methods."""
    from retrieval_oahu.learner import OAHU
    from retrieval_oahu.lego import LEGO
    from retrieval_oahu.oasis import OASIS
    from retrieval_oahu.opml import OPML
    from retrieval_oahu.rdml import RDML
    from retrieval_oahu.warm import Warm

    return {"lego": LEGO, "oahu": OAHU, "oasis": OASIS, "opml": OPML, "rdml": RDML, "warm": Warm}


@hookimpl
def retrieval_combiners() -> Factories:
    """The hedge over metric spaces: searched as the paper does, or in one index."""
    from retrieval_oahu.combiners import HedgeScore, HedgeSum

    return {"hedge": HedgeScore, "hedge_sum": HedgeSum}


@hookimpl
def retrieval_losses() -> Factories:
    """The adaptive-bound triplet loss."""
    from retrieval_oahu.loss import ABTL

    return {"abtl": ABTL}
