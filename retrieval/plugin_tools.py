"""Helpers for authors of plugins, beside the classes of `retrieval` that a part derives from.

What a dataset, a learner or a loss of any plugin would otherwise write again: the bundled plugins
import these names and hardly another. Each loads its module on first use, so that a learner of
NumPy alone loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.host.lazy import lazy as lazy

if TYPE_CHECKING:
    from retrieval.data.counts import Count as Count
    from retrieval.data.counts import Counts as Counts
    from retrieval.data.counts import differing as differing
    from retrieval.data.datasets import ArrayDataset as ArrayDataset
    from retrieval.data.datasets import Box as Box
    from retrieval.data.datasets import FileDataset as FileDataset
    from retrieval.data.error_lists import refuse as refuse
    from retrieval.data.error_lists import some as some
    from retrieval.data.gate import is_missing as is_missing
    from retrieval.data.gate import usable as usable
    from retrieval.data.idx import read_idx as read_idx
    from retrieval.data.readable import ADVICE as ADVICE
    from retrieval.data.readable import report_left_out as report_left_out
    from retrieval.data.readable import skip_unreadable as skip_unreadable
    from retrieval.data.records import read_records as read_records
    from retrieval.data.splits import ROLES as ROLES
    from retrieval.data.splits import SIDES as SIDES
    from retrieval.data.splits import SPLITS as SPLITS
    from retrieval.data.splits import sides as sides
    from retrieval.host.files import cache_folder as cache_folder
    from retrieval.host.files import write_bytes as write_bytes
    from retrieval.host.hookspecs import Factories as Factories
    from retrieval.model.labels import learner_labels as learner_labels
    from retrieval.model.labels import read_labels as read_labels
    from retrieval.model.linear import class_codes as class_codes
    from retrieval.model.linear import deviations as deviations
    from retrieval.model.loss import Distance as Distance
    from retrieval.model.loss import Pairs as Pairs
    from retrieval.model.loss import Reducer as Reducer
    from retrieval.model.loss import listed_pairs as listed_pairs
    from retrieval.model.loss import nothing as nothing
    from retrieval.model.metric_learner import MetricLearner as MetricLearner
    from retrieval.model.model import Normalize as Normalize
    from retrieval.model.precision import as_given as as_given
    from retrieval.model.precision import full_precision as full_precision
    from retrieval.model.rows import Rows as Rows
    from retrieval.model.rows import Sums as Sums
    from retrieval.model.rows import first_row as first_row
    from retrieval.model.rows import summed as summed
    from retrieval.serving.files.csv_table import CsvTable as CsvTable
    from retrieval.serving.files.csv_table import is_missing_text as is_missing_text
    from retrieval.serving.files.csv_table import typed as typed
    from retrieval.serving.files.strict_json import strict_loads as strict_loads
    from retrieval.serving.image_files import find_images as find_images
    from retrieval.serving.images import decode as decode

__getattr__, __dir__ = lazy(
    __name__,
    {
        "retrieval.data.counts": ["Count", "Counts", "differing"],
        "retrieval.data.datasets": ["ArrayDataset", "Box", "FileDataset"],
        "retrieval.data.error_lists": ["refuse", "some"],
        "retrieval.data.gate": ["is_missing", "usable"],
        "retrieval.data.idx": ["read_idx"],
        "retrieval.data.readable": ["ADVICE", "report_left_out", "skip_unreadable"],
        "retrieval.data.records": ["read_records"],
        "retrieval.data.splits": ["ROLES", "SIDES", "SPLITS", "sides"],
        "retrieval.host.files": ["cache_folder", "write_bytes"],
        "retrieval.host.hookspecs": ["Factories"],
        "retrieval.model.labels": ["learner_labels", "read_labels"],
        "retrieval.model.linear": ["class_codes", "deviations"],
        "retrieval.model.loss": ["Distance", "Pairs", "Reducer", "listed_pairs", "nothing"],
        "retrieval.model.metric_learner": ["MetricLearner"],
        "retrieval.model.model": ["Normalize"],
        "retrieval.model.precision": ["as_given", "full_precision"],
        "retrieval.model.rows": ["Rows", "Sums", "first_row", "summed"],
        "retrieval.serving.files.csv_table": ["CsvTable", "is_missing_text", "typed"],
        "retrieval.serving.files.strict_json": ["strict_loads"],
        "retrieval.serving.image_files": ["find_images"],
        "retrieval.serving.images": ["decode"],
    },
)
