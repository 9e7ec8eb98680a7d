"""The store of the package itself as a plugin, found without loading any other."""

from __future__ import annotations

from retrieval.host.hookspecs import Factories, hookimpl


@hookimpl
def retrieval_stores() -> Factories:
    """A folder on this machine: SQLite is the record of items, FAISS speeds up what is large."""
    from retrieval.serving.store.local import LocalPlace

    return {"local": LocalPlace}
