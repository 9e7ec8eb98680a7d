"""metric-learn's learners: LMNN, ITML, SCML, MMC and the others that take class labels."""

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
    """The learners of metric-learn that are fitted on labelled items."""
    import retrieval_metric_learn as own

    return {
        "itml": own.ITML,
        "lfda": own.LFDA,
        "lmnn": own.LMNN,
        "lsml": own.LSML,
        "mmc": own.MMC,
        "rca": own.RCA,
        "scml": own.SCML,
    }
