"""What pytorch-metric-learning has and this plugin does not offer, and why.

A test compares this with the installed release.
"""

from __future__ import annotations

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
