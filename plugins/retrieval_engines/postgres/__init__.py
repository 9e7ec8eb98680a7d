"""Store plugin for Postgres with pgvector: `postgresql://host:5432/database/photos`."""

from __future__ import annotations

from retrieval.plugin import Factories, hookimpl


@hookimpl
def retrieval_stores() -> Factories:
    """Postgres with pgvector: an index in transactions, which any number of machines share."""
    from retrieval_engines.postgres.place import PostgresPlace

    return {"postgresql": PostgresPlace}
