"""The built-in back ends as a plugin of the package itself, found without loading any other."""

from __future__ import annotations

from retrieval.host.hookspecs import Factories, hookimpl


@hookimpl
def retrieval_indexes() -> Factories:
    """FAISS: exact, graphs (of a CPU and of a GPU), inverted lists, and lists or tables of vectors in fewer bytes."""
    from retrieval.serving.index.cagra import Cagra
    from retrieval.serving.index.coded_backends import IvfPq, Rabitq, Sq8
    from retrieval.serving.index.faiss_backends import Flat, Hnsw, Ivf

    return {
        "flat": Flat,
        "hnsw": Hnsw,
        "ivf": Ivf,
        "ivfpq": IvfPq,
        "rabitq": Rabitq,
        "sq8": Sq8,
        "cagra": Cagra,
    }
