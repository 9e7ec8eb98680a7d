"""The API for plugins: the hook marker, the contracts of the kinds of parts, and helpers.

Each name is imported on first use, so that a plugin for serving needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.host.lazy import lazy_names

if TYPE_CHECKING:  # `lazy_names` reads this list
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
    from retrieval.data.objects import as_dataset as as_dataset
    from retrieval.data.readable import ADVICE as ADVICE
    from retrieval.data.readable import report_left_out as report_left_out
    from retrieval.data.readable import skip_unreadable as skip_unreadable
    from retrieval.data.records import read_records as read_records
    from retrieval.data.samplers import check_classes as check_classes
    from retrieval.data.samplers import rows_by_class as rows_by_class
    from retrieval.data.samplers import rows_of as rows_of
    from retrieval.data.splits import ROLES as ROLES
    from retrieval.data.splits import SIDES as SIDES
    from retrieval.data.splits import SPLITS as SPLITS
    from retrieval.data.splits import sides as sides
    from retrieval.host.factory import Part as Part
    from retrieval.host.factory import check_parameters as check_parameters
    from retrieval.host.factory import traits as traits
    from retrieval.host.files import cache_folder as cache_folder
    from retrieval.host.files import write_bytes as write_bytes
    from retrieval.host.hookspecs import Factories as Factories
    from retrieval.host.hookspecs import hookimpl as hookimpl
    from retrieval.host.lazy import lazy as lazy
    from retrieval.model.contracts import Backbone as Backbone
    from retrieval.model.contracts import BatchSampler as BatchSampler
    from retrieval.model.contracts import Combiner as Combiner
    from retrieval.model.contracts import Dataset as Dataset
    from retrieval.model.contracts import Generator as Generator
    from retrieval.model.contracts import Learner as Learner
    from retrieval.model.contracts import Loss as Loss
    from retrieval.model.contracts import Metric as Metric
    from retrieval.model.contracts import Miner as Miner
    from retrieval.model.contracts import Subspace as Subspace
    from retrieval.model.contracts import TrackedRun as TrackedRun
    from retrieval.model.contracts import Tracker as Tracker
    from retrieval.model.contracts import TrainingItems as TrainingItems
    from retrieval.model.contracts import Transform as Transform
    from retrieval.model.contracts import TripletIndices as TripletIndices
    from retrieval.model.labels import class_codes as class_codes
    from retrieval.model.labels import learner_labels as learner_labels
    from retrieval.model.labels import read_labels as read_labels
    from retrieval.model.linear import LinearMap as LinearMap
    from retrieval.model.linear import deviations as deviations
    from retrieval.model.loss import CheckedLoss as CheckedLoss
    from retrieval.model.loss import Distance as Distance
    from retrieval.model.loss import Pairs as Pairs
    from retrieval.model.loss import Reducer as Reducer
    from retrieval.model.loss import as_given as as_given
    from retrieval.model.loss import item_losses as item_losses
    from retrieval.model.loss import listed_pairs as listed_pairs
    from retrieval.model.loss import losses_of as losses_of
    from retrieval.model.loss import nothing as nothing
    from retrieval.model.loss import pair_views as pair_views
    from retrieval.model.loss import pairs_by_round as pairs_by_round
    from retrieval.model.loss import reduced_loss as reduced_loss
    from retrieval.model.metric_learner import MetricLearner as MetricLearner
    from retrieval.model.metric_learner import Seeded as Seeded
    from retrieval.model.metric_learner import refuse_overflow as refuse_overflow
    from retrieval.model.model import Normalize as Normalize
    from retrieval.model.model import full_precision as full_precision
    from retrieval.model.rows import Rows as Rows
    from retrieval.model.rows import Sums as Sums
    from retrieval.model.rows import first_row as first_row
    from retrieval.model.rows import summed as summed
    from retrieval.serving import store
    from retrieval.serving.files.csv_table import CsvTable as CsvTable
    from retrieval.serving.files.csv_table import is_missing_text as is_missing_text
    from retrieval.serving.files.csv_table import typed as typed
    from retrieval.serving.image_files import find_images as find_images
    from retrieval.serving.images import Preprocessing as Preprocessing
    from retrieval.serving.images import decode as decode
    from retrieval.serving.index.index_backend import IndexBackend as IndexBackend
    from retrieval.serving.store import testing as testing

    stores = store
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {"stores": "retrieval.serving.store", "testing": "retrieval.serving.store.testing"},
    )
