"""Items that Milvus keeps apart by a field of their metadata: a search whose filter names values looks at their partitions."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import retrieval
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from retrieval import stores
from retrieval.serving.filters import parse_filter
from retrieval.serving.rows.conditions import condition
from retrieval.serving.rows.terms import part_of
from retrieval.serving.store.testing.bench import item, normal
from retrieval.serving.store.testing.bundles import opened

pytest.importorskip("pymilvus", reason="the extra `milvus` is not installed")
from retrieval_milvus.expressions import partition_of, partitions
from retrieval_milvus.place import MilvusPlace


@pytest.fixture
def place(milvus: Any) -> Iterator[MilvusPlace]:
    """Where an index by the field `a` may be."""
    found = MilvusPlace(stores.Address.parse(f"milvus://{milvus.place}/parted{os.getpid()}"), partition="a")
    yield found
    found.drop()


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def _agrees(index: stores.RowStore, agree: Any, data: st.DataObject) -> None:
    agree(index, data)


def test_filters_mean_the_same_where_items_are_kept_apart(place: MilvusPlace, agree: Any) -> None:
    with place.create(opened(), stores.widths_of(opened())) as index:
        _agrees(index, agree)


def test_a_search_looks_at_the_partitions_that_its_filter_names(place: MilvusPlace) -> None:
    """Rows with one value lie together, those with several or none in a place of their own; later generations are kept so, too."""
    shops = [f"shop {number % 10}" for number in range(60)]
    items = [item(f"id {at}", at, metadata={"a": shop, "b": at}) for at, shop in enumerate(shops)]
    items += [item("both", 60, metadata={"a": ["shop 3", "shop 4"]}), item("none", 61, metadata={"b": 1})]
    where = parse_filter("a = 'shop 3' and not b = 13")
    named = partitions(condition(where)[0], "a")
    assert named is not None and 1 <= len(named) <= 2 and partition_of(stores.LOOSE) in named
    for text in ("a != 'shop 3' or b = 1", "not a = 'shop 3'", "exists(a)"):
        assert partitions(condition(parse_filter(text))[0], "a") is None
    with place.create(opened(), stores.widths_of(opened())) as index:
        index.upsert(items, opened().sha256)
        (found,) = index.search(normal(1, 12, 0), 70, opened().sha256, where=where)
        assert sorted(one.id for one in found) == ["both", *(f"id {at}" for at in (23, 3, 33, 43, 53))]
        client = index.engine._client
        name = f"{place.address.name}__g1"
        client.flush(name)
        rows = {
            one: int(client.get_partition_stats(name, one)["row_count"])
            for one in client.list_partitions(name)
        }
        expected = Counter(partition_of(part_of(one.metadata, "a")) for one in items)
        assert len(rows) == 17 and {one: count for one, count in rows.items() if count} == expected
        with MilvusPlace(place.address).open() as other:  # whoever opens it need not know
            (same,) = other.search(normal(1, 12, 0), 70, opened().sha256, where=where)
            assert [one.id for one in same] == [one.id for one in found] and other.engine.partition == "a"
            assert other.delete(where=where) == 6 and index.count() == 56
    with pytest.raises(retrieval.StoreError, match="keeps its items by 'a': a partition is chosen when"):
        MilvusPlace(place.address, partition="b").open()
