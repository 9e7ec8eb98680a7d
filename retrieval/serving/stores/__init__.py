"""Stores: where the items of an index are kept, what an index asks of them, and what their authors start from: `retrieval.stores`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.host.lazy import lazy

if TYPE_CHECKING:
    from retrieval.serving.filters import Filter as Filter
    from retrieval.serving.filters import matches as matches
    from retrieval.serving.local.copying import write_copy as write_copy
    from retrieval.serving.rows.conditions import holds as holds
    from retrieval.serving.rows.conditions import parts as parts
    from retrieval.serving.rows.engine import ALIVE as ALIVE
    from retrieval.serving.rows.engine import RECORDS as RECORDS
    from retrieval.serving.rows.engine import Between as Between
    from retrieval.serving.rows.engine import Condition as Condition
    from retrieval.serving.rows.engine import Either as Either
    from retrieval.serving.rows.engine import Engine as Engine
    from retrieval.serving.rows.engine import Every as Every
    from retrieval.serving.rows.engine import Has as Has
    from retrieval.serving.rows.engine import OneOf as OneOf
    from retrieval.serving.rows.engine import Ordered as Ordered
    from retrieval.serving.rows.engine import Row as Row
    from retrieval.serving.rows.place import RowPlace as RowPlace
    from retrieval.serving.rows.store import RowStore as RowStore
    from retrieval.serving.rows.terms import LOOSE as LOOSE
    from retrieval.serving.rows.terms import halves as halves
    from retrieval.serving.rows.terms import path_of as path_of
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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "retrieval.serving.filters": ["Filter", "matches"],
        "retrieval.serving.local.copying": ["write_copy"],
        "retrieval.serving.rows.conditions": ["holds", "parts"],
        "retrieval.serving.rows.engine": [
            "ALIVE",
            "RECORDS",
            "Between",
            "Condition",
            "Either",
            "Engine",
            "Every",
            "Has",
            "OneOf",
            "Ordered",
            "Row",
        ],
        "retrieval.serving.rows.place": ["RowPlace"],
        "retrieval.serving.rows.store": ["RowStore"],
        "retrieval.serving.rows.terms": ["LOOSE", "halves", "path_of"],
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
    },
)
