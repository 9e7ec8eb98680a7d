"""Adaptive neighbourhood metric learning, linear and deep: `LANML`, `PNCA`, and the losses and
miners of the deep half.

Song et al., "Adaptive Neighborhood Metric Learning". The learners and the log-exp mean need no
torch to fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval import hookimpl
from retrieval.host.hookspecs import Factories
from retrieval.host.lazy import lazy

if TYPE_CHECKING:
    from retrieval_anml.danml import DANMLoss as DANMLoss
    from retrieval_anml.danml import MinedDANMLoss as MinedDANMLoss
    from retrieval_anml.lanml import LANML as LANML
    from retrieval_anml.lifted import ImprovedLiftedLoss as ImprovedLiftedLoss
    from retrieval_anml.lifted import LiftedLoss as LiftedLoss
    from retrieval_anml.means import gamma_for_mean_of_k_smallest as gamma_for_mean_of_k_smallest
    from retrieval_anml.means import log_exp_mean as log_exp_mean
    from retrieval_anml.miners import PairMiner as PairMiner
    from retrieval_anml.npair import ImprovedNPairLoss as ImprovedNPairLoss
    from retrieval_anml.npair import NPairLoss as NPairLoss
    from retrieval_anml.pnca import PNCA as PNCA
    from retrieval_anml.proxies import ImprovedProxyNCALoss as ImprovedProxyNCALoss

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
    """Linear maps that separate each item's neighbours of its own class from the others."""
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
