"""Stores: where the items of an index are kept, what an index asks of them, and what their authors start from: `retrieval.stores`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.host.lazy import lazy

if TYPE_CHECKING:
    from retrieval.serving.filters import And as And
    from retrieval.serving.filters import Compare as Compare
    from retrieval.serving.filters import Exists as Exists
    from retrieval.serving.filters import Filter as Filter
    from retrieval.serving.filters import In as In
    from retrieval.serving.filters import Not as Not
    from retrieval.serving.filters import Or as Or
    from retrieval.serving.filters import matches as matches
    from retrieval.serving.local.copying import write_copy as write_copy
    from retrieval.serving.stores.address import Address as Address
    from retrieval.serving.stores.bundles import bundle_pieces as bundle_pieces
    from retrieval.serving.stores.bundles import kept_bundle as kept_bundle
    from retrieval.serving.stores.contract import Candidates as Candidates
    from retrieval.serving.stores.contract import Generation as Generation
    from retrieval.serving.stores.contract import Item as Item
    from retrieval.serving.stores.contract import Stats as Stats
    from retrieval.serving.stores.contract import Store as Store
    from retrieval.serving.stores.contract import StoreUnavailable as StoreUnavailable
    from retrieval.serving.stores.contract import Superseded as Superseded
    from retrieval.serving.stores.contract import TooSlow as TooSlow
    from retrieval.serving.stores.contract import spans_of as spans_of
    from retrieval.serving.stores.contract import stop_at as stop_at
    from retrieval.serving.stores.contract import widths_of as widths_of
    from retrieval.serving.stores.items import check_queries as check_queries
    from retrieval.serving.stores.items import checked as checked
    from retrieval.serving.stores.items import refuse_fields as refuse_fields
    from retrieval.serving.stores.items import usable as usable
    from retrieval.serving.stores.place import StorePlace as StorePlace
    from retrieval.serving.stores.remote import RemotePlace as RemotePlace
    from retrieval.serving.stores.remote import RemoteStore as RemoteStore
    from retrieval.serving.stores.remote import Row as Row

__getattr__, __dir__ = lazy(
    __name__,
    {
        "retrieval.serving.filters": ["And", "Compare", "Exists", "Filter", "In", "Not", "Or", "matches"],
        "retrieval.serving.local.copying": ["write_copy"],
        "retrieval.serving.stores.address": ["Address"],
        "retrieval.serving.stores.bundles": ["bundle_pieces", "kept_bundle"],
        "retrieval.serving.stores.contract": [
            "Candidates",
            "Generation",
            "Item",
            "Stats",
            "Store",
            "StoreUnavailable",
            "Superseded",
            "TooSlow",
            "spans_of",
            "stop_at",
            "widths_of",
        ],
        "retrieval.serving.stores.items": ["check_queries", "checked", "refuse_fields", "usable"],
        "retrieval.serving.stores.place": ["StorePlace"],
        "retrieval.serving.stores.remote": ["RemotePlace", "RemoteStore", "Row"],
    },
)
