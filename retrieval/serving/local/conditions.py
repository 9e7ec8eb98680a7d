"""A filter as a question to the record."""

from __future__ import annotations

from typing import Any

import apsw

from retrieval.serving.filters import Filter, fields, to_sql
from retrieval.serving.local.record import ask, value
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
