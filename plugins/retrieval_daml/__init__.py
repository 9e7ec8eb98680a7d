"""Deep adversarial metric learning: generators of hard negatives, the paper's losses, and several metrics weighted per pair.

Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning", IEEE Transactions on Image Processing 29, 2020.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from retrieval import hookimpl
from retrieval.hookspecs import Factories

if TYPE_CHECKING:
    import click

_HOME = {
    "ContrastiveLoss": "contrastive",
    "Discriminator": "discriminator",
    "DisturbedNegative": "disturbed",
    "HardNegativeGenerator": "generators",
    "HardPositiveGenerator": "generators",
    "LiftedLoss": "lifted",
    "NPairLoss": "npair",
    "OnePerClass": "miners",
    "SemiHard": "miners",
    "TripletLoss": "triplet",
    "UniformMetrics": "uniform",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"retrieval_daml.{_HOME[name]}"), name)
    raise AttributeError(f"module 'retrieval_daml' has no attribute '{name}'")


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
def retrieval_commands(app: click.Group) -> None:
    """`retrieval daml-report RUN`: panels of an adversarial run."""
    from retrieval_daml.command import daml_report

    app.add_command(daml_report)
