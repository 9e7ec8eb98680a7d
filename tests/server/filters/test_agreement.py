"""Which items a filter matches; and Python, SQLite, text and JSON agree on it."""

import json
from typing import Any

import numpy as np
import pytest
from filter_strategies import FILTERS, ITEM, JSON, NAMES
from hypothesis import HealthCheck, example, given, settings, strategies as st
from retrieval.errors import DataError
from retrieval.store.filters import (
    And,
    Compare,
    Exists,
    In,
    Not,
    Or,
    as_filter,
    column_texts,
    filter_from_json,
    filter_to_json,
    filter_to_text,
    matches,
    metadata_text,
    parse_filter,
    to_sql,
)


@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    filters=st.lists(FILTERS, min_size=4, max_size=8), items=st.lists(ITEM, min_size=1, max_size=6)
)
def test_sqlite_and_python_agree(database, filters, items):
    rows = [(str(number), label, metadata) for number, (label, metadata) in enumerate(items)]
    database.fill(rows)
    for filter in filters:
        expected = {
            id: int(matches(filter, id, label, json.loads(metadata_text(metadata))))
            for id, label, metadata in rows
        }
        assert database.truth(filter) == expected, filter
        assert database.ids(filter) == {id for id, true in expected.items() if true}


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), metadata=st.dictionaries(NAMES, JSON, min_size=1, max_size=3))
def test_they_agree_on_an_items_own_values(database, data, metadata):
    """Random filters hardly ever match; filters of an item's own fields and values do."""
    database.fill([("x", None, metadata)])
    names, inner = [], metadata
    while isinstance(inner, dict) and inner:
        names.append(data.draw(st.sampled_from(sorted(inner))))
        inner = inner[names[-1]]
    path, values = tuple(names), inner if isinstance(inner, list) else [inner]
    values = [value for value in values if not isinstance(value, dict | list)]
    value = data.draw(st.sampled_from(values)) if values else None
    ordered = isinstance(value, int | float | str) and not isinstance(value, bool)
    ops = ["=", "!=", "<", "<=", ">", ">="] if ordered else ["=", "!="]
    tests = [Exists(path), In(path, (value,)), *(Compare(path, op, value) for op in ops)]
    for filter in [*tests, *map(Not, tests)]:
        assert database.truth(filter) == {"x": int(matches(filter, "x", None, metadata))}, filter
    assert matches(In(path, (value,)), "x", None, metadata) == bool(values)


@settings(max_examples=150, deadline=None)
@given(FILTERS)
@example(Not(Not(In(("in",), (True, 1, "1", None)))))
@example(And((And((Exists("id"), Exists(("id",)))), Or((Exists(("or",)), Exists(("or", "or")))))))
def test_text_and_json_come_back_as_the_same_filter(filter):
    text, plain = filter_to_text(filter), filter_to_json(filter)
    assert repr(parse_filter(text)) == repr(filter) and parse_filter(text) == filter
    assert repr(filter_from_json(json.loads(json.dumps(plain)))) == repr(filter)
    assert as_filter(text) == as_filter(plain) == as_filter(filter)
    assert filter_to_text(parse_filter(text)) == text and hash(parse_filter(text)) == hash(filter)


SHOE = {
    "price": 20,
    "colour": None,
    "new": True,
    "tags": ["red", "blue", 3, ["deep"], {"x": 1}],
    "none": [],
    "maker": {"country": "DE", "sites": [{"city": "Ulm"}]},
    "unit price": 2.5,
    "label": "inner",
    "and": 1,
    "a.b": 1,
}
TRUE = """
price = 20 | price = 20.0 | price != 19 | price >= 20 and price <= 20 | price in (1, 20.0) | exists(price)
id = 'shoe-1' | label = 'shoe' | label in ('boot', 'shoe') | label < 'shof' | label >= 'shoe' | exists(label) | exists(id)
price != '20' | colour != 'red' | new != 1 | maker != 'x' | price != null | price != true
colour = null | exists(colour) | new = true | new in (false, true) | colour in (null, 1)
tags = 'red' | tags = 3 | tags != 'red' | tags > 'blaa' | tags < 4 | tags in ('blue', 7) | exists(none) | exists(tags)
maker.country = 'DE' | exists(maker) | exists(maker.sites) | "unit price" < 3 | metadata.label = 'inner' | metadata."and" = 1
metadata.price = 20 | "a.b" = 1 | not a.b = 1 | PRICE = 20 or price = 20 | NOT price < 20 AND new = TRUE
not price = '20' | not size = 1 | not exists(size) | price not in (1, 2) | not (price = 1 or price = 2) | not none = 1
""".replace("\n", "|")  # noqa: E501
FALSE = """
price < 20 | price = '20' | price = true | price > '1' | price in ('20', true)
size = 1 | size != 1 | size = null | size in (null) | exists(size) | size.x = 1 | price.x = 1 | exists(label2)
colour = 'red' | colour < 1 | new = 1 | new = 'true' | new > 0 | none = 1 | none != 1 | tags = 'deep' | tags = 'green'
maker = 'DE' | maker in ('DE', 1) | maker.sites.city = 'Ulm' | tags.x = 1 | label = 'inner' | label = 'Shoe' | not tags = 'red'
Price = 20 | maker.country = 'DE' and price = 1 or price = 2 | not new = true | not exists(id)
""".replace("\n", "|")  # noqa: E501
UNLABELLED = "label = 'x' | label != 'x' | exists(label)"
CASES = [
    (text.strip(), label, truth)
    for texts, label, truth in (
        (TRUE, "shoe", True),
        (FALSE, "shoe", False),
        (UNLABELLED, None, False),
    )
    for text in texts.split("|")
    if text.strip()
]


@pytest.mark.parametrize(("text", "label", "truth"), CASES)
def test_a_filter_matches_as_the_table_says(database, text, label, truth):
    database.fill([("shoe-1", label, SHOE)])
    for filter, expected in ((parse_filter(text), truth), (Not(parse_filter(text)), not truth)):
        assert matches(filter, "shoe-1", label, SHOE) is expected
        assert database.truth(filter) == {"shoe-1": int(expected)}


def test_text_has_the_order_of_code_points(database):
    """In the order of UTF-16, U+10000 would come before U+FFFF."""
    words = ["", "B", "a", "aa", "é", "\ud7ff", "\uffff", "𐀀"]
    database.fill([(str(n), text, {"w": text}) for n, text in enumerate(words)])
    for n, text in enumerate(words):
        for field in ("label", ("w",)):
            assert database.ids(Compare(field, "<", text)) == set(map(str, range(n)))


def test_integers_are_compared_exactly(database):
    values = [2**53, 2**53 + 1, 2**53 + 2, 2**63 - 1, -(2**63)]
    database.fill([(str(value), None, {"n": value}) for value in values])
    for value in values:
        assert database.ids(Compare(("n",), "=", value)) == {str(value)}
    assert database.ids(Compare(("n",), "=", float(2**53))) == {str(2**53)}
    assert database.ids(Compare(("n",), ">=", 2.0**63)) == set()


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("label = 'a'", "labels"),
        ("label > 'a'", "labels"),
        ("id in ('a', 'b')", "sqlite_autoindex_items_1"),
        ("price < 3 and (x = 1 and (label = 'a' and y = 2))", "labels"),
        ("label = 'a' or id = 'b'", "labels"),
    ],
)
def test_conditions_on_label_and_id_use_an_index(database, text, index):
    plan = database.plan(parse_filter(text))
    assert f"USING INDEX {index}" in plan and "SCAN items" not in plan


@pytest.mark.parametrize(
    "name",
    ["'", "x'); drop table items; --", "$", "a].b", "?", ":x", "é", "a" * 500],
)
def test_fields_and_values_never_become_sql(database, name):
    database.fill([("hit", name, {name: {name: name}}), ("miss", "other", {"other": 1})])
    for field, plain in (("label", "label"), ((name, name), ("a", "b"))):
        filter = Compare(field, "=", name)
        assert database.ids(filter) == {"hit"}
        assert to_sql(filter)[0] == to_sql(Compare(plain, "=", "x"))[0]
        assert filter_from_json(filter_to_json(filter)) == filter
        assert parse_filter(filter_to_text(filter)) == filter


def test_true_and_1_are_two_filters():
    assert Compare(("a",), "=", True) != Compare(("a",), "=", 1) == Compare(("a",), "=", 1.0)
    assert In(("a",), (True,)) != In(("a",), (1,))
    assert len({Compare(("a",), "=", value) for value in (True, 1, 1.0, False, 0, -0.0)}) == 4


CELLS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
)
TABLES = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    st.lists(CELLS, min_size=3, max_size=3) | st.lists(st.floats(-9, 9), min_size=3, max_size=3),
)


@given(table=TABLES)
@example({"100 %s %": ['"', "\\", "é\n\u2028"], "": [1.0, -0.0, 1e300]})
def test_columns_are_written_as_rows_are(table):
    rows = [{name: column[row] for name, column in table.items()} for row in range(3)]
    assert column_texts(list(table), list(table.values()), 3) == list(map(metadata_text, rows))


def test_metadata_are_written_as_json_that_sqlite_reads():
    plain = '{"é": [1, 2.5, null, true, [9223372036854775807, 1e+30]]}'
    assert metadata_text({"é": [1, 2.5, None, True, (2**63 - 1, 1e30)]}) == plain
    odd = ("x\0", "\ud800", float("nan"), 10**400, 2**63, -(2**63) - 1, {1})
    for wrong in ([], {"a\0": 1}, {1: 1}, *({"a": value} for value in odd)):
        with pytest.raises(DataError):
            metadata_text(wrong)
    deep: Any = 1
    for _ in range(64):
        deep = {"a": deep}
    assert json.loads(metadata_text(deep)) == deep
    for more in (1, 100_000):
        for _ in range(more):
            deep = {"a": deep}
        with pytest.raises(DataError, match="deeper than 64"):
            metadata_text(deep)


def test_every_float_equals_itself(database):
    """In SQLite 3.40, `cast` and the JSON functions round some of these numbers differently."""
    bits = np.random.default_rng(1).integers(0, 2**64, 4_000, dtype=np.uint64).view(np.float64)
    numbers = [float(number) for number in bits if np.isfinite(number)]
    database.fill([(repr(number), None, {"n": number}) for number in numbers])
    assert database.ids(In(("n",), tuple(numbers))) == set(map(repr, numbers))
