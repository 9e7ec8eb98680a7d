"""Every public class of the installed pytorch-metric-learning is offered, with every parameter and
its default.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import Any

import pytest
import pytorch_metric_learning as pml
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers
from retrieval.host.plugins import load_plugins

CLASSES: dict[str, str] = {
    "BaseMetricLossFunction": "abstract: losses derive from it",
    "GenericPairLoss": "abstract: losses of pairs derive from it",
    "BaseLossWrapper": "abstract: losses that wrap another derive from it",
    "EmbeddingRegularizerMixin": "a part of every loss",
    "WeightRegularizerMixin": "a part of the losses with class weights",
    "BaseMiner": "abstract: miners derive from it",
    "BaseReducer": "abstract: reducers derive from it",
    "DoNothingReducer": "returns a table of losses, and a loss must be one number",
    "BaseRegularizer": "abstract: regularisers derive from it",
    "BaseDistance": "abstract: distances derive from it",
    "BatchedDistance": (
        "hands blocks of a distance matrix to a function, and returns none to a loss"
    ),
}
"""Public classes that are not offered."""

_FIXED = "the formula holds for one distance only, which the loss sets itself"
_SCALAR = "the loss is one number already: there is nothing to reduce"
_UNUSED = "is accepted and never used"

PARAMETERS: dict[str, dict[str, str]] = {
    "*": {"collect_stats": "records figures for upstream's own loggers; the trainer logs its own"},
    "AngularLoss": {"distance": _FIXED},
    "CircleLoss": {"distance": _FIXED},
    "DynamicSoftMarginLoss": {"distance": _FIXED, "reducer": _SCALAR},
    "FastAPLoss": {"distance": _FIXED},
    "HistogramLoss": {"distance": _FIXED, "reducer": _SCALAR},
    "InstanceLoss": {"distance": _FIXED},
    "ManifoldLoss": {"reducer": _SCALAR},
    "P2SGradLoss": {"distance": _UNUSED, "reducer": _SCALAR},
    "PNPLoss": {"distance": _FIXED, "reducer": _SCALAR},
    "SignalToNoiseRatioContrastiveLoss": {
        "distance": "it must be the SNR distance, whose parameters are the loss's own here"
    },
    "SmoothAPLoss": {"distance": _FIXED},
    "ThresholdConsistentMarginLoss": {"distance": _FIXED, "reducer": _SCALAR},
    "TupletMarginLoss": {"distance": _FIXED},
    "VICRegLoss": {
        "distance": "upstream refuses it",
        "embedding_regularizer": "upstream refuses it",
        "embedding_reg_weight": "has no meaning without a regulariser",
    },
    **{
        name: {"distance": _FIXED}
        for name in (
            "ArcFaceLoss",
            "CosFaceLoss",
            "LargeMarginSoftmaxLoss",
            "SphereFaceLoss",
            "SubCenterArcFaceLoss",
        )
    },
    "AngularMiner": {"distance": _FIXED},
    "DistanceWeightedMiner": {"distance": _FIXED},
    "EmbeddingsAlreadyPackagedAsTriplets": {"distance": _UNUSED},
    "PerAnchorReducer": {
        "aggregation_func": "a function, which a recipe cannot write; its default is the mean"
    },
    "CenterInvariantRegularizer": {"distance": _FIXED},
    "LpRegularizer": {"distance": _UNUSED},
    "SparseCentersRegularizer": {"distance": _FIXED},
    "ZeroMeanRegularizer": {"distance": _UNUSED},
    "LpDistance": {"is_inverted": "set by the class"},
    "SNRDistance": {"is_inverted": "set by the class"},
    "DotProductSimilarity": {"is_inverted": "set by the class"},
    "CosineSimilarity": {
        "is_inverted": "set by the class",
        "normalize_embeddings": "set by the class",
    },
}
"""Parameters that are not offered, by class; those under "*" in every class."""

RENAMED: dict[str, str] = {
    "num_classes": "classes",
    "l": "embedding_size",
    "descriptors_dim": "embedding_size",
}
"""Upstream's names for what the host gives."""

PLUGINS = load_plugins()
MODULES = {
    "losses": losses,
    "miners": miners,
    "reducers": reducers,
    "regularizers": regularizers,
    "distances": distances,
}
SUFFIX = re.compile(r"(Loss(es)?|Miner|Reducers?|Regularizer|Distance)$")


def public(module: Any) -> dict[str, type]:
    return {name: thing for name, thing in vars(module).items() if inspect.isclass(thing)}


def snake(name: str) -> str:
    return re.sub(
        r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", SUFFIX.sub("", name)
    ).lower()


def upstream_parameters(cls: type) -> dict[str, Any]:
    """Return what the class and, through **kwargs, its bases accept, with the defaults; empty for
    required ones.
    """
    actual: dict[str, Any] = {}
    for base in cls.__mro__:
        init = base.__dict__.get("__init__")
        if init is None or not base.__module__.startswith("pytorch_metric_learning"):
            continue
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for p in parameters:
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                actual.setdefault(p.name, p.default)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return actual


OFFERED = [
    (kind, cls)
    for kind, module in MODULES.items()
    for name, cls in public(module).items()
    if name not in CLASSES
]
SET_BY_SUBCLASS = {  # fixed in a subclass's call of its base
    "AvgNonZeroReducer": {"low", "high"},
    "BatchHardMiner": {"pos_strategy", "neg_strategy"},
    **{
        name: {"mat_based_loss"}
        for name, cls in public(losses).items()
        if issubclass(cls, losses.GenericPairLoss)
    },
}


@pytest.mark.parametrize(("kind", "cls"), OFFERED, ids=lambda x: getattr(x, "__name__", x))
def test_offered_with_every_parameter_and_default(kind, cls):
    factory = PLUGINS.find(kind, f"pml.{snake(cls.__name__)}")
    ours = {p.name: p for p in factory.parameters}
    left_out = {**PARAMETERS["*"], **PARAMETERS.get(cls.__name__, {})}
    for name, default in upstream_parameters(cls).items():
        if name in SET_BY_SUBCLASS.get(cls.__name__, ()):
            continue
        if name in left_out:
            assert name not in ours, f"{name} is offered, and excluded as: {left_out[name]}"
            continue
        name = RENAMED.get(name, name)
        assert name in ours, f"upstream's parameter {name} is missing"
        if default is not inspect.Parameter.empty and not ours[name].by_host:
            assert ours[name].default == default, name


def test_nothing_is_offered_that_upstream_lacks():
    for kind in MODULES:
        known = {f"pml.{snake(cls.__name__)}" for k, cls in OFFERED if k == kind}
        assert {name for name in PLUGINS.factories(kind) if name.startswith("pml.")} == known


def test_exclusions_exist_and_have_reasons():
    every = {name: cls for module in MODULES.values() for name, cls in public(module).items()}
    assert set(CLASSES) <= set(every) and all(CLASSES.values())
    for name, left_out in PARAMETERS.items():
        if name != "*":
            assert set(left_out) <= set(upstream_parameters(every[name])), name
        assert all(left_out.values())


@pytest.mark.parametrize(("kind", "cls"), OFFERED, ids=lambda x: getattr(x, "__name__", x))
def test_makes_upstreams_class(kind, cls):
    required = {
        "pml.multiple": (
            {"losses": ["pml.circle"]} if kind == "losses" else {"reducers": [], "names": []}
        ),
        "pml.cross_batch_memory": {"loss": "pml.circle"},
        "pml.self_supervised": {"loss": "pml.circle"},
        "pml.ranked_list": {"margin": 0.4, "Tn": 1.0},
        "pml.class_weighted": {"weights": [1.0, 2.0, 3.0]},
        "pml.threshold": {"low": 0.0},
        "pml.sparse_centers": {"centers_per_class": 2},
    }
    name = f"pml.{snake(cls.__name__)}"
    built = PLUGINS.build(
        kind, {"name": name, **required.get(name, {})}, {"embedding_size": 4, "classes": 3}
    )
    assert isinstance(built, cls)
    assert type(built).__name__ == cls.__name__


def test_names():
    assert snake("NTXentLoss") == "nt_xent"
    assert snake("P2SGradLoss") == "p2s_grad"
    assert snake("MultipleLosses") == "multiple"
    assert PLUGINS.find("losses", "pml.multi_similarity").parameters[1].default == 50
    assert pml.__version__


def test_the_plugin_itself_imports_nothing_heavy():
    code = (
        "import retrieval_pml, sys; assert not {'torch', 'pytorch_metric_learning'} &"
        " set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
