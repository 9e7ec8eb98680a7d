"""Learners of metric-learn that are fitted on class labels: LMNN, ITML, SCML, MMC and others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.helpers import lazy_names
from retrieval.plugin import Factories, hookimpl

# `lazy_names` reads this list.
if TYPE_CHECKING:
    from retrieval_metric_learn.learners import (
        ITML as ITML,
        LFDA as LFDA,
        LMNN as LMNN,
        LSML as LSML,
        MMC as MMC,
        RCA as RCA,
        SCML as SCML,
    )


@hookimpl
def retrieval_learners() -> Factories:
    """The learners of metric-learn that are fitted on class labels."""
    names = ("ITML", "LFDA", "LMNN", "LSML", "MMC", "RCA", "SCML")
    return {name.lower(): f"retrieval_metric_learn.learners:{name}" for name in names}


# The package also exports the factories themselves, and imports each on first use.
__getattr__, __dir__, __all__ = lazy_names(__name__)
