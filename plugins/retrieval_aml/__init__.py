"""Adversarial metric learning: `AML`, the metric `GMML` that it extends, and their deep forms.

Chen et al., "Adversarial Metric Learning" (IJCAI 2018); Zadeh et al., "Geometric Mean Metric
Learning" (ICML 2016). The learners do not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.helpers import lazy_names
from retrieval.plugin import Factories, hookimpl

# `lazy_names` reads this list.
if TYPE_CHECKING:
    from retrieval_aml.aml import AML as AML
    from retrieval_aml.confusion import Confusion as Confusion
    from retrieval_aml.geometric_mean import GeometricMeanLoss as GeometricMeanLoss
    from retrieval_aml.gmml import GMML as GMML


@hookimpl
def retrieval_learners() -> Factories:
    """Linear maps under which similar pairs are near and dissimilar pairs are far."""
    return {"aml": "retrieval_aml.aml:AML", "gmml": "retrieval_aml.gmml:GMML"}


@hookimpl
def retrieval_generators() -> Factories:
    """The generator of negatives that mislead the current metric most, in closed form."""
    return {"confusion": "retrieval_aml.confusion:Confusion"}


@hookimpl
def retrieval_losses() -> Factories:
    """The objective of the learners as a loss for deep networks."""
    return {"geometric_mean": "retrieval_aml.geometric_mean:GeometricMeanLoss"}


# The package also exports the factories themselves, and imports each on first use.
__getattr__, __dir__, __all__ = lazy_names(__name__)
