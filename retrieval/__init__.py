"""Train an embedding, export it to ONNX, index it in FAISS, serve image search.

All that a plugin author imports is here: `hookimpl`, and the contracts, which load (with torch) on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from retrieval.host.hookspecs import hookimpl
from retrieval.host.lazy import lazy

if TYPE_CHECKING:
    from retrieval.errors import (
        BundleError,
        DataError,
        MissingDependency,
        PluginError,
        RecipeError,
        RetrievalError,
        StoreError,
    )
    from retrieval.host.factory import Part, traits
    from retrieval.model.contracts import (
        Backbone,
        Combiner,
        Dataset,
        Generator,
        Learner,
        Loss,
        Metric,
        Miner,
        Subspace,
        TripletIndices,
    )
    from retrieval.model.linear import LinearMap
    from retrieval.model.loss import CheckedLoss
    from retrieval.recipe.tables import Recipe
    from retrieval.run.open import Run, load_run
    from retrieval.serving.bundle import Bundle
    from retrieval.serving.images import Preprocessing
    from retrieval.serving.index.contract import IndexBackend
    from retrieval.serving.index.store import Index

    __version__: str

__all__ = [
    "Backbone",
    "Bundle",
    "BundleError",
    "CheckedLoss",
    "Combiner",
    "DataError",
    "Dataset",
    "Generator",
    "Index",
    "IndexBackend",
    "Learner",
    "LinearMap",
    "Loss",
    "Metric",
    "Miner",
    "MissingDependency",
    "Part",
    "PluginError",
    "Preprocessing",
    "Recipe",
    "RecipeError",
    "RetrievalError",
    "Run",
    "StoreError",
    "Subspace",
    "TripletIndices",
    "__version__",
    "hookimpl",
    "load_run",
    "traits",
]

_load, _ = lazy(
    __name__,
    {
        "retrieval.errors": [
            "BundleError",
            "DataError",
            "MissingDependency",
            "PluginError",
            "RecipeError",
            "RetrievalError",
            "StoreError",
        ],
        "retrieval.host.factory": ["Part", "traits"],
        "retrieval.model.contracts": [
            "Backbone",
            "Combiner",
            "Dataset",
            "Generator",
            "Learner",
            "Loss",
            "Metric",
            "Miner",
            "Subspace",
            "TripletIndices",
        ],
        "retrieval.model.linear": ["LinearMap"],
        "retrieval.model.loss": ["CheckedLoss"],
        "retrieval.recipe.tables": ["Recipe"],
        "retrieval.run.open": ["Run", "load_run"],
        "retrieval.serving.bundle": ["Bundle"],
        "retrieval.serving.images": ["Preprocessing"],
        "retrieval.serving.index.contract": ["IndexBackend"],
        "retrieval.serving.index.store": ["Index"],
    },
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from retrieval.host.version import installed_version

        return installed_version()
    return _load(name)


def __dir__() -> list[str]:
    return __all__
