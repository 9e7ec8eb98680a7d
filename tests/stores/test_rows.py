"""What a store over an engine says of items in terms and texts, compared with the filter language."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from retrieval.serving.filters import matches, metadata_text
from retrieval.serving.rows.conditions import condition, holds, parts
from retrieval.serving.rows.engine import ITEM, Row
from retrieval.serving.rows.terms import (
    LOOSE,
    digest_of,
    halves,
    indexed,
    key_of,
    part_of,
    path_of,
    sortable,
)

_spec = importlib.util.spec_from_file_location("agreeing", Path(__file__).parent / "agreeing.py")
assert _spec is not None and _spec.loader is not None
_agreeing: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_agreeing)
strategies = _agreeing.strategies


@settings(max_examples=400, deadline=None)
@given(strategies.FILTERS, st.lists(strategies.ITEM, min_size=1, max_size=5))
def test_conditions_are_what_filters_are(where: Any, items: Any) -> None:
    """An exact condition is true of those items that match; a wider one is true of them, too. They lie in the parts that it names, if it names any."""
    for at, (label, metadata) in enumerate(items):
        plain = json.loads(metadata_text(metadata))
        terms, orders = indexed(str(at), label, plain, 4000)
        part = part_of(plain, "a")
        row = Row(at, ITEM, 0, 1, digest_of(str(at)), key_of(str(at)), terms, orders, part=part)
        expected = matches(where, str(at), label, plain)
        exact, sure = condition(where)
        assert sure and holds(exact)(row) is expected
        among = parts(exact, path_of(("a",)))
        assert among is None or not expected or part in {*among, LOOSE}
        wider, sure = condition(where, orders_text=False)
        assert holds(wider)(row) >= expected and (not sure or holds(wider)(row) is expected)


@settings(max_examples=400, deadline=None)
@given(strategies.NUMBERS, strategies.NUMBERS)
@example(2**53, 2**53 + 1)
@example(2**63 - 1, 2**63)
@example(-0.0, 0)
def test_numbers_keep_their_order_as_digits(one: Any, other: Any) -> None:
    from retrieval.serving.filters.tree import number

    one, other = number(one), number(other)
    assert (sortable(one) < sortable(other)) is (one < other) and (sortable(one) == sortable(other)) is (
        one == other
    )
    low, more = halves(sortable(one))
    assert int(low) + more == one if isinstance(one, int) else (low, more) == (one, 0)


def test_an_item_with_too_much_is_looked_at_itself() -> None:
    for metadata in ({"a": list(range(50))}, {"a": "x" * 600}, {str(at): at for at in range(300)}):
        assert indexed("1", None, metadata, 40) == ((LOOSE,), {})
