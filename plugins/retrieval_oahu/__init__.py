"""Online adaptive metric learning: `OAHU`, `Warm`, the linear baselines, streams of triplets, and ABTL as a deep loss.

Gao et al., "Towards Self-Adaptive Metric Learning On the Fly", WWW 2019. The learners need no torch to learn.
"""

from __future__ import annotations

import importlib
from typing import Any

from retrieval import hookimpl
from retrieval.hookspecs import Factories

_HOME = {
    "ABTL": "loss",
    "ClickLog": "clicks",
    "Closure": "closure",
    "HedgeScore": "combiners",
    "HedgeSum": "combiners",
    "LEGO": "lego",
    "OAHU": "learner",
    "OASIS": "oasis",
    "OPML": "opml",
    "RDML": "rdml",
    "Spaces": "uses",
    "Warm": "warm",
    "from_labels": "streams",
    "in_chunks": "streams",
    "with_closure": "streams",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"retrieval_oahu.{_HOME[name]}"), name)
    raise AttributeError(f"module 'retrieval_oahu' has no attribute '{name}'")


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
