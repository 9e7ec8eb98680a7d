"""Store plugin for Qdrant: `qdrant://host:6333/photos`, or `qdrant_local:///data/photos`."""

from __future__ import annotations

from retrieval.plugin import Factories, hookimpl


@hookimpl
def retrieval_stores() -> Factories:
    """Qdrant, on a server or in a local folder."""
    from retrieval_qdrant.place import QdrantLocalPlace, QdrantPlace

    return {"qdrant": QdrantPlace, "qdrant_local": QdrantLocalPlace}
