"""The deep losses by the names that recipes use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from retrieval_anml.danml import DANMLoss, MinedDANMLoss
from retrieval_anml.lifted import ImprovedLiftedLoss, LiftedLoss
from retrieval_anml.npair import ImprovedNPairLoss, NPairLoss
from retrieval_anml.proxies import ImprovedProxyNCALoss

LOSSES: Mapping[str, Callable[..., Any]] = {
    "danml": DANMLoss,
    "danml_mined": MinedDANMLoss,
    "improved_lifted": ImprovedLiftedLoss,
    "lifted": LiftedLoss,
    "improved_npair": ImprovedNPairLoss,
    "npair": NPairLoss,
    "improved_proxy_nca": ImprovedProxyNCALoss,
}
