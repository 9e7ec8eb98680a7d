"""A filter as a question to the record."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import apsw

from retrieval.serving.filters import Filter, fields, matches, to_sql
from retrieval.serving.local.record import ask, value
from retrieval.serving.stores.contract import TooSlow, stop_at
from retrieval.serving.stores.items import no_field

_NAMES = 1000  # of fields that are looked through for a likely one


def condition_of(where: Filter | None) -> tuple[str, tuple[Any, ...]]:
    """Return a filter as a condition over the table `items`, and its values."""
    return ("true", ()) if where is None else to_sql(where)


def refuse_unknown(connection: apsw.Connection, where: Filter | None) -> None:
    """Refuse a filter on what no item has ever had.

    A field stays known when the last item that has it goes: a filter that was good yesterday must not become an error because of that.

    Raises:
        DataError: naming it.
    """
    if where is None:
        return
    for name in sorted(fields(where)):
        if not value(connection, "select 1 from fields where name = ?", (name,)):
            names = [
                one for (one,) in ask(connection, "select name from fields order by name limit ?", (_NAMES,))
            ]
            raise no_field(name, names)


def matching(rows: Iterable[tuple[Any, ...]], where: Filter) -> set[int]:
    """Return the numbers of the rows (number, id, label, metadata) that match.

    Raises:
        TooSlow: it takes longer than `patience` allows.
    """
    good = set()
    for n, id, label, metadata in rows:
        if time.monotonic() > stop_at():
            raise TooSlow("Looking through the items takes too long. Ask for less.")
        if matches(where, id, label, json.loads(metadata)):
            good.add(n)
    return good
