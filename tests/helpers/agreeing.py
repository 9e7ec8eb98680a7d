"""Compare a store's filters with `matches` on random items and filters."""

import json
from contextlib import suppress

import filter_strategies as strategies
from hypothesis import strategies as st
from retrieval.errors import DataError
from retrieval.plugin import stores
from retrieval.store.filters import matches, metadata_text

from retrieval_engines.testing.bench import all_pages, random_item, random_vectors
from retrieval_engines.testing.small_bundles import WIDTH, shared_bundle

SERVED = shared_bundle().sha256
NAMES = ["a", "b", "c", *strategies.ODD]


def agree(store: stores.Store, data: st.DataObject) -> None:
    """Replace the items of a store with random ones, and compare the results of some filters."""
    drawn = data.draw(st.lists(strategies.ITEM, min_size=1, max_size=25))
    given = [random_item("all", metadata=dict.fromkeys(NAMES))]
    for at, (label, metadata) in enumerate(drawn):
        given.append(random_item(f"'{at}\"", label=label, metadata=metadata))
    store.delete([entry.id for entry in store.scan()])
    store.upsert(given, SERVED)
    for filter in data.draw(st.lists(strategies.FILTERS, min_size=4, max_size=10)):
        expected = sorted(
            entry.id
            for entry in given
            if matches(filter, entry.id, entry.label, json.loads(metadata_text(entry.metadata)))
        )
        with suppress(DataError):  # a refused filter, or an unknown field
            ids = sorted(entry.id for entry in all_pages(store, filter))
            assert (ids, store.count(filter)) == (expected, len(expected)), filter
            (hits,) = store.search(random_vectors(1, WIDTH, 0), 50, SERVED, filter=filter)
            assert sorted(entry.id for entry in hits) == expected, filter
            continue
        assert not expected or "filters" not in store.capabilities, filter
