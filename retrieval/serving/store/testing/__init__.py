"""What the author of a store tests it with: `retrieval.testing`.

`StoreSuite` holds a case for every promise of `retrieval.stores.Store`. A subclass says where an
index is:

    from retrieval import stores, testing

    class TestMine(testing.StoreSuite):
        def store_at(self, place):
            return MyPlace(stores.Address.parse(f"mine://{place}/index"))

pytest runs it; nothing else is needed but `onnx`, of which the small bundles are made.
"""

from retrieval.serving.store.testing.bundles import make_bundle
from retrieval.serving.store.testing.generations import GenerationCases
from retrieval.serving.store.testing.items import ItemCases
from retrieval.serving.store.testing.searches import SearchCases
from retrieval.serving.store.testing.whole import WholeCases

__all__ = ["StoreSuite", "make_bundle"]


class StoreSuite(ItemCases, SearchCases, GenerationCases, WholeCases):
    """Every case of the contract of a store.

    A subclass, whose name pytest collects, overrides `at`.
    """
