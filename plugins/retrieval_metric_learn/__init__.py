"""Learners of metric-learn that are fitted on class labels: LMNN, ITML, SCML, MMC and others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.plugin import Factories, hookimpl, lazy

if TYPE_CHECKING:
    from retrieval_metric_learn.learners import ITML as ITML
    from retrieval_metric_learn.learners import LFDA as LFDA
    from retrieval_metric_learn.learners import LMNN as LMNN
    from retrieval_metric_learn.learners import LSML as LSML
    from retrieval_metric_learn.learners import MMC as MMC
    from retrieval_metric_learn.learners import RCA as RCA
    from retrieval_metric_learn.learners import SCML as SCML

__getattr__, __dir__ = lazy(
    __name__,
    {
        "retrieval_metric_learn.learners": ["ITML", "LFDA", "LMNN", "LSML", "MMC", "RCA", "SCML"],
    },
)


@hookimpl
def retrieval_learners() -> Factories:
    """The learners of metric-learn that are fitted on class labels."""
    import retrieval_metric_learn

    return {
        "itml": retrieval_metric_learn.ITML,
        "lfda": retrieval_metric_learn.LFDA,
        "lmnn": retrieval_metric_learn.LMNN,
        "lsml": retrieval_metric_learn.LSML,
        "mmc": retrieval_metric_learn.MMC,
        "rca": retrieval_metric_learn.RCA,
        "scml": retrieval_metric_learn.SCML,
    }
