"""The API for plugins: the hook marker, the contracts of the kinds of parts, and base classes.

Each name is imported on first use, so that a plugin for serving needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.base.lazy import lazy_names

if TYPE_CHECKING:  # `lazy_names` reads this list
    from retrieval import store
    from retrieval.data.datasets import (
        ArrayDataset as ArrayDataset,
        Dataset as Dataset,
        FileDataset as FileDataset,
    )
    from retrieval.data.loading import (
        check_classes as check_classes,
        rows_by_class as rows_by_class,
        rows_of as rows_of,
    )
    from retrieval.host.factory import Part as Part, traits as traits
    from retrieval.host.hookspecs import Factories as Factories, hookimpl as hookimpl
    from retrieval.host.processes import Cluster as Cluster
    from retrieval.images.image_files import find_images as find_images
    from retrieval.images.preprocessing import Preprocessing as Preprocessing
    from retrieval.model.contracts import (
        Backbone as Backbone,
        BatchSampler as BatchSampler,
        Combiner as Combiner,
        Generator as Generator,
        Learner as Learner,
        Loss as Loss,
        Metric as Metric,
        Miner as Miner,
        Subspace as Subspace,
        TextEncoder as TextEncoder,
        TrackedRun as TrackedRun,
        Tracker as Tracker,
        TrainingItems as TrainingItems,
        Transform as Transform,
        TripletIndices as TripletIndices,
    )
    from retrieval.model.loss import (
        CheckedLoss as CheckedLoss,
        Distance as Distance,
        Reducer as Reducer,
    )
    from retrieval.model.metric_learner import (
        LinearMap as LinearMap,
        MetricLearner as MetricLearner,
    )
    from retrieval.model.model import Normalise as Normalise
    from retrieval.store.index_backend import IndexBackend as IndexBackend

    stores = store
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {"stores": "retrieval.store"})
