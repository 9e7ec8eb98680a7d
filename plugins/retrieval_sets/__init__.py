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
        "large_scale": (
            "google_landmarks_v2",
            "in_shop",
            "inaturalist2018",
            "stanford_online_products",
        ),
        "reid": ("market1501", "vehicle_id", "veri776"),
    }
    return {name: f"retrieval_sets.{home}:{name}" for home in names for name in names[home]}


# The package also exports the factories themselves, and imports each on first use.
__getattr__, __dir__ = lazy(__name__, retrieval_datasets())
