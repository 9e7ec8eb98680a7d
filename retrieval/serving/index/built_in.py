"""The built-in back ends as a plugin of the package itself, found without loading any other."""

from __future__ import annotations

from retrieval.host.hookspecs import Factories, hookimpl


@hookimpl
def retrieval_indexes() -> Factories:
    """FAISS: exact, a graph, and inverted lists."""
    from retrieval.serving.index.faiss_backends import Flat, Hnsw, Ivf

    return {"flat": Flat, "hnsw": Hnsw, "ivf": Ivf}
