"""Milvus as a store: `milvus://host:19530/photos`."""

from __future__ import annotations

from retrieval import hookimpl
from retrieval.plugin import Factories


@hookimpl
def retrieval_stores() -> Factories:
    """Milvus: any number of processes search one index, on any number of machines."""
    from retrieval_milvus.place import MilvusPlace

    return {"milvus": MilvusPlace}
