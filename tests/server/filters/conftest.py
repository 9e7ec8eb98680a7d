from collections.abc import Callable
from typing import Any

import apsw
import pytest
from retrieval.store.filters import Filter, metadata_text, to_sql

TABLE = "create table items (id text primary key, label text, metadata text not null) strict"

Item = tuple[str, str | None, dict[str, Any]]


class Database:
    """SQLite with a table of items, which evaluates filters as a store does."""

    def __init__(self, execute: Callable[..., Any]) -> None:
        self.execute = execute
        execute(TABLE)
        execute("create index labels on items (label)")

    def fill(self, items: list[Item]) -> None:
        self.execute("delete from items")
        for id, label, metadata in items:
            self.execute("insert into items values (?, ?, ?)", (id, label, metadata_text(metadata)))

    def truth(self, filter: Filter) -> dict[str, int]:
        """Return the value of the filter's expression by item: 1 or 0, and never null."""
        sql, values = to_sql(filter)
        return dict(self.execute(f"select id, {sql} from items", values))

    def ids(self, filter: Filter) -> set[str]:
        """Return the ids of the items that match."""
        sql, values = to_sql(filter)
        query = f"select items.id from items where items.id is not null and ({sql}) limit ?"
        return {id for (id,) in self.execute(query, (*values, 1_000_000))}

    def plan(self, filter: Filter) -> str:
        """Return SQLite's plan of a query with the filter."""
        sql, values = to_sql(filter)
        rows = self.execute(f"explain query plan select * from items where {sql}", values)
        return " ".join(row[3] for row in rows)


@pytest.fixture(scope="module")
def database():
    connection = apsw.Connection(":memory:")
    # SQLite's default limits, which some builds raise
    connection.limit(apsw.SQLITE_LIMIT_VARIABLE_NUMBER, 32_766)
    connection.limit(apsw.SQLITE_LIMIT_EXPR_DEPTH, 1_000)
    connection.limit(apsw.SQLITE_LIMIT_SQL_LENGTH, 1_000_000)
    yield Database(connection.execute)
    connection.close()
