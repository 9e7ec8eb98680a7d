"""Store plugin for Milvus: `milvus://host:19530/photos`."""

from __future__ import annotations

from retrieval.plugin import Factories, hookimpl


@hookimpl
def retrieval_stores() -> Factories:
    """Milvus: an index that any number of processes and machines share."""
    from retrieval_engines.milvus.place import MilvusPlace

    return {"milvus": MilvusPlace}
