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

import sys

# Benchmarks import the small bundles without pytest.
if "pytest" in sys.modules:
    # Only in rewritten modules does a failing `assert` show the values that it compared.
    for module in ("bench", "item_cases", "generation_cases", "index_cases"):
        sys.modules["pytest"].register_assert_rewrite(f"{__name__}.{module}")

from retrieval_engines.testing.generation_cases import GenerationCases
from retrieval_engines.testing.index_cases import IndexCases
from retrieval_engines.testing.item_cases import ItemCases
from retrieval_engines.testing.small_bundles import make_bundle

__all__ = ["StoreSuite", "make_bundle"]


class StoreSuite(ItemCases, GenerationCases, IndexCases):
    """All tests of the contract of a store.

    A subclass implements `store_at`, and its name begins with `Test`, so that pytest collects it.
    """
