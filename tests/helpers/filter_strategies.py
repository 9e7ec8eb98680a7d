"""Filters and items of every kind, for tests by property."""

from hypothesis import strategies as st
from retrieval.store.filters import And, Compare, Exists, In, Not, Or

ODD = [
    *("a.b", "a b", "é", "💥", "[0]", "$", "#-1", "'", "metadata", "id", "label", "and", "Exists"),
    *("a]", "\x7f", "\u2028", "İ", "--", "a/*", "?1", " a", "%s", "{}", "key", "value", "type"),
]
NAMES = st.sampled_from(["a", "b", "c", *ODD])
LARGE = [2**53, 2**53 + 1, 2**63 - 1, -(2**63)]
FLOATS = [-0.0, 1.0, 2.0**53, 2.0**70, 0.1, 0.1 + 0.2, 0.3]
FLOATS += [5e-324, 1.7976931348623157e308, 1e22, 1e23]
NUMBERS = st.one_of(
    st.sampled_from([0, 1, *LARGE, *FLOATS]),
    st.integers(-3, 3),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
)
SYNTAX = ['" or number >= 0 or "', "' or 1=1 --", '"] or kind in ["item', '\\" or true']
SYNTAX += ["{number}", "%(id)s", "') or ('a' = 'a", "array_contains(terms, 0)"]
"""What would be a part of an engine's language, if it came there as it is."""
WORDS = ["", "a", "A", "b", "1", "true", "null", "it's", '"', "\\", "\n"]
TEXTS = st.one_of(
    st.sampled_from([*SYNTAX, *WORDS, "\ud7ff", "\ue000", "\uffff", "𐀀"]),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
OWN = st.sampled_from(["id", "label"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(tuple)
FIELDS = st.one_of(OWN, PATHS)
ORDERS = st.sampled_from(["<", "<=", ">", ">="])
COMPARISONS = st.one_of(
    st.builds(Compare, PATHS, st.sampled_from(["=", "!="]), SCALARS),
    st.builds(Compare, PATHS, ORDERS, st.one_of(NUMBERS, TEXTS)),
    st.builds(In, PATHS, st.lists(SCALARS, min_size=1, max_size=5).map(tuple)),
    st.builds(Compare, OWN, st.one_of(st.sampled_from(["=", "!="]), ORDERS), TEXTS),
    st.builds(In, OWN, st.lists(TEXTS, min_size=1, max_size=5).map(tuple)),
    st.builds(Exists, FIELDS),
)
FILTERS = st.recursive(
    COMPARISONS,
    lambda inner: st.one_of(
        st.builds(Not, inner),
        st.builds(And, st.lists(inner, min_size=2, max_size=4).map(tuple)),
        st.builds(Or, st.lists(inner, min_size=2, max_size=4).map(tuple)),
    ),
    max_leaves=8,
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)
ITEM = st.tuples(st.one_of(st.none(), TEXTS), st.dictionaries(NAMES, JSON, max_size=4))
