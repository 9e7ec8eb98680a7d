"""Registration of the built-in store, which needs no plugin to be loaded."""

from __future__ import annotations

from retrieval.host.hookspecs import Factories, hookimpl


@hookimpl
def retrieval_stores() -> Factories:
    """A folder on this machine: SQLite records the items, FAISS speeds up large indexes."""
    from retrieval.serving.store.local import LocalPlace

    return {"local": LocalPlace}
