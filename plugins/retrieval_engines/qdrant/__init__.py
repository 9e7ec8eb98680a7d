"""Store plugin for Qdrant: `qdrant://host:6333/photos`."""

from __future__ import annotations

from retrieval.plugin import Factories, hookimpl


@hookimpl
def retrieval_stores() -> Factories:
    """Qdrant: an index that any number of processes and machines share."""
    from retrieval_engines.qdrant.place import QdrantPlace

    return {"qdrant": QdrantPlace}
