"""What a plugin builds on: the contract of each kind of part, and what helps to keep it.

Each name loads on first use, so that a plugin of serving needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.host.lazy import lazy

if TYPE_CHECKING:
    from retrieval.host.factory import Part, traits
    from retrieval.model.contracts import (
        Backbone,
        Combiner,
        Dataset,
        Generator,
        Learner,
        Loss,
        Metric,
        Miner,
        Subspace,
        Transform,
        TripletIndices,
    )
    from retrieval.model.linear import LinearMap
    from retrieval.model.loss import CheckedLoss
    from retrieval.model.tracker import TrackedRun, Tracker
    from retrieval.serving.images import Preprocessing
    from retrieval.serving.index.contract import IndexBackend

__all__ = [
    "Backbone",
    "CheckedLoss",
    "Combiner",
    "Dataset",
    "Generator",
    "IndexBackend",
    "Learner",
    "LinearMap",
    "Loss",
    "Metric",
    "Miner",
    "Part",
    "Preprocessing",
    "Subspace",
    "TrackedRun",
    "Tracker",
    "Transform",
    "TripletIndices",
    "traits",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "retrieval.host.factory": ["Part", "traits"],
            "retrieval.model.contracts": [
                "Backbone",
                "Combiner",
                "Dataset",
                "Generator",
                "Learner",
                "Loss",
                "Metric",
                "Miner",
                "Subspace",
                "Transform",
                "TripletIndices",
            ],
            "retrieval.model.linear": ["LinearMap"],
            "retrieval.model.loss": ["CheckedLoss"],
            "retrieval.model.tracker": ["TrackedRun", "Tracker"],
            "retrieval.serving.images": ["Preprocessing"],
            "retrieval.serving.index.contract": ["IndexBackend"],
        },
    )
