"""Train an embedding, export it to ONNX, index it in FAISS, serve image search.

    run = retrieval.train("models/digits/recipe.toml", "runs/digits")
    retrieval.evaluate_run(run)
    bundle = retrieval.export_run(run)
    index = retrieval.build_index(bundle, "photos", "photos.index")
    index.search("query.jpg")
    retrieval.serve(index)

All that a user or a plugin's author imports is here. Each name loads, with torch or FAISS where it
needs them, on first use. Paths are text or `pathlib.Path`. Where a function takes `progress`, True
shows the bars that the command line shows, False nothing, and a function is told what is being
done, how much of it is done, and how much there is to do.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from retrieval.host.cores import limit_threads
from retrieval.host.hookspecs import hookimpl
from retrieval.host.lazy import lazy

if TYPE_CHECKING:
    import retrieval.client as client
    import retrieval.evaluation.plot as plot
    import retrieval.serving.store as stores
    import retrieval.serving.store.testing as testing
    from retrieval.client.clients import AsyncClient, Client
    from retrieval.errors import (
        BundleError,
        DataError,
        MissingDependency,
        PluginError,
        RecipeError,
        RetrievalError,
        ServerError,
        StoreError,
    )
    from retrieval.evaluation.evaluate_run import evaluate_run
    from retrieval.evaluation.evaluation import evaluate
    from retrieval.evaluation.report.write import report
    from retrieval.evaluation.verify_run import verify_run
    from retrieval.export.export_backbone import export_backbone
    from retrieval.export.export_run import export_run
    from retrieval.host.factory import Part, traits
    from retrieval.host.plugins import create, names
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
        TrackedRun,
        Tracker,
        Transform,
        TripletIndices,
    )
    from retrieval.model.linear import LinearMap
    from retrieval.model.loss import CheckedLoss
    from retrieval.recipe.read import Recipe, read_recipe
    from retrieval.run.check_data import check_data
    from retrieval.run.open import Run, load_run
    from retrieval.serving.bundle import Bundle, open_bundle
    from retrieval.serving.http.server import serve
    from retrieval.serving.images import Preprocessing
    from retrieval.serving.index.creating import build_index
    from retrieval.serving.index.index import Index, open_index
    from retrieval.serving.index.index_backend import IndexBackend
    from retrieval.serving.store.contract import Item, Store
    from retrieval.training.comparison.compare import compare
    from retrieval.training.train import train

    __version__: str

__all__ = [
    "AsyncClient",
    "Backbone",
    "Bundle",
    "BundleError",
    "CheckedLoss",
    "Client",
    "Combiner",
    "DataError",
    "Dataset",
    "Generator",
    "Index",
    "IndexBackend",
    "Item",
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
    "ServerError",
    "Store",
    "StoreError",
    "Subspace",
    "TrackedRun",
    "Tracker",
    "Transform",
    "TripletIndices",
    "__version__",
    "build_index",
    "check_data",
    "client",
    "compare",
    "create",
    "evaluate",
    "evaluate_run",
    "export_backbone",
    "export_run",
    "hookimpl",
    "load_run",
    "names",
    "open_bundle",
    "open_index",
    "plot",
    "read_recipe",
    "report",
    "serve",
    "stores",
    "testing",
    "train",
    "traits",
    "verify_run",
]

# Both count only before the libraries that read them are loaded: the first use of a name below
# loads them. Without the first, ONNX Runtime looks up its maker's host at the first search and
# writes to the home folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
limit_threads()

_load, _ = lazy(
    __name__,
    {
        "retrieval.client.clients": ["AsyncClient", "Client"],
        "retrieval.errors": [
            "BundleError",
            "DataError",
            "MissingDependency",
            "PluginError",
            "RecipeError",
            "RetrievalError",
            "ServerError",
            "StoreError",
        ],
        "retrieval.evaluation.evaluate_run": ["evaluate_run"],
        "retrieval.evaluation.evaluation": ["evaluate"],
        "retrieval.evaluation.report.write": ["report"],
        "retrieval.evaluation.verify_run": ["verify_run"],
        "retrieval.export.export_backbone": ["export_backbone"],
        "retrieval.export.export_run": ["export_run"],
        "retrieval.host.plugins": ["create", "names"],
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
            "TrackedRun",
            "Tracker",
            "Transform",
            "TripletIndices",
        ],
        "retrieval.model.linear": ["LinearMap"],
        "retrieval.model.loss": ["CheckedLoss"],
        "retrieval.recipe.read": ["Recipe", "read_recipe"],
        "retrieval.run.check_data": ["check_data"],
        "retrieval.run.open": ["Run", "load_run"],
        "retrieval.serving.bundle": ["Bundle", "open_bundle"],
        "retrieval.serving.http.server": ["serve"],
        "retrieval.serving.images": ["Preprocessing"],
        "retrieval.serving.index.index_backend": ["IndexBackend"],
        "retrieval.serving.index.creating": ["build_index"],
        "retrieval.serving.index.index": ["Index", "open_index"],
        "retrieval.serving.store.contract": ["Item", "Store"],
        "retrieval.training.comparison.compare": ["compare"],
        "retrieval.training.train": ["train"],
    },
)


if not TYPE_CHECKING:  # else a type checker would take a name that there is not for one of any type

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from retrieval.host.version import installed_version

            return installed_version()
        if name == "client":
            from retrieval import client

            return client
        if name == "plot":
            from retrieval.evaluation import plot

            return plot
        if name == "stores":
            from retrieval.serving import store as stores

            return stores
        if name == "testing":
            from retrieval.serving.store import testing

            return testing
        return _load(name)


def __dir__() -> list[str]:
    return __all__
