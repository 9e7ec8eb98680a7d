"""Readers of published data sets, with their layouts, splits and counts; nothing is downloaded."""

from __future__ import annotations

from retrieval.helpers import lazy
from retrieval.plugin import Factories, hookimpl


@hookimpl
def retrieval_datasets() -> Factories:
    """Data sets of the field as published, with folder layouts, splits, protocols and counts."""
    names = {
        "classification": ("caltech101", "caltech256", "cifar100", "dtd", "food101"),
        "fine_grained": ("cars196", "cub200"),
        "instances": ("disc21", "gpr1200", "ilias", "met", "wildlife_reid10k"),
        "large_scale": (
            "google_landmarks_v2",
            "in_shop",
            "inaturalist2018",
            "stanford_online_products",
        ),
        "reid": ("market1501", "vehicle_id", "veri776"),
        "revisited": ("roxford5k", "rparis6k"),
    }
    return {name: f"retrieval_sets.{home}:{name}" for home in names for name in names[home]}


@hookimpl
def retrieval_metrics() -> Factories:
    """Metrics of published protocols."""
    names = {
        "baks": "BAKS",
        "baus": "BAUS",
        "gpr1200_ap": "GPR1200AP",
        "met_accuracy": "MetAccuracy",
        "met_gap": "MetGAP",
        "micro_ap": "MicroAP",
        "oxford_ap": "OxfordAP",
        "oxford_precision_at": "OxfordPrecisionAt",
    }
    return {name: f"retrieval_sets.protocols:{names[name]}" for name in names}


# The package also exports the factories themselves, and imports each on first use.
__getattr__, __dir__ = lazy(__name__, retrieval_datasets())
