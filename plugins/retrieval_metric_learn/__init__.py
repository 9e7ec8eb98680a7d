"""The metric learners of metric-learn as learners: LMNN, ITML, SCML, MMC and the others that take class labels."""

from __future__ import annotations

from retrieval import hookimpl
from retrieval.host.hookspecs import Factories


@hookimpl
def retrieval_learners() -> Factories:
    """Every learner of metric-learn that is fitted on labelled items."""
    from retrieval_metric_learn.learners import LEARNERS

    return LEARNERS
