"""Stores on Postgres, Milvus and Qdrant, and what a store on another engine needs.

`RemotePlace` and `RemoteStore` are the base of all. A store for another engine subclasses them;
`retrieval_engines.testing` has the test suite that every store must pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.base.lazy import lazy_names

# `lazy_names` reads this list.
if TYPE_CHECKING:
    from retrieval_engines.remote_place import RemotePlace as RemotePlace
    from retrieval_engines.remote_store import RemoteStore as RemoteStore
    from retrieval_engines.rows import Row as Row
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
