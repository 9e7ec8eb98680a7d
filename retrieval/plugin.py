"""The API for plugins: the hook marker, the contracts of the kinds of parts, and helpers.

Each name is imported on first use, so that a plugin for serving needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.base.lazy import lazy_names as lazy_names

if TYPE_CHECKING:  # `lazy_names` reads this list
    from retrieval import store
    from retrieval.base.csv_table import (
        CsvTable as CsvTable,
        is_missing_text as is_missing_text,
        typed as typed,
    )
    from retrieval.base.files import cache_folder as cache_folder, write_bytes as write_bytes
    from retrieval.base.lazy import lazy as lazy, lazy_names as lazy_names
    from retrieval.base.remote import address_of as address_of, path_in as path_in
    from retrieval.data.counts import Count as Count, Counts as Counts, differing as differing
    from retrieval.data.datasets import (
        ArrayDataset as ArrayDataset,
        Box as Box,
        FileDataset as FileDataset,
    )
    from retrieval.data.error_lists import refuse as refuse, some as some
    from retrieval.data.gate import is_missing as is_missing, usable as usable
    from retrieval.data.idx import read_idx as read_idx
    from retrieval.data.objects import as_dataset as as_dataset
    from retrieval.data.readable import (
        ADVICE as ADVICE,
        report_left_out as report_left_out,
        skip_unreadable as skip_unreadable,
    )
    from retrieval.data.records import read_records as read_records
    from retrieval.data.samplers import (
        check_classes as check_classes,
        rows_by_class as rows_by_class,
        rows_of as rows_of,
    )
    from retrieval.data.splits import (
        ROLES as ROLES,
        SIDES as SIDES,
        SPLITS as SPLITS,
        sides as sides,
    )
    from retrieval.host.cluster import Cluster as Cluster
    from retrieval.host.factory import (
        Part as Part,
        check_parameters as check_parameters,
        traits as traits,
    )
    from retrieval.host.hookspecs import Factories as Factories, hookimpl as hookimpl
    from retrieval.images.decoding import decode as decode
    from retrieval.images.image_files import find_images as find_images
    from retrieval.images.preprocessing import Preprocessing as Preprocessing
    from retrieval.model.contracts import (
        Backbone as Backbone,
        BatchSampler as BatchSampler,
        Combiner as Combiner,
        Dataset as Dataset,
        Generator as Generator,
        Learner as Learner,
        Loss as Loss,
        Metric as Metric,
        Miner as Miner,
        Subspace as Subspace,
        TrackedRun as TrackedRun,
        Tracker as Tracker,
        TrainingItems as TrainingItems,
        Transform as Transform,
        TripletIndices as TripletIndices,
    )
    from retrieval.model.labels import (
        class_codes as class_codes,
        learner_labels as learner_labels,
        read_labels as read_labels,
    )
    from retrieval.model.linear import LinearMap as LinearMap, deviations as deviations
    from retrieval.model.loss import (
        CheckedLoss as CheckedLoss,
        Distance as Distance,
        Pairs as Pairs,
        Reducer as Reducer,
        as_given as as_given,
        item_losses as item_losses,
        listed_pairs as listed_pairs,
        losses_of as losses_of,
        nothing as nothing,
        pair_views as pair_views,
        pairs_by_round as pairs_by_round,
        reduced_loss as reduced_loss,
    )
    from retrieval.model.metric_learner import (
        MetricLearner as MetricLearner,
        Seeded as Seeded,
        refuse_overflow as refuse_overflow,
    )
    from retrieval.model.model import Normalize as Normalize, full_precision as full_precision
    from retrieval.model.rows import (
        Rows as Rows,
        Sums as Sums,
        first_row as first_row,
        summed as summed,
    )
    from retrieval.store.index_backend import IndexBackend as IndexBackend

    stores = store
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {"stores": "retrieval.store"})
