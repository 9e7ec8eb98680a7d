"""Test suite for authors of stores, as `retrieval_engines.testing`.

`StoreSuite` has a test for every promise of `stores.Store`. A subclass implements `store_at`, which
returns the place of an index:

    from retrieval.plugin import stores
    from retrieval_engines import testing

    class TestMine(testing.StoreSuite):
        def store_at(self, place):
            return MyPlace(stores.Address.parse(f"mine://{place}/index"))

Run the subclass with pytest. The tests write small bundles, so they need the package `onnx`.
"""

from retrieval_engines.testing.generations import GenerationCases, WholeCases
from retrieval_engines.testing.item_cases import ItemCases
from retrieval_engines.testing.small_bundles import make_bundle

__all__ = ["StoreSuite", "make_bundle"]


class StoreSuite(ItemCases, GenerationCases, WholeCases):
    """All tests of the contract of a store.

    A subclass implements `store_at`, and its name begins with `Test`, so that pytest collects it.
    """
