"""Train an embedding, export it to ONNX, index it in FAISS, serve image search.

All that a plugin author imports is here: `hookimpl`, and the contracts, which load (with torch) on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from retrieval.hookspecs import hookimpl

if TYPE_CHECKING:
    from retrieval.contracts import (
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
    from retrieval.factory import Part, traits
    from retrieval.images import Preprocessing
    from retrieval.index.backends import IndexBackend

    __version__: str

_HOME = {
    **dict.fromkeys(
        [
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
        "contracts",
    ),
    **dict.fromkeys(["Part", "traits"], "factory"),
    "Preprocessing": "images",
    "IndexBackend": "index.backends",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("embedding-retrieval")
        except PackageNotFoundError:  # a source tree that was never installed
            return "0"
    if name in _HOME:
        return getattr(importlib.import_module(f"retrieval.{_HOME[name]}"), name)
    raise AttributeError(f"module 'retrieval' has no attribute '{name}'")


__all__ = [
    "Backbone",
    "Combiner",
    "Dataset",
    "Generator",
    "IndexBackend",
    "Learner",
    "Loss",
    "Metric",
    "Miner",
    "Part",
    "Preprocessing",
    "Subspace",
    "TripletIndices",
    "__version__",
    "hookimpl",
    "traits",
]
