"""Large, deep and malformed filters are evaluated, or refused in a sentence."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from retrieval.errors import DataError
from retrieval.store.filters import (
    And,
    Compare,
    Filter,
    In,
    Not,
    Or,
    as_filter,
    filter_from_json,
    filter_to_json,
    filter_to_text,
    matches,
    parse_filter,
)

ONE = Compare(("a",), "=", 1)
WORDS = "a label ( ) = < != in and or not exists 1 null , ."
MIXED = In(("a", "b"), ("x", 1, 2.5, None, True, False))


@pytest.mark.parametrize(
    ("text", "place", "sentence"),
    [
        ("\ufeffa = 1", 1, "a condition"),
        ("price < and b = 1", 9, "expected a value"),
        ("label = shoe", 9, "in single quotes: 'shoe'"),
        ("a = 1 adn b = 2", 7, "Did you mean 'and'?"),
        ("(a = 1", 7, "expected `)`"),
        ("a = 'it", 5, "has no end"),
        ('"unit price = 1', 1, "has no end"),
        ("3 < price", 1, "a condition such as price < 20"),
        ("a =\n ;", 6, "but there is ;"),
        ("a = \x1b", 5, "but there is \ufffd"),
    ],
)
def test_a_mistake_is_pointed_at(text, place, sentence):
    with pytest.raises(DataError) as caught:
        parse_filter(text)
    message, line, caret = str(caught.value).rsplit("\n", 2)
    assert message.startswith(f"The filter, character {place}: ") and sentence in message
    assert len(str(caught.value)) < 500 and "".join(str(caught.value).split("\n")).isprintable()
    if place <= len(text):
        under = line[caret.index("^")]
        assert under == text[place - 1] or not text[place - 1].isprintable()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("price < null", "have an order"),
        ("a = " + "9" * 30, "64 bits"),
        ("a = " + "9" * 5000, "64 bits"),
        ("not label = 3", "`label` is text, which is never 3. Put the text in quotes"),
        ('"" = 1', "not be empty"),
        ("a = '\ud800'", "lone surrogate"),
        ("a = '\0'", "NUL"),
        ("a = -" + "9" * 5000, "64 bits"),
        ("a = -" + "9" * 5000 + ".0", "finite"),
    ],
)
def test_an_invalid_field_or_value_in_text_is_refused(text, sentence):
    with pytest.raises(DataError, match=sentence):
        parse_filter(text)


@pytest.mark.parametrize("word", ["exiſts(a)", "a ın (1)", "a = falſe", "a İN (1)", "a = 1 ſ"])
def test_letters_that_only_resemble_ascii_make_no_keyword(word):
    with pytest.raises(DataError, match="expected"):
        parse_filter(word)
    assert parse_filter("ın = 1 AnD exiſts = 2") == And(
        (Compare(("ın",), "=", 1), Compare(("exiſts",), "=", 2))
    )
    assert filter_to_text(Compare(("ın",), "=", 1)) == "ın = 1"


REFUSED: list[tuple[Any, str]] = [
    ([], "must be an object"),
    ({}, "empty object"),
    ({"and": []}, "takes a list"),
    ({"and": [{"a": 1}, 3]}, 'Part 2 of "and"'),
    ({"not": 1}, 'The value of "not"'),
    ({"exists": 1}, "name of a field"),
    ({"a": {}}, '"in"'),
    ({"a": {"=>": 1}}, "Did you mean"),
    ({"a": {"in": "xy"}}, "takes a list"),
    ({"a": {"in": []}}, "at least one"),
    ({"a": {"=": {"b": 1}}}, "a dict"),
    ({"a": {"<": None}}, "have an order"),
    ({"a": math.nan}, "finite"),
    ({"a": 10**400}, "64 bits"),
    ({"a": 2**63}, "64 bits"),
    ({"label": 3}, "is text, which is never 3"),
    ({"id": {"in": ["3", None]}}, "is text, which is never null"),
    ({"label": {"!=": True}}, "is text, which is never true"),
    ({"\ud800": 1}, "lone surrogates"),
    ({"a..b": 1}, "not a field"),
    ({'"a': 1}, "not a field"),
    ({"a\\": 1}, "backslashes"),
    ({"label.x": 1}, "metadata.label"),
    ({"x" * 10**6: 1}, "not a field"),
    ({"a": "x" * 10_001}, "10,000 characters"),
    ({1: 1}, "not text"),
    ({"a": {None: 1}}, "not one of"),
]


@pytest.mark.parametrize(("value", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_json_that_is_not_a_filter_is_refused(value, sentence):
    with pytest.raises(DataError, match=r"\A[^\ud800]*\Z") as caught:
        filter_from_json(value)
    assert sentence in str(caught.value) and len(str(caught.value)) < 500


def test_several_keys_in_json_mean_and():
    value = {"label": "shoe", "price": {">=": 5, "<": 20}, "not": {"exists": "colour"}}
    assert filter_from_json(value) == parse_filter(
        "label = 'shoe' and (price >= 5 and price < 20) and not exists(colour)"
    )
    assert filter_from_json({"or": [{"a": 1}]}) == filter_from_json({"and": [{"a": 1}]}) == ONE
    assert filter_from_json({'"and"': 1, 'x."a.b"': 2}) == parse_filter('"and" = 1 and x."a.b" = 2')


def test_filters_made_in_python_are_checked():
    for make in (
        lambda: Compare("price", "=", 1),
        lambda: Compare((1,), "=", 1),
        lambda: Compare(("a",), "==", 1),
        lambda: Compare(("a",), [], 1),
        lambda: Compare(("a",), "=", [1]),
        lambda: In(("a",), "xy"),
        lambda: And((ONE,)),
        lambda: Or((ONE, "a = 1")),
        lambda: Not("a = 1"),
        lambda: as_filter(3),
    ):
        with pytest.raises(DataError):
            make()
    assert Compare(["a"], "=", np.int64(3)) == Compare(("a",), "=", 3)
    assert In(("a",), [np.float32(0.5), np.True_, np.str_("x")]).values == (0.5, True, "x")
    assert as_filter(None) is None and as_filter(ONE) is ONE


def tower(levels: int) -> Filter:
    filter: Filter = ONE
    for _ in range(levels):
        filter = Not(filter)
    return filter


def test_depth_has_a_bound():
    assert parse_filter("not " * 14 + "a = 1") == tower(14)
    deep: Filter = MIXED
    for level in range(14):
        deep = (And, Or)[level % 2]((deep, ONE))
    assert filter_from_json(filter_to_json(deep)) == deep == parse_filter(filter_to_text(deep))
    for make in (
        lambda: tower(15),
        lambda: parse_filter("not " * 15 + "a = 1"),
        lambda: parse_filter("not(" * 2_000 + "a = 1" + ")" * 1_900),
        lambda: And((deep, ONE)),
    ):
        with pytest.raises(DataError, match="more than 14 deep"):
            make()
    value: Any = {"a": 1}
    for _ in range(100_000):
        value = {"not": value}
    with pytest.raises(DataError, match="nests too many"):
        as_filter(value)


def test_length_has_a_bound():
    assert parse_filter("a = 1" + " " * 9_995) == ONE
    assert parse_filter("(" * 4_990 + "a = 1" + ")" * 4_990) == ONE
    with pytest.raises(DataError, match="is empty"):
        as_filter("  \n")
    for text in ("a = 1" + " " * 9_996, "a" * 10**7):
        with pytest.raises(DataError, match="10,000 characters"):
            parse_filter(text)


def test_conditions_and_values_have_bounds():
    many = tuple(range(10_000))
    assert In(("a",), many).values == many
    assert And((ONE,) * 500).size.conditions == 500
    half = Or((ONE,) * 250)
    for make, what in (
        (lambda: In(("a",), (*many, 1)), "values"),
        (lambda: And((In(("a",), many), ONE)), "values"),
        (lambda: filter_from_json({"a": {"in": [0] * 10**6}}), "values"),
        (lambda: And((ONE,) * 501), "conditions"),
        (lambda: And((half, half, ONE)), "conditions"),
        # The 7 would be refused as no filter, but is never read
        (lambda: filter_from_json({"and": [{"a": 1}] * 501 + [7]}), "conditions"),
        (lambda: filter_from_json({"or": [{"and": [{"a": 1}] * 400}] * 2 + [7]}), "conditions"),
        (lambda: filter_from_json({str(n): 1 for n in range(501)}), "conditions"),
        (lambda: filter_from_json({"and": [{"and": [{"a": 1}] * 40}] * 40}), "conditions"),
    ):
        with pytest.raises(DataError, match=what):
            make()


def shapes() -> dict[str, Filter]:
    """Filters that reach the limits of depth, conditions and values in different ways."""
    chain: Filter = MIXED
    for level in range(14):
        chain = (And, Or)[level % 2]((*(MIXED,) * 17, chain, *(MIXED,) * 17))
    tree: Filter = Compare(("a",), "!=", 2.5)
    for level in range(8):
        tree = (And, Or)[level % 2]((tree, tree))
        if level >= 3:
            tree = Not(tree)
    wide = And(tuple(Compare(("a",), "!=", n) for n in range(500)))
    values = Or(
        tuple(In((f"n{n}", "x" * 400), (*range(16), "x", 2.5, None, True)) for n in range(500))
    )
    return {
        "chain": chain,
        "tree": tree,
        "wide": wide,
        "values": values,
        "one list": In(("a",), tuple(n / 7 for n in range(10_000))),
        "texts": In("label", tuple(map(str, range(10_000)))),
    }


@pytest.mark.parametrize("shape", shapes())
def test_sqlite_takes_the_largest_filters(database, shape):
    filter = shapes()[shape]
    rows = [(str(n), str(n), {"a": n, "b": [n / 7]}) for n in range(5)]
    database.fill(rows)
    assert database.truth(filter) == {row[0]: int(matches(filter, *row)) for row in rows}
    assert database.ids(filter) == {row[0] for row in rows if matches(filter, *row)}


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.text(max_size=60),
        st.lists(st.sampled_from(["'x'", '"y z"', *WORDS.split()]), max_size=12).map(" ".join),
    )
)
def test_any_text_is_a_filter_or_a_sentence(text):
    try:
        filter = parse_filter(text)
    except DataError:
        return
    assert parse_filter(filter_to_text(filter)) == filter


@settings(max_examples=150, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(["and", "or", "not", "exists", "a", "label", "<", "in", "="]),
                inner,
                max_size=3,
            ),
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_filter_or_a_sentence(value):
    try:
        filter = filter_from_json(value)
    except DataError:
        return
    assert filter_from_json(json.loads(json.dumps(filter_to_json(filter)))) == filter
