"""The contract of a store and building blocks for new stores, as `retrieval.plugin.stores`.

`retrieval.plugin.testing` has the test suite that every store must pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.host.lazy import lazy

if TYPE_CHECKING:
    from retrieval.serving.filters import Filter as Filter, matches as matches
    from retrieval.serving.store.address import Address as Address
    from retrieval.serving.store.bundles import (
        bundle_pieces as bundle_pieces,
        kept_bundle as kept_bundle,
    )
    from retrieval.serving.store.contract import (
        Store as Store,
        StorePlace as StorePlace,
        StoreUnavailable as StoreUnavailable,
        Superseded as Superseded,
        TooSlow as TooSlow,
        stop_at as stop_at,
    )
    from retrieval.serving.store.copies import write_copy as write_copy
    from retrieval.serving.store.items import (
        Candidates as Candidates,
        Generation as Generation,
        Item as Item,
        Stats as Stats,
        check_queries as check_queries,
        checked as checked,
        refuse_fields as refuse_fields,
        spans_of as spans_of,
        usable as usable,
        widths_of as widths_of,
    )
    from retrieval.serving.store.remote import (
        RemotePlace as RemotePlace,
        RemoteStore as RemoteStore,
    )
    from retrieval.serving.store.rows import Row as Row

__getattr__, __dir__ = lazy(
    __name__,
    {
        "retrieval.serving.filters": ["Filter", "matches"],
        "retrieval.serving.store.address": ["Address"],
        "retrieval.serving.store.bundles": ["bundle_pieces", "kept_bundle"],
        "retrieval.serving.store.contract": [
            "Store",
            "StorePlace",
            "StoreUnavailable",
            "Superseded",
            "TooSlow",
            "stop_at",
        ],
        "retrieval.serving.store.copies": ["write_copy"],
        "retrieval.serving.store.items": [
            "Candidates",
            "Generation",
            "Item",
            "Stats",
            "check_queries",
            "checked",
            "refuse_fields",
            "spans_of",
            "usable",
            "widths_of",
        ],
        "retrieval.serving.store.remote": ["RemotePlace", "RemoteStore"],
        "retrieval.serving.store.rows": ["Row"],
    },
)
