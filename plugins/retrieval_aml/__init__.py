"""Adversarial metric learning: `GMML` and `AML`, in closed form and by L-BFGS on the moments of the pairs.

Chen et al., "Adversarial Metric Learning" (IJCAI 2018); Zadeh et al., "Geometric Mean Metric Learning" (ICML 2016). The
learners need no torch to fit.
"""

from __future__ import annotations

import importlib
from typing import Any

from retrieval import hookimpl
from retrieval.hookspecs import Factories

_HOME = {
    "AML": "aml",
    "Confusion": "confusion",
    "GMML": "gmml",
    "GeometricMeanLoss": "geometric_mean",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"retrieval_aml.{_HOME[name]}"), name)
    raise AttributeError(f"module 'retrieval_aml' has no attribute '{name}'")


@hookimpl
def retrieval_learners() -> Factories:
    """Linear maps under which similar pairs are near and dissimilar ones far: a point on a geodesic of matrices."""
    from retrieval_aml.aml import AML
    from retrieval_aml.gmml import GMML

    return {"aml": AML, "gmml": GMML}


@hookimpl
def retrieval_generators() -> Factories:
    """The negatives that mislead the current metric most, in closed form."""
    from retrieval_aml.confusion import Confusion

    return {"confusion": Confusion}


@hookimpl
def retrieval_losses() -> Factories:
    """The learners' objective for deep networks."""
    from retrieval_aml.geometric_mean import GeometricMeanLoss

    return {"geometric_mean": GeometricMeanLoss}
