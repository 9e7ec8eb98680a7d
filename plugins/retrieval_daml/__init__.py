"""Deep adversarial metric learning: generators of hard negatives, the paper's losses, and several
metrics weighted per pair.

Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning", IEEE Transactions on Image Processing
29, 2020.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval import hookimpl
from retrieval.host.hookspecs import Factories
from retrieval.host.lazy import lazy

if TYPE_CHECKING:
    import click
    from retrieval import Run

    from retrieval_daml.contrastive import ContrastiveLoss as ContrastiveLoss
    from retrieval_daml.discriminator import Discriminator as Discriminator
    from retrieval_daml.disturbed import DisturbedNegative as DisturbedNegative
    from retrieval_daml.generators import HardNegativeGenerator as HardNegativeGenerator
    from retrieval_daml.generators import HardPositiveGenerator as HardPositiveGenerator
    from retrieval_daml.lifted import LiftedLoss as LiftedLoss
    from retrieval_daml.miners import OnePerClass as OnePerClass
    from retrieval_daml.miners import SemiHard as SemiHard
    from retrieval_daml.npair import NPairLoss as NPairLoss
    from retrieval_daml.triplet import TripletLoss as TripletLoss
    from retrieval_daml.uniform import UniformMetrics as UniformMetrics

__getattr__, __dir__ = lazy(
    __name__,
    {
        "retrieval_daml.contrastive": ["ContrastiveLoss"],
        "retrieval_daml.discriminator": ["Discriminator"],
        "retrieval_daml.disturbed": ["DisturbedNegative"],
        "retrieval_daml.generators": ["HardNegativeGenerator", "HardPositiveGenerator"],
        "retrieval_daml.lifted": ["LiftedLoss"],
        "retrieval_daml.npair": ["NPairLoss"],
        "retrieval_daml.miners": ["OnePerClass", "SemiHard"],
        "retrieval_daml.triplet": ["TripletLoss"],
        "retrieval_daml.uniform": ["UniformMetrics"],
    },
)


@hookimpl
def retrieval_generators() -> Factories:
    """Generators of synthetic samples that are hard for the metric being learned."""
    from retrieval_daml.disturbed import DisturbedNegative
    from retrieval_daml.generators import GENERATORS

    return {**GENERATORS, "disturbed_negative": DisturbedNegative}


@hookimpl
def retrieval_losses() -> Factories:
    """The four losses that the paper trains with its generator."""
    from retrieval_daml.losses import LOSSES

    return LOSSES


@hookimpl
def retrieval_miners() -> Factories:
    """The triplets that those losses give a generator."""
    from retrieval_daml.miners import MINERS

    return MINERS


@hookimpl
def retrieval_combiners() -> Factories:
    """Several local metrics, weighed per pair or evenly."""
    from retrieval_daml.discriminator import Discriminator
    from retrieval_daml.uniform import UniformMetrics

    return {"discriminator": Discriminator, "uniform": UniformMetrics}


@hookimpl
def retrieval_report_panels(run: Run) -> dict[str, bytes]:
    """Loss curves, weights of local metrics and synthetic samples of an adversarial run."""
    from retrieval_daml.report import report_panels

    return report_panels(run.path)


@hookimpl
def retrieval_commands(app: click.Group) -> None:
    """`retrieval daml-report RUN`: panels of an adversarial run."""
    from retrieval_daml.command import daml_report

    app.add_command(daml_report)
