"""A store in Postgres: a table per generation, and every call in one transaction."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias
from uuid import UUID

import psycopg
from psycopg.sql import Identifier, Literal
from psycopg.types.json import Jsonb
from retrieval.errors import StoreError
from retrieval.store.contract import stop_at
from retrieval.store.filters import Filter
from retrieval.store.filters.tree import Field, Joint
from retrieval.store.items import Floats, Generation, Item

from retrieval_engines.engine_calls import Conditions, one_line
from retrieval_engines.postgres.connections import Connection, Connections, to_json
from retrieval_engines.register import REGISTER, RegisterContent
from retrieval_engines.remote_store import RemoteStore
from retrieval_engines.rows import Row

# pgvector keeps longer vectors neither in a table, nor in a graph of float32 or float16.
MOST_NUMBERS = 16_000
MOST_IN_GRAPH = 2_000
MOST_IN_HALF_GRAPH = 4_000
# Width of a graph's search; pgvector takes up to 1,000.
MIN_BREADTH = 100
MAX_BREADTH = 1_000
# Classes of SQLSTATE after which a retry may succeed: lost connections, conflicts, shortages,
# locks, shutdowns and timeouts. After 53100 (the disk is full) it does not.
PASSING = ("08", "40", "53", "55", "57")
FULL = "53100"
# A server that refuses a connection gives no SQLSTATE.
REFUSED = re.compile("authentication failed|no password|pg_hba.conf|does not exist|permission")
# Starting two workers takes the CPU time of comparing 70,000 vectors of 128 numbers. By default,
# Postgres starts them for so many vectors of any width; with this, for 600,000 of this width.
WORKERS_COST = 10_000 * 128
# After the lock, each statement sees what earlier writers wrote.
WRITE = """
begin isolation level read committed read write; {limits};
select set_config('synchronous_commit', 'on', true)
 where current_setting('synchronous_commit') = 'off';
select pg_advisory_xact_lock(hashtextextended('retrieval ' || {name}, 0))
"""
READ = "begin isolation level repeatable read read only; {limits}"
BUILD = "begin isolation level read committed read write; {limits}"
LIMITS = (
    "set local statement_timeout = {}; set local idle_in_transaction_session_timeout = 0;"
    " set local jit = off"
)
COLUMNS = {
    "id": "text",
    "number": "int8",
    "label": "text",
    "version": "uuid",
    "metadata": "jsonb",
    "record": "jsonb",
}
"""Columns of an item without vectors. `record` has the entries that have no column of their own,
`number` grows with each write."""
# An exact search takes as long as it takes to read the rows. It needs their first columns, and
# vectors that stay in their row, not those that Postgres moves elsewhere.
TABLE = """
create table {table} (id text collate "C" primary key, {vectors}, number bigint not null,
 label text collate "C", version uuid not null, metadata jsonb not null, record jsonb not null)
 with (toast_tuple_target = 8160);
create index on {table} using hash (label);
create index on {table} (number);
create index on {table} using gin (metadata jsonb_path_ops)
"""
REGISTER_TABLES = """
create table if not exists retrieval_indexes
 (name text collate "C" primary key, served text, notes jsonb not null);
create table {table} (id text primary key, content bytea)
"""
# Most reads do not need arrays, which are long.
PLAIN = "id, number, label, version, metadata, record - 'arrays', null"
WHOLE = "id, number, label, version, metadata, record, v0"

Part: TypeAlias = tuple[str, tuple[Any, ...]]
"""A condition in SQL, and its parameters in order. The text has no value of a user."""


class PostgresStore(RemoteStore):
    """A store in Postgres.

    Statements consist of texts of this module, quoted names of tables, and numbers; all that comes
    from a user is a parameter.
    """

    engine = "Postgres"
    errors = (psycopg.Error,)
    capabilities = frozenset({"atomic", "filters", "ordered"})
    _client: Connections

    def _explain_error(self, error: Exception) -> tuple[bool, str]:
        text = f"{one_line(error) or type(error).__name__}."
        state = getattr(error, "sqlstate", None)
        if state is not None:
            return state.startswith(PASSING) and state != FULL, text
        if "authentication failed" in text or "no password" in text:
            text += " Set PGUSER and PGPASSWORD, or write them into ~/.pgpass."
        return not REFUSED.search(text), text

    # Transactions

    @contextmanager
    def _transaction(self, opening: str) -> Iterator[Connection]:
        """Run the statements inside as one transaction, or as a part of that of this thread."""
        connection: Connection | None = getattr(self._client.current, "connection", None)
        if connection is not None:
            yield connection
            return
        connection = self._request(self._begin, opening)
        self._client.current.connection = connection
        try:
            yield connection
            self._request(connection.commit)
        finally:
            self._client.current.connection = None
            self._client.give_back(connection)

    def _begin(self, opening: str) -> Connection:
        seconds = max(0.001, min(self.timeout, stop_at() - time.monotonic()))
        name = Literal(self.name).as_string()
        text = opening.format(limits=LIMITS.format(round(1000 * seconds)), name=name)
        select = f"select served, notes from retrieval_indexes where name = {name}"
        connection: Connection = self._client.take(seconds)
        try:
            try:
                cursor = connection.execute(f"{text}; {select}".encode())
                while cursor.nextset():
                    pass
                self._client.current.register = cursor.fetchone()
            except psycopg.errors.UndefinedTable:
                # This database never had an index.
                connection.rollback()
                connection.execute(text.encode())
                self._client.current.register = None
        except BaseException as error:
            self._client.give_back(connection)
            # The others are most likely broken, too.
            if isinstance(error, psycopg.OperationalError):
                self._client.close_idle()
            raise
        return connection

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._turn, self._transaction(WRITE):
            yield

    def _reading(self) -> AbstractContextManager[object]:
        return self._transaction(READ)

    def _may_retry(self) -> bool:
        return getattr(self._client.current, "connection", None) is None

    def _run(self, call: Callable[[Connection], Any]) -> Any:
        """Return what `call` returns, in a transaction of its own outside of one."""
        with self._transaction(READ) as connection:
            return self._request(call, connection)

    def _execute(self, text: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement."""

        def execute(connection: Connection) -> list[tuple[Any, ...]]:
            cursor = connection.execute(text.encode(), values or None, binary=bool(values))
            return cursor.fetchall() if cursor.description else []

        return list(self._run(execute))

    # Tables

    def _table(self, generation: Generation) -> str:
        return Identifier(self.collection(generation.number)).as_string()

    def _collections(self) -> list[str]:
        rows = self._execute("select tablename from pg_tables where schemaname = current_schema()")
        return [name for (name,) in rows]

    def _delete_collection(self, name: str) -> None:
        self._execute(f"drop table if exists {Identifier(name).as_string()}")

    # The register: a row of `retrieval_indexes`, which each transaction begins by reading.

    def _register(self) -> tuple[str | None, dict[str, Any]] | None:
        """Return the name of the table that is served, and the notes; None without an index."""
        with self._reading():
            register: tuple[str | None, dict[str, Any]] | None = self._client.current.register
            return register

    def _aliased_collection(self) -> str | None:
        register = self._register()
        return register and register[0]

    def _read_notes(self) -> dict[str, Any]:
        register = self._register()
        if register is None:
            raise self._lost_error()
        return dict(register[1])

    def _change_register(self, change: str, *values: Any) -> None:
        text = f"update retrieval_indexes set {change} where name = %s returning served, notes"
        (self._client.current.register,) = self._execute(text, *values, self.name)

    def _move_alias(self, number: int | None) -> None:
        if number is not None:
            self._change_register("served = %s", self.collection(number))
        elif self._register() is not None:
            self._execute("delete from retrieval_indexes where name = %s", self.name)
            self._client.current.register = None

    def _write_notes(self, notes: Mapping[str, Any]) -> None:
        self._change_register("notes = notes || %s", Jsonb(dict(notes)))

    def _create_collection(self, generation: Generation) -> None:
        table = self._table(generation)
        if not generation.number:
            self._execute(REGISTER_TABLES.format(table=table))
            self._execute("insert into retrieval_indexes values (%s, null, '{}')", self.name)
            return
        widths = [stop - start for start, stop in generation.spans]
        most = MOST_NUMBERS if self._exact else MOST_IN_HALF_GRAPH
        if max(widths) > most:
            kind = "table" if self._exact else "graph; search exactly (?exact=true)"
            raise StoreError(
                f"{self.address}: pgvector keeps vectors of up to {most:,} numbers in a {kind}, and"
                f" these have {max(widths):,}."
            )
        vectors = ", ".join(f"v{space} vector({width})" for space, width in enumerate(widths))
        self._execute(TABLE.format(table=table, vectors=vectors))
        # A later generation is filled first: `switch`.
        if not self._exact and generation.number == 1:
            self._build_graphs(generation)

    def _build_graphs(self, generation: Generation) -> None:
        """Build the graph of each sub-space; until the end, searches use the earlier one."""
        self._execute("set local statement_timeout = 0")
        for space in range(len(generation.spans)):
            column, kind = _searched(generation, space)
            name = f"{self.collection(generation.number)}_v{space}"
            self._execute(
                f'create index "{name}_" on {self._table(generation)} using hnsw'
                f" (({column}) {kind}_l2_ops)"
            )
            self._execute(
                f'drop index if exists "{name}"; alter index "{name}_" rename to "{name}"'
            )

    def switch(self, generation: Generation) -> bool:
        """Serve another generation; see `Store`. Its graph is built before, while others write."""
        graph = f"{self.collection(generation.number)}_v0"
        lacks = self._execute("select to_regclass(quote_ident(%s)) is null", graph)
        if not self._exact and lacks == [(True,)]:
            with self._transaction(BUILD):
                self._build_graphs(generation)
        return super().switch(generation)

    def compact(self, report: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Build the served generation's graph anew, in one go; see `Store`. Writers wait for it."""
        if self._exact:
            super().compact(report)
        with self._writing():
            served = self._read_register().served
            self._build_graphs(served)
            count = self._count_rows(served, ())
        report(count, count)

    def _size(self, register: RegisterContent) -> int | None:
        ((count,),) = self._execute(
            "select sum(pg_total_relation_size(quote_ident(tablename)::regclass))::bigint from"
            " pg_tables where schemaname = current_schema() and starts_with(tablename, %s)",
            self._prefix,
        )
        return int(count)

    # Items

    def _write_bytes(self, pieces: Mapping[str, bytes]) -> None:
        self._copy(self._table(REGISTER), {"id": "text", "content": "bytea"}, pieces.items())

    def _read_bytes(self, names: Sequence[str]) -> dict[str, bytes]:
        text = f"select id, content from {self._table(REGISTER)} where id = any(%s)"
        return dict(self._execute(text, list(names)))

    def _copy(self, table: str, columns: Mapping[str, str], rows: Iterable[Sequence[Any]]) -> None:
        """Add rows to a table, whose columns have these types."""
        text = f"copy {table} ({', '.join(columns)}) from stdin (format binary)".encode()

        def copy(connection: Connection) -> None:
            with connection.cursor() as cursor, cursor.copy(text) as target:
                target.set_types(list(columns.values()))
                for row in rows:
                    target.write_row(row)

        self._run(copy)

    def _write_rows(self, generation: Generation, rows: Sequence[Row]) -> None:
        table = self._table(generation)
        ((last,),) = self._execute(f"select coalesce(max(number), 0) from {table}")
        self._delete_rows(generation, [row.id for row in rows])
        vectors = {f"v{space}": "vector" for space in range(len(generation.spans))}
        nothing: Sequence[Any] = [None] * len(vectors)
        values = []
        for number, row in enumerate(rows, last + 1):
            record, numbers = row.split(generation)
            # A migration keeps the numbers.
            record.setdefault("number", number)
            entries = [record.pop(name) for name in COLUMNS if name != "record"]
            entries[-2:] = [UUID(entries[-2]), Jsonb(entries[-1])]
            values.append([*entries, Jsonb(record), *(numbers or nothing)])
        self._copy(table, COLUMNS | vectors, values)

    def _delete_rows(self, generation: Generation, ids: Sequence[str]) -> None:
        self._execute(f"delete from {self._table(generation)} where id = any(%s)", list(ids))

    def _select(
        self, generation: Generation, conditions: Conditions, rest: str, columns: str = PLAIN
    ) -> list[Row]:
        """Return the rows that match, in the order and number that the statement's rest says."""
        where, values = all_of(conditions)
        text = f"select {columns} from {self._table(generation)} where {where} {rest}"
        return [_row(*row) for row in self._execute(text, *values)]

    def _read_rows(
        self, generation: Generation, ids: Sequence[str], arrays: bool = False
    ) -> list[Row]:
        chosen = [("id = any(%s)", (list(ids),))]
        return self._select(generation, chosen, "", WHOLE if arrays else PLAIN)

    def _read_page(
        self, generation: Generation, conditions: Conditions, after: str | None, limit: int
    ) -> list[Row]:
        # No id is empty.
        chosen = [("id > %s", (after or "",)), *conditions]
        return self._select(generation, chosen, f"order by id limit {limit}")

    def _count_rows(self, generation: Generation, conditions: Conditions) -> int:
        where, values = all_of(conditions)
        text = f"select count(*) from {self._table(generation)} where {where}"
        ((count,),) = self._execute(text, *values)
        return int(count)

    def newest(
        self, filter: Filter | None = None, *, before: int | None = None, limit: int = 1000
    ) -> list[tuple[int, Item]]:
        """Return a page of items, the newest first; see `Store`."""
        with self._reading():
            served = self._read_register().served
            chosen = self._conditions(filter)
            if before is not None:
                chosen.append(("number < %s", (before,)))
            page = self._select(served, chosen, f"order by number desc limit {limit}")
        if not page:
            self.refuse_impossible(filter)
        return [(row.record["number"], row.item()) for row in page]

    def _versions(self, generation: Generation) -> dict[str, str]:
        rows = self._execute(f"select id, version from {self._table(generation)}")
        return {id: version.hex for id, version in rows}

    def _nearest_ids(
        self,
        generation: Generation,
        space: int,
        queries: Floats,
        count: int,
        conditions: Conditions,
    ) -> list[list[str]]:
        where, values = all_of([("v0 is not null", ()), *conditions])
        column, kind = _searched(generation, space)
        text = (
            f"select id from {self._table(generation)} where {where}"
            f" order by {column} <-> %b::{kind} limit {count}"
        )

        def nearest(queries: Floats, settings: str) -> list[list[str]]:
            self._execute(settings)
            return [[id for (id,) in self._execute(text, *values, query)] for query in queries]

        cost = round(WORKERS_COST / queries.shape[1])
        exactly = f"set local enable_indexscan = off; set local parallel_setup_cost = {cost}"
        if self._exact:
            return nearest(queries, exactly)
        breadth = min(max(MIN_BREADTH, 2 * count), MAX_BREADTH)
        broadly = (
            f"set local hnsw.ef_search = {breadth}; set local hnsw.iterative_scan = 'relaxed_order'"
        )
        answers = nearest(queries, broadly)
        # The search of a graph may end before it has found as many that match a filter.
        short = [number for number, ids in enumerate(answers) if len(ids) < count]
        if short:
            for number, ids in zip(short, nearest(queries[short], exactly), strict=True):
                answers[number] = ids
        return answers

    # Filters

    def _join_conditions(self, joint: Joint, parts: Sequence[Part]) -> Part:
        text, values = _joined(f" {joint} ", parts)
        # What is unknown, because an item has no such value, is not true.
        return (f"({text}) is not true" if joint == "not" else f"({text})"), values

    def _condition(self, field: Field, op: str, values: Sequence[Any]) -> Part:
        if isinstance(field, str):
            if op == "exists":
                return f"{field} is not null", ()
            if op == "=":
                return f"{field} = any(%s)", (list(values),)
            return f"{field} {op} %s", tuple(values)
        if op == "=":
            # A list holds a value that equals one of its elements.
            objects = [_nested(field, entry) for value in values for entry in (value, [value])]
            return "metadata @> any(%s::jsonb[])", (list(map(to_json, objects)),)
        # An operand of text finds a name in an object, and nothing in a list.
        value = f"(metadata{' -> %s::text' * len(field)})"
        if op == "exists":
            return f"{value} is not null", field
        operand = to_json(values[0])
        if op == "!=":
            # A list is within another if each of its elements equals one of the other's.
            return f"not {value} <@ jsonb_build_array(%s::jsonb)", (*field, operand)
        # jsonpath compares text by code points, and nothing with a value of another type. It looks
        # into a list, but not into a list in a list. For a number it takes thrice as long as jsonb.
        path = f'$ ? (@.type() != "array" && @ {op} $bound)'
        text = (
            f"case when jsonb_typeof({value}) = 'number' and jsonb_typeof(%s::jsonb) = 'number'"
            f" then {value} {op} %s::jsonb"
            f" else jsonb_path_exists({value}, %s::jsonpath, %s::jsonb, true) end"
        )
        bound = f'{{"bound": {operand}}}'
        return text, (*field, operand, *field, operand, *field, path, bound)


def _nested(field: Sequence[str], value: Any) -> Any:
    """Return an object that has a value in a field."""
    for name in reversed(field):
        value = {name: value}
    return value


def all_of(conditions: Conditions) -> Part:
    """Return the condition that all conditions hold."""
    return _joined(" and ", [("true", ()), *conditions])


def _joined(joint: str, conditions: Sequence[Part]) -> Part:
    values = tuple(value for _, values in conditions for value in values)
    return joint.join(text for text, _ in conditions), values


def _searched(generation: Generation, space: int) -> tuple[str, str]:
    """Return what is compared with a query, which is what a graph has, and its type."""
    start, stop = generation.spans[space]
    if stop - start > MOST_IN_GRAPH:
        return f"v{space}::halfvec({stop - start})", "halfvec"
    return f"v{space}", "vector"


def _row(*values: Any) -> Row:
    *plain, vector = values
    entries = dict(zip(COLUMNS, plain, strict=True))
    record = entries.pop("record") | entries | {"version": entries["version"].hex}
    if vector is not None:
        vector = vector.to_numpy()
    return Row.joined(record, vector)
