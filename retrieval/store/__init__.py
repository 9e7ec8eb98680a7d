"""The contract of a store and building blocks for new stores, as `retrieval.plugin.stores`.

`retrieval_engines.testing` has the test suite that every store must pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.base.lazy import lazy_names

if TYPE_CHECKING:  # `lazy_names` reads this list
    from retrieval.store.address import Address as Address
    from retrieval.store.contract import (
        Store as Store,
        StorePlace as StorePlace,
        StoreUnavailable as StoreUnavailable,
        Superseded as Superseded,
        TooSlow as TooSlow,
        stop_at as stop_at,
    )
    from retrieval.store.copy_store import write_copy as write_copy
    from retrieval.store.exact_search import check_queries as check_queries
    from retrieval.store.filters import Filter as Filter, matches as matches
    from retrieval.store.items import (
        Candidates as Candidates,
        Generation as Generation,
        Item as Item,
        Stats as Stats,
        checked as checked,
        refuse_fields as refuse_fields,
        spans_of as spans_of,
        usable as usable,
        widths_of as widths_of,
    )
    from retrieval.store.kept_bundles import (
        bundle_pieces as bundle_pieces,
        kept_bundle as kept_bundle,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
