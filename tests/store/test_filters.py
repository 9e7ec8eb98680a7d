"""Filters of a local index agree with `matches`, in SQL and by columns."""

from typing import Any

import numpy as np
import pytest
from agreeing import agree
from hypothesis import HealthCheck, given, settings, strategies as st
from retrieval.errors import DataError
from retrieval.index.index import open_index
from retrieval.store import masks
from retrieval.store.contract import Item, widths_of
from retrieval.store.filters import Compare, Exists, In, matches, parse_filter
from retrieval.store.folder import create_local
from retrieval.store.local import LocalStore

from retrieval_engines.testing.small_bundles import FEATURES, WIDTH, shared_bundle

SCALARS: list[Any] = [7, 7.0, -0.0, 0, 12.5, 2.0**53, 2**53 + 1, 1e300, 5e-324, True, False, None]
SCALARS += ["7", "shoe", "", "é💥"]
KINDS = [*SCALARS, [], [7, "shoe"], [[7]], [{"x": 7}], [None, True], {}, {"x": 7}]


@pytest.fixture(autouse=True)
def large(monkeypatch):
    monkeypatch.setattr(masks, "_SMALL", 0)  # filters use columns, as in a large index
    monkeypatch.setattr(masks, "_PAGE", 7)


@pytest.fixture
def store(tmp_path):
    create_local(tmp_path / "i", shared_bundle(), widths_of(shared_bundle()))
    with LocalStore(tmp_path / "i", upkeep=False) as created:
        yield created


def hits(store: LocalStore, filter: Any) -> set[str]:
    (answer,) = store.search(
        np.zeros((1, WIDTH), np.float32), 10_000, shared_bundle().sha256, filter=filter
    )
    return {item.id for item in answer}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_columns_agree_with_python(store, data):
    agree(store, data)


@pytest.mark.parametrize("op", ["=", "!=", "<", "<=", ">", ">="])
def test_every_kind_of_value_against_every_other(store, op):
    arrays = {"vector": np.ones(WIDTH, np.float32)}
    items = [Item(f"kind {n}", None, {"x": kind}, arrays=arrays) for n, kind in enumerate(KINDS)]
    items += [Item(f"label {text}", text, {}, arrays=arrays) for text in ("7", "shoe", "Z")]
    store.upsert(items, shared_bundle().sha256)
    for value in SCALARS:
        if op not in ("=", "!=") and (value is None or isinstance(value, bool)):
            continue
        for field in (("x",), ("x", "x"), "label"):
            if field == "label" and not isinstance(value, str):
                continue  # refused
            for filter in (
                Compare(field, op, value),
                In(field, (value, "shoe", "Z") if field == "label" else (value, "shoe", True)),
                Exists(field),
            ):
                expected = {
                    entry.id
                    for entry in items
                    if matches(filter, entry.id, entry.label, entry.metadata)
                }
                assert hits(store, filter) == expected, filter


def test_columns_grow_and_forget(store):
    arrays = {"vector": np.ones(WIDTH, np.float32)}
    filter, present = parse_filter("x >= 5 and y = 1"), dict[str, int]()
    for turn in range(6):
        # the fifth turn adds a single item
        new = {f"id {n}": n % 13 for n in range(turn * 9, 37 if turn == 4 else turn * 11 + 5)}
        store.upsert(
            [Item(id, None, {"x": x, "y": 1}, arrays=arrays) for id, x in new.items()],
            shared_bundle().sha256,
        )
        present |= new
        gone = sorted(present)[turn]
        store.delete([gone])
        del present[gone]
        if turn == 3:
            store.compact()
        assert hits(store, filter) == {id for id, x in present.items() if x >= 5}
        assert hits(store, parse_filter(f"x = {turn}")) == {
            id for id, x in present.items() if x == turn
        }


def test_a_field_that_does_not_fit_is_asked_of_the_record(store, monkeypatch):
    monkeypatch.setattr(masks, "_TEXTS", 10)
    arrays = {"vector": np.ones(WIDTH, np.float32)}
    items = [
        Item(f"id {n}", None, {"text": f"t {n}", "n": n, "big": 2**60 + n}, arrays=arrays)
        for n in range(30)
    ]
    store.upsert(items, shared_bundle().sha256)
    for filter in ("text = 't 3'", "n >= 10 and text != 't 3'", "n > 28 or big = 1", "id = 'id 3'"):
        chosen = parse_filter(filter)
        expected = {
            entry.id for entry in items if matches(chosen, entry.id, entry.label, entry.metadata)
        }
        assert hits(store, chosen) == expected
    assert store.masks._unfit == {("text",), ("big",)}


def test_a_field_stays_known_when_its_last_item_goes(store):
    """A filter that was valid finds nothing; it does not become an error."""
    arrays, filter = {"vector": np.ones(WIDTH, np.float32)}, parse_filter("discount > 1")
    sale = Item("sale", None, {"discount": 5}, arrays=arrays)
    store.upsert([sale, Item("other", arrays=arrays)], shared_bundle().sha256)
    assert hits(store, filter) == {"sale"}
    store.delete(["sale"])
    for _ in range(2):
        assert hits(store, filter) == set() and store.scan(filter) == []
        assert store.count(parse_filter("not exists(discount)")) == 1
        assert store.delete(filter=filter) == 0
        store.compact()


@pytest.mark.parametrize(
    ("filter", "says"),
    [
        ("price = '3'", "`price = '3'` can never match: the items have values of other types"),
        ("price in (true, 'x')", "other types"),
        ("size < 3", "other types"),
        ("maker = 'x'", "other types"),
        ("tags = 3", "other types"),
        ("maker.contry = 'x'", "no item has this field"),
        ("exists(maker.contry)", "no item has this field"),
        ("maker.country.code != 3", "no item has this field"),
        ("label = 'a' and price > 'a'", "`price > 'a'`"),
        ("price > 'a' or size = true", "`price > 'a'`"),
        ("price = 4", None),
        ("price in (4, 'x')", None),
        ("price = '3' or price = 4", None),
        ("price = '3' or label = 'b'", None),
        ("not exists(price)", None),
        ("maker.country > 'y'", None),
        ("tags = 'z'", None),
        ("expired = true", None),  # null has no type
        ("price = null", None),
        ("gone > 3", None),  # an item had it
        ("id = 'nobody'", None),
    ],
)
def test_a_filter_that_can_never_match_is_refused(tmp_path, filter, says):
    arrays = {"vector": np.ones(WIDTH, np.float32)}
    facts = {"price": 3, "size": "L", "maker": {"country": "x"}, "tags": ["a"], "expired": None}
    create_local(tmp_path / "i", shared_bundle(), widths_of(shared_bundle()))
    with open_index(tmp_path / "i", threads=1) as index:
        sold = Item("2", "a", {"gone": 5}, arrays=arrays)
        index.upsert([Item("1", "a", facts, arrays=arrays), sold])
        index.delete(["2"])
        query = np.ones(FEATURES, np.float32)
        calls = (
            lambda: len(index.search(query, 3, filter=filter)),
            lambda: len(index.search(query, 3, filter=filter, offset=1)),
            lambda: len(index.scan(filter)),
            lambda: index.count(filter),
            lambda: len(index.duplicates(1, filter=filter, progress=False)),
            lambda: index.delete(filter=filter),
        )
        for call in calls:
            if says is None:
                assert call() == 0
            else:
                with pytest.raises(DataError) as error:
                    call()
                assert says in str(error.value)
        assert len(index) == 1
