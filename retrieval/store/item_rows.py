"""Items of a local index, from rows of its record and its arrays, and the other way round."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import apsw
import numpy as np

from retrieval.base.arrays import Floats64, Ints
from retrieval.store.filters import Filter
from retrieval.store.items import (
    BASE,
    CODE,
    FEATURES,
    NOT_SEARCHED,
    VECTOR,
    Candidates,
    Item,
    checked_columns,
)
from retrieval.store.masks import sql_of
from retrieval.store.record import ITEM_COLUMNS, ask, from_row, numbers_of, remove
from retrieval.store.snapshot_view import View
from retrieval.store.words import insert_items


def selected_numbers(
    connection: apsw.Connection, ids: Iterable[str], filter: Filter | None
) -> list[int]:
    """Return the sorted numbers of the items that have one of the ids or match the filter."""
    numbers = set(numbers_of(connection, ids))
    if filter is not None:
        condition, values = sql_of(connection, filter)
        sql = f"select n from items where {condition}"
        numbers |= {n for (n,) in ask(connection, sql, values)}
    return sorted(numbers)


def renumber(
    connection: apsw.Connection,
    seq: int,
    old: list[int],
    new: list[int],
    changes: Mapping[str, Any],
) -> None:
    """Change items in the record, which gives them new numbers; both lists ascend."""
    sql = f"select {ITEM_COLUMNS} from items where n in (select value from json_each(?)) order by n"
    rows = ask(connection, sql, (json.dumps(old),))
    items = checked_columns([from_row(row).changed(changes) for row in rows], {})
    # Before `remove`, which would delete the originals.
    moves = zip(new, old, strict=True)
    connection.executemany("update originals set n = ? where n = ?", moves)
    remove(connection, seq, old)
    insert_items(connection, items)


def with_arrays(
    connection: apsw.Connection,
    rows: Sequence[Any],
    view: View,
    names: Sequence[str] = (VECTOR, CODE, BASE, FEATURES),
) -> list[Item]:
    """Return rows of the record as items with the named arrays."""
    numbers = np.array([row[0] for row in rows], np.int64)
    arrays, present = view.read(connection, numbers, names)
    items = []
    for position, (row, has_arrays) in enumerate(zip(rows, present.tolist(), strict=True)):
        row_arrays = {}
        if has_arrays:
            row_arrays = {name: array[position] for name, array in arrays.items()}
        items.append(from_row(row, row_arrays))
    return items


def nearest_candidates(
    view: View,
    items: list[Item],
    rows: Ints,
    distances: Floats64 | None,
    count: int,
    arrays: bool,
) -> Candidates:
    """Order one query's items by id, or by distance and then id, and keep the nearest `count`.

    `arrays` is that of `Store.propose`.
    """
    if distances is None:
        keys = [0.0] * len(items)
    else:
        # The unused places are the last.
        distances = distances[: len(items)]
        keys = distances.tolist()
    if len(set(keys)) < len(keys):
        order = sorted(range(len(keys)), key=lambda position: (keys[position], items[position].id))
        items = [items[position] for position in order]
        rows = rows[order]
    if distances is not None:
        items = items[:count]
        rows = rows[:count]
        distances = distances[:count]
        if not arrays:
            return Candidates(items, {}, distances)
    contents = {}
    for name, file in view.arrays.items():
        if name not in NOT_SEARCHED:
            with file.reading(view.rows) as content:
                contents[name] = content[rows]
    return Candidates(items, contents, distances)
