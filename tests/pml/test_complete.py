"""Every public class of the installed pytorch-metric-learning ("upstream") is offered, with its
parameters and defaults.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers
from retrieval.host.plugins import load_plugins

# Public classes that are not offered: abstract classes, mixins, and parts that return no number
CLASSES = {"BaseMetricLossFunction", "GenericPairLoss", "BaseLossWrapper", "BaseMiner"}
CLASSES |= {"EmbeddingRegularizerMixin", "WeightRegularizerMixin", "BaseReducer", "BaseDistance"}
CLASSES |= {"BaseRegularizer", "DoNothingReducer", "BatchedDistance"}
# Parts that do not offer these parameters: the formula holds for one distance, the loss is already
# one number, or upstream refuses or ignores the parameter
LEFT_OUT = {
    "distance": "AngularLoss CircleLoss DynamicSoftMarginLoss FastAPLoss HistogramLoss InstanceLoss"
    " P2SGradLoss PNPLoss SignalToNoiseRatioContrastiveLoss SmoothAPLoss TupletMarginLoss"
    " ThresholdConsistentMarginLoss VICRegLoss ArcFaceLoss CosFaceLoss LargeMarginSoftmaxLoss"
    " SphereFaceLoss SubCenterArcFaceLoss AngularMiner DistanceWeightedMiner LpRegularizer"
    " EmbeddingsAlreadyPackagedAsTriplets CenterInvariantRegularizer SparseCentersRegularizer"
    " ZeroMeanRegularizer",
    "reducer": "DynamicSoftMarginLoss HistogramLoss ManifoldLoss P2SGradLoss PNPLoss"
    " ThresholdConsistentMarginLoss",
    "embedding_regularizer": "VICRegLoss",
    "embedding_reg_weight": "VICRegLoss",
    "aggregation_func": "PerAnchorReducer",
    "is_inverted": "LpDistance SNRDistance DotProductSimilarity CosineSimilarity",
    "normalize_embeddings": "CosineSimilarity",
}

RENAMED = {"num_classes": "classes", "l": "embedding_size", "descriptors_dim": "embedding_size"}
"""Upstream's names of the values that the host passes."""

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
    """Return the parameters of a class and, through **kwargs, of its bases, with their defaults."""
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
SET_BY_SUBCLASS = {  # fixed by the subclass when it calls its base
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
    known = set(upstream_parameters(cls)) - SET_BY_SUBCLASS.get(cls.__name__, set())
    left_out = {name for name, classes in LEFT_OUT.items() if cls.__name__ in classes.split()}
    assert left_out <= known and not left_out & set(ours)
    for name in known - left_out - {"collect_stats"}:  # for upstream's own loggers
        default, name = upstream_parameters(cls)[name], RENAMED.get(name, name)
        assert name in ours, f"upstream's parameter {name} is missing"
        if default is not inspect.Parameter.empty and not ours[name].by_host:
            assert ours[name].default == default, name


def test_only_upstreams_classes_are_offered():
    for kind in MODULES:
        known = {f"pml.{snake(cls.__name__)}" for k, cls in OFFERED if k == kind}
        assert {name for name in PLUGINS.factories(kind) if name.startswith("pml.")} == known


@pytest.mark.parametrize(("kind", "cls"), OFFERED, ids=lambda x: getattr(x, "__name__", x))
def test_builds_upstreams_class(kind, cls):
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
