"""Adaptive neighbourhood metric learning, linear and deep: `LANML`, `PNCA`, and the losses and miners of the deep half.

Song et al., "Adaptive Neighborhood Metric Learning". The learners and the log-exp mean need no torch to fit.
"""

from __future__ import annotations

from retrieval import hookimpl
from retrieval.host.hookspecs import Factories
from retrieval.host.lazy import lazy

__getattr__, __dir__ = lazy(
    __name__,
    {
        "retrieval_anml.danml": ["DANMLoss", "MinedDANMLoss"],
        "retrieval_anml.lifted": ["ImprovedLiftedLoss", "LiftedLoss"],
        "retrieval_anml.npair": ["ImprovedNPairLoss", "NPairLoss"],
        "retrieval_anml.proxies": ["ImprovedProxyNCALoss"],
        "retrieval_anml.lanml": ["LANML"],
        "retrieval_anml.pnca": ["PNCA"],
        "retrieval_anml.miners": ["PairMiner"],
        "retrieval_anml.means": ["gamma_for_mean_of_k_smallest", "log_exp_mean"],
    },
)


@hookimpl
def retrieval_learners() -> Factories:
    """Linear maps that part each item's neighbours of its own class from the others."""
    from retrieval_anml.lanml import LANML
    from retrieval_anml.pnca import PNCA

    return {"lanml": LANML, "pnca": PNCA}


@hookimpl
def retrieval_losses() -> Factories:
    """The deep losses: DANML, and the losses that the paper improves, with the originals."""
    from retrieval_anml.losses import LOSSES

    return LOSSES


@hookimpl
def retrieval_miners() -> Factories:
    """The miner that the paper's experiments use."""
    from retrieval_anml.miners import MINERS

    return MINERS
