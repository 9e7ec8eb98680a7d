"""Readers of published data sets, with their layouts, splits and counts; nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.plugin import Factories, hookimpl, lazy

if TYPE_CHECKING:
    from retrieval_sets.classes import caltech101 as caltech101
    from retrieval_sets.classes import caltech256 as caltech256
    from retrieval_sets.classes import cifar100 as cifar100
    from retrieval_sets.classes import dtd as dtd
    from retrieval_sets.classes import food101 as food101
    from retrieval_sets.fine_grained import cars196 as cars196
    from retrieval_sets.fine_grained import cub200 as cub200
    from retrieval_sets.large import google_landmarks_v2 as google_landmarks_v2
    from retrieval_sets.large import in_shop as in_shop
    from retrieval_sets.large import inaturalist2018 as inaturalist2018
    from retrieval_sets.large import stanford_online_products as stanford_online_products
    from retrieval_sets.reid import market1501 as market1501
    from retrieval_sets.reid import vehicle_id as vehicle_id
    from retrieval_sets.reid import veri776 as veri776


@hookimpl
def retrieval_datasets() -> Factories:
    """Data sets of the field as published, with folder layouts, splits, protocols and counts."""
    names = {
        "classes": ("caltech101", "caltech256", "cifar100", "dtd", "food101"),
        "fine_grained": ("cars196", "cub200"),
        "large": ("google_landmarks_v2", "in_shop", "inaturalist2018", "stanford_online_products"),
        "reid": ("market1501", "vehicle_id", "veri776"),
    }
    return {name: f"retrieval_sets.{home}:{name}" for home in names for name in names[home]}


# Factories are names of the package, too, and are imported on first use.
__getattr__, __dir__ = lazy(__name__, retrieval_datasets())
