"""The paper's losses by their names in a recipe."""

from __future__ import annotations

from retrieval_daml.contrastive import ContrastiveLoss
from retrieval_daml.lifted import LiftedLoss
from retrieval_daml.npair import NPairLoss
from retrieval_daml.triplet import TripletLoss

LOSSES = {
    "contrastive": ContrastiveLoss,
    "lifted": LiftedLoss,
    "npair": NPairLoss,
    "triplet": TripletLoss,
}
