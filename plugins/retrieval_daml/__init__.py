"""Deep adversarial metric learning: generators, their losses, and metrics weighted per pair.

Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning", IEEE Transactions on Image Processing
29, 2020.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.helpers import lazy
from retrieval.plugin import Factories, hookimpl

if TYPE_CHECKING:
    from retrieval import Run

    from retrieval_daml.generators import (
        HardNegativeGenerator as HardNegativeGenerator,
        HardPositiveGenerator as HardPositiveGenerator,
    )
    from retrieval_daml.local_metrics import (
        Discriminator as Discriminator,
        UniformMetrics as UniformMetrics,
    )
    from retrieval_daml.paper_losses import (
        ContrastiveLoss as ContrastiveLoss,
        LiftedLoss as LiftedLoss,
        NPairLoss as NPairLoss,
        TripletLoss as TripletLoss,
    )
    from retrieval_daml.triplet_miners import OnePerClass as OnePerClass, SemiHard as SemiHard


@hookimpl
def retrieval_generators() -> Factories:
    """Generators of synthetic samples that are hard for the metric being learned."""
    return {
        "hard_negative": "retrieval_daml.generators:HardNegativeGenerator",
        "hard_positive": "retrieval_daml.generators:HardPositiveGenerator",
    }


@hookimpl
def retrieval_losses() -> Factories:
    """The four losses that the paper trains with its generator of hard negatives."""
    return {
        "contrastive": "retrieval_daml.paper_losses:ContrastiveLoss",
        "lifted": "retrieval_daml.paper_losses:LiftedLoss",
        "npair": "retrieval_daml.paper_losses:NPairLoss",
        "triplet": "retrieval_daml.paper_losses:TripletLoss",
    }


@hookimpl
def retrieval_miners() -> Factories:
    """Miners of triplets for a generator."""
    return {
        "one_per_class": "retrieval_daml.triplet_miners:OnePerClass",
        "semi_hard": "retrieval_daml.triplet_miners:SemiHard",
    }


@hookimpl
def retrieval_combiners() -> Factories:
    """Combinations of several local metrics, weighted per pair or evenly."""
    return {
        "discriminator": "retrieval_daml.local_metrics:Discriminator",
        "uniform": "retrieval_daml.local_metrics:UniformMetrics",
    }


@hookimpl
def retrieval_report_panels(run: Run) -> dict[str, bytes]:
    """Panels on losses, weights of local metrics and shifts of synthetic samples."""
    from retrieval_daml.report import report_panels

    return report_panels(run)


# The package also exports the factories themselves, and imports each on first use.
__getattr__, __dir__ = lazy(
    __name__,
    [retrieval_generators(), retrieval_losses(), retrieval_miners(), retrieval_combiners()],
)
