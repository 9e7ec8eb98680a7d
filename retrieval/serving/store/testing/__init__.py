"""Test suite for authors of stores, as `retrieval.plugin.testing`.

`StoreSuite` has a test for every promise of `stores.Store`. A subclass returns the place of an
index:

    from retrieval.plugin import stores, testing

    class TestMine(testing.StoreSuite):
        def store_at(self, place):
            return MyPlace(stores.Address.parse(f"mine://{place}/index"))

Run it with pytest. It also needs `onnx`, to make small bundles.
"""

from retrieval.serving.store.testing.bundles import make_bundle
from retrieval.serving.store.testing.generations import GenerationCases
from retrieval.serving.store.testing.items import ItemCases
from retrieval.serving.store.testing.searches import SearchCases
from retrieval.serving.store.testing.whole import WholeCases

__all__ = ["StoreSuite", "make_bundle"]


class StoreSuite(ItemCases, SearchCases, GenerationCases, WholeCases):
    """All tests of the contract of a store.

    A subclass overrides `store_at` and has a name that pytest collects.
    """
