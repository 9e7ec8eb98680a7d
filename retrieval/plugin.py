"""The API for plugins: the mark of a hook, the contract of each kind of part, and helpers.

Each name is imported on first use, so that a plugin for serving needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.host.lazy import lazy

if TYPE_CHECKING:
    import retrieval.serving.store as stores
    import retrieval.serving.store.testing as testing
    from retrieval.data.counts import Count, Counts, differing
    from retrieval.data.datasets import ArrayDataset, Box, FileDataset
    from retrieval.data.error_lists import refuse, some
    from retrieval.data.gate import is_missing, usable
    from retrieval.data.idx import read_idx
    from retrieval.data.objects import as_dataset
    from retrieval.data.readable import ADVICE, report_left_out, skip_unreadable
    from retrieval.data.records import read_records
    from retrieval.data.samplers import check_classes, rows_by_class, rows_of
    from retrieval.data.splits import ROLES, SIDES, SPLITS, sides
    from retrieval.host.factory import Part, traits
    from retrieval.host.files import cache_folder, write_bytes
    from retrieval.host.hookspecs import Factories, hookimpl
    from retrieval.model.contracts import (
        Backbone,
        BatchSampler,
        Combiner,
        Dataset,
        Generator,
        Learner,
        Loss,
        Metric,
        Miner,
        Subspace,
        TrackedRun,
        Tracker,
        TrainingItems,
        Transform,
        TripletIndices,
    )
    from retrieval.model.labels import learner_labels, read_labels
    from retrieval.model.linear import LinearMap, class_codes, deviations
    from retrieval.model.loss import (
        CheckedLoss,
        Distance,
        Pairs,
        Reducer,
        as_given,
        listed_pairs,
        nothing,
        pair_views,
    )
    from retrieval.model.metric_learner import MetricLearner
    from retrieval.model.model import Normalize, full_precision
    from retrieval.model.rows import Rows, Sums, first_row, summed
    from retrieval.serving.files.csv_table import CsvTable, is_missing_text, typed
    from retrieval.serving.files.strict_json import strict_loads
    from retrieval.serving.image_files import find_images
    from retrieval.serving.images import Preprocessing, decode
    from retrieval.serving.index.index_backend import IndexBackend

__all__ = [
    "ADVICE",
    "ROLES",
    "SIDES",
    "SPLITS",
    "ArrayDataset",
    "Backbone",
    "BatchSampler",
    "Box",
    "CheckedLoss",
    "Combiner",
    "Count",
    "Counts",
    "CsvTable",
    "Dataset",
    "Distance",
    "Factories",
    "FileDataset",
    "Generator",
    "IndexBackend",
    "Learner",
    "LinearMap",
    "Loss",
    "Metric",
    "MetricLearner",
    "Miner",
    "Normalize",
    "Pairs",
    "Part",
    "Preprocessing",
    "Reducer",
    "Rows",
    "Subspace",
    "Sums",
    "TrackedRun",
    "Tracker",
    "TrainingItems",
    "Transform",
    "TripletIndices",
    "as_dataset",
    "as_given",
    "cache_folder",
    "check_classes",
    "class_codes",
    "decode",
    "deviations",
    "differing",
    "find_images",
    "first_row",
    "full_precision",
    "hookimpl",
    "is_missing",
    "is_missing_text",
    "lazy",
    "learner_labels",
    "listed_pairs",
    "nothing",
    "pair_views",
    "read_idx",
    "read_labels",
    "read_records",
    "refuse",
    "report_left_out",
    "rows_by_class",
    "rows_of",
    "sides",
    "skip_unreadable",
    "some",
    "stores",
    "strict_loads",
    "summed",
    "testing",
    "traits",
    "typed",
    "usable",
    "write_bytes",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "retrieval.data.counts": ["Count", "Counts", "differing"],
            "retrieval.data.datasets": ["ArrayDataset", "Box", "FileDataset"],
            "retrieval.data.error_lists": ["refuse", "some"],
            "retrieval.data.gate": ["is_missing", "usable"],
            "retrieval.data.idx": ["read_idx"],
            "retrieval.data.readable": ["ADVICE", "report_left_out", "skip_unreadable"],
            "retrieval.data.objects": ["as_dataset"],
            "retrieval.data.records": ["read_records"],
            "retrieval.data.samplers": ["check_classes", "rows_by_class", "rows_of"],
            "retrieval.data.splits": ["ROLES", "SIDES", "SPLITS", "sides"],
            "retrieval.host.factory": ["Part", "traits"],
            "retrieval.host.files": ["cache_folder", "write_bytes"],
            "retrieval.host.hookspecs": ["Factories", "hookimpl"],
            "retrieval.model.contracts": [
                "Backbone",
                "BatchSampler",
                "Combiner",
                "Dataset",
                "Generator",
                "Learner",
                "Loss",
                "Metric",
                "Miner",
                "Subspace",
                "TrackedRun",
                "Tracker",
                "TrainingItems",
                "Transform",
                "TripletIndices",
            ],
            "retrieval.model.labels": ["learner_labels", "read_labels"],
            "retrieval.model.linear": ["LinearMap", "class_codes", "deviations"],
            "retrieval.model.loss": [
                "CheckedLoss",
                "Distance",
                "Pairs",
                "Reducer",
                "as_given",
                "listed_pairs",
                "nothing",
                "pair_views",
            ],
            "retrieval.model.metric_learner": ["MetricLearner"],
            "retrieval.model.model": ["Normalize", "full_precision"],
            "retrieval.model.rows": ["Rows", "Sums", "first_row", "summed"],
            "retrieval.serving.files.csv_table": ["CsvTable", "is_missing_text", "typed"],
            "retrieval.serving.files.strict_json": ["strict_loads"],
            "retrieval.serving.image_files": ["find_images"],
            "retrieval.serving.images": ["Preprocessing", "decode"],
            "retrieval.serving.index.index_backend": ["IndexBackend"],
        },
        {"stores": "retrieval.serving.store", "testing": "retrieval.serving.store.testing"},
    )
