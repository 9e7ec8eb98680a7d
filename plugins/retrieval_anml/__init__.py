"""Adaptive neighbourhood metric learning, linear and deep: `LANML`, `PNCA`, and the losses and miners of the deep half.

Song et al., "Adaptive Neighborhood Metric Learning". The learners and the log-exp mean need no torch to fit.
"""

from __future__ import annotations

import importlib
from typing import Any

from retrieval import hookimpl
from retrieval.hookspecs import Factories

_HOME = {
    "DANMLoss": "danml",
    "ImprovedLiftedLoss": "lifted",
    "ImprovedNPairLoss": "npair",
    "ImprovedProxyNCALoss": "proxies",
    "LANML": "lanml",
    "LiftedLoss": "lifted",
    "MinedDANMLoss": "danml",
    "NPairLoss": "npair",
    "PNCA": "pnca",
    "PairMiner": "miners",
    "gamma_for_mean_of_k_smallest": "means",
    "log_exp_mean": "means",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"retrieval_anml.{_HOME[name]}"), name)
    raise AttributeError(f"module 'retrieval_anml' has no attribute '{name}'")


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
