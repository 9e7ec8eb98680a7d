"""Columns in memory say of a filter what `matches` says, while items come and go, and know what they cannot hold."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from retrieval.serving.filters import Compare, Filter, In, matches, metadata_text, parse_filter
from retrieval.serving.local import columns as module
from retrieval.serving.local.columns import Columns
from retrieval.serving.store.record import SCHEMA

_spec = importlib.util.spec_from_file_location("filter_strategies", Path(__file__).with_name("strategies.py"))
assert _spec is not None and _spec.loader is not None
_strategies: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_strategies)

KINDS: list[Any] = [
    7, 7.0, -0.0, 0, 12.5, 2**53, 1e300, 5e-324, "7", "shoe", "", "é💥", True, False, None, [], [7, "shoe"], [[7]], [{"x": 7}], [None, True],
    {}, {"x": 7}, {"": 0},
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def few_at_a_time() -> Iterator[None]:
    before, module._STEP = module._STEP, 3
    yield
    module._STEP = before


def opened(path: Path | str = ":memory:") -> apsw.Connection:
    connection = apsw.Connection(str(path))
    if not connection.execute("select 1 from sqlite_master where name = 'items'").get:
        connection.execute("pragma journal_mode = wal")
        connection.execute(SCHEMA["items"])
    return connection


def add(connection: apsw.Connection, *items: tuple[str | None, dict[str, Any]]) -> None:
    for label, metadata in items:
        connection.execute(
            "insert into items (id, label, metadata, keep) values (hex(randomblob(8)), ?, ?, 'reference')",
            (label, metadata_text(metadata)),
        )


def expected(connection: apsw.Connection, where: Filter) -> list[int]:
    rows = connection.execute("select n, id, label, metadata from items order by n")
    return [n for n, id, label, metadata in rows if matches(where, id, label, json.loads(metadata))]


def alive(connection: apsw.Connection, found: Any) -> list[int]:
    """What is left of an answer without items that are gone, which a search masks."""
    there = {n for (n,) in connection.execute("select n from items")}
    return [n for n in found.tolist() if n in there]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    filters=st.lists(_strategies.FILTERS, min_size=4, max_size=8),
    rounds=st.lists(st.lists(_strategies.ITEM, max_size=5), min_size=1, max_size=3),
    gone=st.integers(0, 20),
)
def test_columns_agree_with_python(filters: list[Filter], rounds: list[Any], gone: int) -> None:
    connection, columns = opened(), Columns()
    for seq, items in enumerate(rounds):
        add(connection, *items)
        for where in filters:
            found = columns.matching(connection, where, seq)
            event("by columns" if found is not None else "left to the record")
            if found is not None:
                assert alive(connection, found) == expected(connection, where), where
        connection.execute("delete from items where n = ?", (gone,))
    connection.close()


@pytest.mark.parametrize("op", ["=", "!=", "<", "<=", ">", ">="])
def test_every_kind_of_value_against_every_other(op: str) -> None:
    connection, columns = opened(), Columns()
    add(
        connection,
        *((None, {"x": kind}) for kind in KINDS),
        (None, {}),
        *((text, {}) for text in ("7", "shoe", "Z")),
    )
    for value in [one for one in KINDS if not isinstance(one, list | dict)]:
        if op not in ("=", "!=") and (value is None or isinstance(value, bool)):
            continue
        for field in (("x",), ("x", "x"), "label"):
            for where in (Compare(field, op, value), In(field, (value, "shoe", True))):  # type: ignore[arg-type]
                found = columns.matching(connection, where, 1)
                assert found is not None and found.tolist() == expected(connection, where), where


def test_a_search_of_an_earlier_moment_finds_what_was_there_then(tmp_path: Path) -> None:
    early, late, columns = opened(tmp_path / "f"), opened(tmp_path / "f"), Columns()
    add(early, *((None, {"x": n, "y": 1}) for n in range(10)))
    where, other = parse_filter("x >= 5"), parse_filter("x >= 5 and y = 1")
    first = columns.matching(early, where, 1)
    assert first is not None and first.tolist() == [6, 7, 8, 9, 10]
    add(late, (None, {"x": 50, "y": 1}))  # transaction 2
    early.execute("begin")
    assert early.execute("select count(*) from items").get == 11
    late.execute("delete from items where n in (11, 6)")
    add(late, (None, {"x": 60, "y": 1}))  # transaction 3: number 12
    found = columns.matching(late, where, 3)
    assert found is not None and alive(late, found) == [7, 8, 9, 10, 12] == expected(late, where)
    found = columns.matching(
        early, where, 2
    )  # number 11 was never read into a column, and is there at this moment
    assert found is not None and found.tolist() == [6, 7, 8, 9, 10, 11] == expected(early, where)
    assert columns.matching(late, other, 3) is not None  # reads y as it is now, without 6 and 11
    assert columns.matching(early, other, 2) is None  # and does not say what it was then


@pytest.mark.parametrize(
    "text",
    ["id = 'a'", "x = 9007199254740993", "a=1 or b=1 or c=1 or d=1 or e=1 or f=1 or g=1 or h=1 or i=1"],
)
def test_what_columns_cannot_tell_is_left_to_the_record(text: str) -> None:
    connection = opened()
    add(connection, (None, {"x": 1}))
    assert Columns().matching(connection, parse_filter(text), 1) is None


def test_a_field_that_does_not_fit_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TEXTS", 4)
    connection, columns = opened(), Columns()
    add(connection, *((None, {"name": f"n {n}", "large": 2**60 + n, "x": n}) for n in range(6)))
    for field in ("name = 'n 1'", "large > 5"):
        assert columns.matching(connection, parse_filter(field), 1) is None
    assert columns._unfit == {("name",), ("large",)}
    found = columns.matching(connection, parse_filter("x > 3"), 1)
    assert found is not None and found.tolist() == [5, 6]
    add(connection, (None, {"x": 2**60}))
    assert columns.matching(connection, parse_filter("x > 3"), 2) is None and ("x",) in columns._unfit


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    connection, columns = opened(), Columns()
    add(connection, *((None, {f"f{field}": n for field in range(12)}) for n in range(5)))
    for field in range(12):
        assert columns.matching(connection, parse_filter(f"f{field} = 3"), 1) is not None
    assert list(columns._columns) == [(f"f{field}",) for field in range(4, 12)]
    monkeypatch.setattr(module, "_BYTES", 1000)
    assert columns.matching(connection, parse_filter("f0 = 3"), 1) is None and ("f0",) in columns._unfit


def test_an_interrupted_reading_leaves_nothing_half_read() -> None:
    connection, columns = opened(), Columns()
    add(connection, *((None, {"x": n}) for n in range(10)))
    assert columns.matching(connection, parse_filter("x < 5"), 1) is not None
    add(connection, *((None, {"x": n}) for n in range(10)))
    calls = iter(range(1000))
    connection.set_progress_handler(lambda: next(calls) > 12, 10)
    with pytest.raises(apsw.InterruptError):
        columns.matching(connection, parse_filter("x < 5"), 2)
    connection.set_progress_handler(None)
    found = columns.matching(connection, parse_filter("x < 5"), 2)
    assert found is not None and found.tolist() == expected(connection, parse_filter("x < 5"))


def test_a_sample_tells_about_how_many_match() -> None:
    connection, columns = opened(), Columns()
    add(
        connection, *(("shoe" if n % 2 else None, {"x": n, "tags": [n]} if n % 4 else {}) for n in range(100))
    )
    assert columns.share(parse_filter("x >= 0")) is None  # not in memory
    for text in ("x >= 0", "label = 'shoe' and not x < 50", "x < 0", "tags = 3"):
        assert columns.matching(connection, parse_filter(text), 1) is not None
    assert columns.share(parse_filter("x >= 0")) == pytest.approx(0.75, abs=0.05)
    assert columns.share(parse_filter("not x >= 0")) == pytest.approx(0.25, abs=0.05)
    assert columns.share(parse_filter("label = 'shoe' and x >= 50")) == pytest.approx(0.25, abs=0.05)
    assert columns.share(parse_filter("x < 0")) == 0.0
    assert columns.share(parse_filter("tags = 3")) == 0.0  # a list's values are not those of single items


def test_items_whose_metadata_is_too_long_together_are_left_to_the_record() -> None:
    connection, columns = opened(), Columns()
    add(connection, *((None, {"x": "a" * 400}) for _ in range(6)))
    before = connection.limit(apsw.SQLITE_LIMIT_LENGTH, 1000)
    assert columns.matching(connection, parse_filter("x = 'a'"), 1) is None and columns._unfit == {("x",)}
    connection.limit(apsw.SQLITE_LIMIT_LENGTH, before)
    found = columns.matching(connection, parse_filter("label = 'a'"), 1)
    assert found is not None and found.tolist() == []
