"""Adaptive neighbourhood metric learning: `LANML` and `PNCA`, and deep losses.

Song, Nie, Han & Li, "Adaptive Neighborhood Metric Learning". The learners and the log-exp mean do
not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.helpers import lazy_names
from retrieval.plugin import Factories, hookimpl

# `lazy_names` reads this list.
if TYPE_CHECKING:
    from retrieval_anml.linear_learners import LANML as LANML, PNCA as PNCA
    from retrieval_anml.log_exp_means import (
        gamma_for_mean_of_k_smallest as gamma_for_mean_of_k_smallest,
        log_exp_mean as log_exp_mean,
    )
    from retrieval_anml.similarity_losses import (
        DANMLoss as DANMLoss,
        ImprovedLiftedLoss as ImprovedLiftedLoss,
        ImprovedNPairLoss as ImprovedNPairLoss,
        ImprovedProxyNCALoss as ImprovedProxyNCALoss,
        LiftedLoss as LiftedLoss,
        MinedDANMLoss as MinedDANMLoss,
        NPairLoss as NPairLoss,
    )


@hookimpl
def retrieval_learners() -> Factories:
    """Linear maps that bring items nearer to their class than to other classes."""
    learners = "retrieval_anml.linear_learners"
    return {"lanml": f"{learners}:LANML", "pnca": f"{learners}:PNCA"}


@hookimpl
def retrieval_losses() -> Factories:
    """The deep losses: DANML, the losses that the paper improves, and their original forms."""
    losses = "retrieval_anml.similarity_losses"
    return {
        "danml": f"{losses}:DANMLoss",
        "danml_mined": f"{losses}:MinedDANMLoss",
        "improved_lifted": f"{losses}:ImprovedLiftedLoss",
        "lifted": f"{losses}:LiftedLoss",
        "improved_npair": f"{losses}:ImprovedNPairLoss",
        "npair": f"{losses}:NPairLoss",
        "improved_proxy_nca": f"{losses}:ImprovedProxyNCALoss",
    }


# The package also exports the factories themselves, and imports each on first use.
__getattr__, __dir__, __all__ = lazy_names(__name__)
