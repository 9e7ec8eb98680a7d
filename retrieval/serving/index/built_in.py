"""The built-in back ends as a plugin of the package itself, found without loading any other."""

from __future__ import annotations

from retrieval.host.hookspecs import Factories, hookimpl


@hookimpl
def retrieval_indexes() -> Factories:
    """FAISS: exact, a graph, inverted lists, and lists or tables of vectors in fewer bytes."""
    from retrieval.serving.index.faiss_backends import Flat, Hnsw, Ivf, IvfPq, Sq8

    return {"flat": Flat, "hnsw": Hnsw, "ivf": Ivf, "ivfpq": IvfPq, "sq8": Sq8}
