"""A store in Postgres: a table per generation, and every call in one transaction."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import psycopg
from psycopg.sql import SQL, Composed, Identifier, Literal
from psycopg.types.json import Jsonb
from retrieval.errors import StoreError
from retrieval.store.contract import StoreUnavailable, stop_at
from retrieval.store.filters.tree import Field, Joint
from retrieval.store.items import VECTOR, Floats, Generation

from retrieval_engines.postgres.connections import Connection, Connections, to_json
from retrieval_engines.register import RegisterContent
from retrieval_engines.remote_store import Conditions, RemoteStore, one_line
from retrieval_engines.rows import PIECE_BYTES, Row

INDEXES = Identifier("retrieval_indexes")
"""Table of the indexes of a schema, and of the table that each serves."""
# pgvector keeps longer vectors in no table, and in no graph as float32 or as float16.
MOST_NUMBERS = 16_000
MOST_IN_GRAPH = 2_000
MOST_IN_HALF_GRAPH = 4_000
# pgvector allows 1 to 1,000.
MIN_BREADTH = 100
MAX_BREADTH = 1_000
READ_AT_ONCE = 64  # pieces
# Classes of SQLSTATE after which a retry may succeed: lost connections, conflicts, shortages,
# shutdowns and timeouts.
PASSING = ("08", "40", "53", "55", "57")
REFUSED = re.compile("authentication failed|no password|pg_hba.conf|does not exist|permission")
OPS = {"<": SQL("<"), "<=": SQL("<="), ">": SQL(">"), ">=": SQL(">="), "!=": SQL("<>")}

Text: TypeAlias = SQL | Composed
Part: TypeAlias = tuple[Text, tuple[Any, ...]]
"""A condition in SQL, with its parameters in order. No value of a user is part of the text."""


class PostgresStore(RemoteStore):
    """A store in Postgres."""

    engine = "Postgres"
    errors = (psycopg.Error,)
    capabilities = frozenset({"atomic", "filters", "ordered"})

    def __init__(
        self,
        connections: Connections,
        address: str,
        name: str,
        timeout: float = 30.0,
        exact: bool = True,
    ) -> None:
        super().__init__(address, name, timeout)
        self._client = connections
        self._exact = exact
        # The connection of this thread's transaction.
        self._current = threading.local()

    def _explain_error(self, error: Exception) -> tuple[bool, str]:
        text = f"{one_line(error) or type(error).__name__}."
        state = getattr(error, "sqlstate", None)
        if state is None:
            if "authentication failed" in text or "no password" in text:
                text += " Set PGUSER and PGPASSWORD, or write them into ~/.pgpass."
            return not REFUSED.search(text), text
        return state.startswith(PASSING) and state != "53100", text

    # Transactions

    @contextmanager
    def _transaction(self, *opening: Text) -> Iterator[Connection]:
        """Run the statements inside as one transaction, or as a part of that of this thread."""
        connection: Connection | None = getattr(self._current, "connection", None)
        if connection is not None:
            yield connection
            return
        connection = self._request(self._begin, opening)
        self._current.connection = connection
        try:
            yield connection
            self._request(connection.commit)
        finally:
            self._current.connection = None
            self._client.give_back(connection)

    def _begin(self, opening: Sequence[Text]) -> Connection:
        seconds = max(0.001, min(self.timeout, stop_at() - time.monotonic()))
        connection: Connection = self._client.take(seconds)
        limits = SQL(
            "set local statement_timeout = {}; set local idle_in_transaction_session_timeout = 0;"
            " set local jit = off"
        ).format(Literal(round(1000 * seconds)))
        try:
            connection.execute(SQL("; ").join([opening[0], limits, *opening[1:]]))
        except BaseException as error:
            self._client.give_back(connection)
            # The others are most likely broken, too.
            if isinstance(error, psycopg.OperationalError):
                self._client.close_idle()
            raise
        return connection

    @contextmanager
    def _writing(self) -> Iterator[None]:
        # A lock of the index's name excludes other writers until the transaction ends. After it,
        # each statement sees what they wrote.
        lock = SQL("select pg_advisory_xact_lock(hashtextextended({}, 0))").format(
            Literal(f"retrieval {self.name}")
        )
        durable = SQL(
            "select set_config('synchronous_commit', 'on', true)"
            " where current_setting('synchronous_commit') = 'off'"
        )
        begin = SQL("begin isolation level read committed read write")
        with self._turn, self._transaction(begin, durable, lock):
            yield

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._transaction(SQL("begin isolation level repeatable read read only")):
            yield

    def _may_retry(self) -> bool:
        return getattr(self._current, "connection", None) is None

    def _execute(self, text: Text, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement, which is a transaction of its own outside of one."""
        with self._transaction(SQL("begin")) as connection:

            def run() -> list[tuple[Any, ...]]:
                cursor = connection.execute(text, values or None, binary=True)
                return cursor.fetchall() if cursor.description else []

            return list(self._request(run))

    def _table(self, generation: Generation) -> Identifier:
        return Identifier(self.collection(generation.number))

    @property
    def _pieces(self) -> Identifier:
        return Identifier(f"{self._prefix}pieces")

    # Tables

    def _collections(self) -> list[str]:
        tables = SQL("select tablename from pg_tables where schemaname = current_schema()")
        return [name for (name,) in self._execute(tables)]

    def _delete_collection(self, name: str) -> None:
        self._execute(SQL("drop table if exists {}").format(Identifier(name)))

    def _aliased_collection(self) -> str | None:
        ((exists,),) = self._execute(SQL("select to_regclass('retrieval_indexes') is not null"))
        if not exists:
            return None
        for (name,) in self._execute(
            SQL("select served from {} where name = %s").format(INDEXES), self.name
        ):
            return str(name)
        return None

    def _move_alias(self, number: int | None) -> None:
        if number is not None:
            columns = SQL('(name text collate "C" primary key, served text not null)')
            self._execute(SQL("create table if not exists {} {}").format(INDEXES, columns))
            insert = SQL(
                "insert into {} values (%s, %s) on conflict (name) do update set served ="
                " excluded.served"
            )
            self._execute(insert.format(INDEXES), self.name, self.collection(number))
        elif self._aliased_collection() is not None:
            self._execute(SQL("delete from {} where name = %s").format(INDEXES), self.name)

    def _create_collection(self, generation: Generation) -> None:
        if not generation.number:
            notes = "create table {} (name text primary key, note jsonb not null)"
            self._execute(SQL(notes).format(self._table(generation)))
            pieces = (
                "create table {} (owner text, number int, content bytea not null,"
                " primary key (owner, number))"
            )
            self._execute(SQL(pieces).format(self._pieces))
            return
        widths = [stop - start for start, stop in generation.spans]
        most = MOST_NUMBERS if self._exact else MOST_IN_HALF_GRAPH
        if max(widths) > most:
            kind = "table" if self._exact else "graph; search exactly (?exact=true)"
            raise StoreError(
                f"{self.address}: pgvector keeps vectors of up to {most:,} numbers in a {kind}, and"
                f" these have {max(widths):,}."
            )
        vectors = [
            SQL("{} vector({})").format(Identifier(f"v{space}"), Literal(width))
            for space, width in enumerate(widths)
        ]
        columns = SQL(
            'id text collate "C" primary key, label text collate "C", metadata jsonb not null,'
            " record jsonb not null, version text not null, arrays bytea, {}"
        ).format(SQL(", ").join(vectors))
        # Vectors that stay in their row are found faster than those that Postgres moves elsewhere.
        self._execute(
            SQL("create table {} ({}) with (toast_tuple_target = 8160)").format(
                self._table(generation), columns
            )
        )
        for space in range(0 if self._exact else len(widths)):
            kind = "halfvec" if widths[space] > MOST_IN_GRAPH else "vector"
            self._execute(
                SQL("create index on {} using hnsw (({}) {})").format(
                    self._table(generation),
                    _searched(generation, space),
                    SQL(f"{kind}_l2_ops"),
                )
            )

    def _size(self, register: RegisterContent) -> int | None:
        size = SQL(
            "select sum(pg_total_relation_size(quote_ident(tablename)::regclass))::bigint from"
            " pg_tables where schemaname = current_schema() and starts_with(tablename, %s)"
        )
        ((count,),) = self._execute(size, self._prefix)
        return int(count)

    # The register: table 0 has the notes of the index.

    def _write_notes(self, notes: Mapping[str, Any]) -> None:
        insert = SQL(
            "insert into {} select * from unnest(%s::text[], %s::jsonb[]) on conflict (name)"
            " do update set note = excluded.note"
        ).format(Identifier(self.collection(0)))
        self._execute(insert, list(notes), list(map(to_json, notes.values())))

    def _read_notes(self) -> dict[str, Any]:
        try:
            return dict(
                self._execute(SQL("select * from {}").format(Identifier(self.collection(0))))
            )
        except StoreUnavailable:
            raise
        except StoreError:
            if self.collection(0) not in self._collections():
                raise self._lost_error() from None
            raise

    def _write_pieces(self, owner: str, content: Iterable[bytes]) -> int:
        pieces = (
            part[start : start + PIECE_BYTES]
            for part in content
            for start in range(0, len(part), PIECE_BYTES)
        )
        rows = ((owner, number, piece) for number, piece in enumerate(pieces))
        return self._copy(
            self._pieces, {"owner": "text", "number": "int4", "content": "bytea"}, rows
        )

    def _read_pieces(self, owner: str, count: int) -> Iterator[bytes]:
        select = SQL(
            "select content from {} where owner = %s and number >= %s order by number limit %s"
        ).format(self._pieces)
        for start in range(0, count, READ_AT_ONCE):
            for (content,) in self._execute(select, owner, start, READ_AT_ONCE):
                yield content

    def _delete_pieces(self, owner: str, count: int) -> None:
        if count:
            self._execute(SQL("delete from {} where owner = %s").format(self._pieces), owner)

    # Items

    def _copy(
        self, table: Identifier, columns: Mapping[str, str], rows: Iterable[Sequence[Any]]
    ) -> int:
        """Add rows to a table, whose columns have these types; return the number of rows."""
        statement = SQL("copy {} ({}) from stdin (format binary)").format(
            table, SQL(", ").join(map(Identifier, columns))
        )
        with self._transaction(SQL("begin")) as connection:

            def run() -> int:
                count = 0
                with connection.cursor() as cursor, cursor.copy(statement) as copy:
                    copy.set_types(list(columns.values()))
                    for row in rows:
                        copy.write_row(row)
                        count += 1
                return count

            return int(self._request(run))

    def _write_rows(self, generation: Generation, rows: Sequence[Row]) -> None:
        self._delete_rows(generation, [row.id for row in rows])
        columns = {
            "id": "text",
            "label": "text",
            "metadata": "jsonb",
            "record": "jsonb",
            "version": "text",
            "arrays": "bytea",
            **{f"v{space}": "vector" for space in range(len(generation.spans))},
        }
        self._copy(self._table(generation), columns, (_stored(row, generation) for row in rows))

    def _delete_rows(self, generation: Generation, ids: Sequence[str]) -> None:
        delete = SQL("delete from {} where id = any(%s)").format(self._table(generation))
        if ids:
            self._execute(delete, list(ids))

    def _read_rows(
        self, generation: Generation, ids: Sequence[str], arrays: bool = False
    ) -> list[Row]:
        if not ids:
            return []
        columns = ["id", "label", "metadata", "record", "version"]
        if arrays:
            columns += ["arrays", "v0"]
        select = SQL("select {} from {} where id = any(%s)").format(
            SQL(", ").join(map(Identifier, columns)), self._table(generation)
        )
        return [_row(row, generation) for row in self._execute(select, list(ids))]

    def _read_page(
        self, generation: Generation, conditions: Conditions, after: str | None, limit: int
    ) -> list[Row]:
        chosen = list(conditions)
        if after is not None:
            chosen.append((SQL("id > %s"), (after,)))
        where, values = _all_of(chosen)
        select = SQL(
            "select id, label, metadata, record, version from {} where {} order by id limit %s"
        ).format(self._table(generation), where)
        return [_row(row, generation) for row in self._execute(select, *values, limit)]

    def _count_rows(self, generation: Generation, conditions: Conditions) -> int:
        where, values = _all_of(conditions)
        select = SQL("select count(*) from {} where {}").format(self._table(generation), where)
        ((count,),) = self._execute(select, *values)
        return int(count)

    def _differences(
        self, generation: Generation, served: Generation
    ) -> tuple[list[str], list[str]]:
        tables = (self._table(served), self._table(generation))
        lacking = SQL(
            "select id from {} as served where not exists"
            " (select from {} as own where own.id = served.id and own.version = served.version)"
            " order by id"
        )
        deleted = SQL(
            "select id from {} as own where not exists"
            " (select from {} as served where served.id = own.id)"
        )
        return (
            [id for (id,) in self._execute(lacking.format(*tables))],
            [id for (id,) in self._execute(deleted.format(*reversed(tables)))],
        )

    def _nearest_ids(
        self,
        generation: Generation,
        space: int,
        queries: Floats,
        count: int,
        conditions: Conditions,
    ) -> list[list[str]]:
        where, values = _all_of(conditions)
        column = _searched(generation, space)
        distance = SQL("{} <-> %b").format(column)
        if generation.spans[space][1] - generation.spans[space][0] > MOST_IN_GRAPH:
            distance = SQL("{} <-> %b::halfvec").format(column)
        select = SQL("select id from {} where v0 is not null and {} order by {} limit %s").format(
            self._table(generation), where, distance
        )

        def nearest(setting: Text, chosen: Floats) -> list[list[str]]:
            with self._transaction(SQL("begin")) as connection:

                def run() -> list[list[str]]:
                    connection.execute(setting)
                    # Answers are on their way while the next query is sent.
                    with connection.pipeline():
                        cursors = [
                            connection.execute(select, (*values, query, count), binary=True)
                            for query in chosen
                        ]
                        return [[id for (id,) in cursor] for cursor in cursors]

                return list(self._request(run))

        exactly = SQL("set local enable_indexscan = off")
        if self._exact:
            return nearest(exactly, queries)
        breadth = min(max(MIN_BREADTH, 2 * count), MAX_BREADTH)
        setting = SQL(
            "set local hnsw.ef_search = {}; set local hnsw.iterative_scan = relaxed_order"
        )
        answers = nearest(setting.format(Literal(breadth)), queries)
        # A graph may end before it has found as many as match a filter.
        short = [number for number, ids in enumerate(answers) if len(ids) < count]
        for number, ids in zip(short, nearest(exactly, queries[short]), strict=True):
            answers[number] = ids
        return answers

    # Filters

    def _join_conditions(self, joint: Joint, parts: Sequence[Part]) -> Part:
        values = tuple(value for _, values in parts for value in values)
        texts = [text for text, _ in parts]
        if joint == "not":
            return SQL("(not {})").format(*texts), values
        return SQL("({})").format(SQL(f" {joint} ").join(texts)), values

    def _condition(self, field: Field, op: str, values: Sequence[Any]) -> Part:
        """Return a condition that is true or false, but never null."""
        if isinstance(field, str):
            column = Identifier(field)
            if op == "exists":
                return SQL("({} is not null)").format(column), ()
            if op == "=":
                return SQL("({0} is not null and {0} = any(%s))").format(column), (list(values),)
            compared = SQL("({0} is not null and {0} {1} %s)")
            return compared.format(column, OPS[op]), (values[0],)
        # An operand of text finds a name in an object, and nothing in a list.
        value = SQL("(metadata{})").format(SQL("").join([SQL(" -> %s::text")] * len(field)))
        if op == "exists":
            return SQL("({} is not null)").format(value), field
        texts = list(map(to_json, values))
        if op == "!=":
            # A list is within another if each of its elements equals one of the other's.
            differs = SQL("({0} is not null and not {0} <@ jsonb_build_array(%s::jsonb))")
            return differs.format(value), (*field, *field, *texts)
        # A value that is no list becomes a list of this value.
        elements = SQL(
            "(case jsonb_typeof({0}) when 'array' then {0} else jsonb_build_array({0}) end)"
        ).format(value)
        if op == "=":
            equal = SQL(
                "({} is not null and exists"
                " (select from jsonb_array_elements({}) where value = any(%s::jsonb[])))"
            )
            return equal.format(value, elements), (*field * 4, texts)
        # jsonpath compares text by code points, and nothing with a value of another type.
        path = f"strict $[*] ? (@ {op} $value)"
        compared = SQL(
            "jsonb_path_exists({}, %s::jsonpath, jsonb_build_object('value', %s::jsonb), true)"
        )
        return compared.format(elements), (*field * 3, path, *texts)


def _all_of(conditions: Conditions) -> Part:
    texts = [text for text, _ in conditions]
    values = tuple(value for _, values in conditions for value in values)
    return SQL(" and ").join([SQL("true"), *texts]), values


def _searched(generation: Generation, space: int) -> Text:
    """Return the expression whose distance to a query is computed; a graph has the same."""
    start, stop = generation.spans[space]
    column = Identifier(f"v{space}")
    if stop - start > MOST_IN_GRAPH:
        return SQL("{}::halfvec({})").format(column, Literal(stop - start))
    return SQL("{}").format(column)


def _names(generation: Generation) -> list[str]:
    """Return the names of the arrays in the column `arrays`; a single sub-space is the vector."""
    return [name for name in generation.widths if name != VECTOR or len(generation.spans) > 1]


def _stored(row: Row, generation: Generation) -> list[Any]:
    """Return the values of a row's columns."""
    record = {name: entry for name, entry in row.record.items() if name not in SEPARATE}
    values = [row.id, row.record["label"], Jsonb(row.record["metadata"]), Jsonb(record)]
    if not row.arrays:
        return [*values, row.version, None, *[None] * len(generation.spans)]
    arrays = b"".join(row.arrays[name].astype("<f4").tobytes() for name in _names(generation))
    vector = row.arrays[VECTOR]
    return [*values, row.version, arrays, *(vector[start:stop] for start, stop in generation.spans)]


SEPARATE = frozenset({"id", "label", "metadata", "version"})
"""Entries of a row's record that have columns of their own."""


def _row(values: Sequence[Any], generation: Generation) -> Row:
    id, label, metadata, record, version, *rest = values
    record = {"id": id, "label": label, "metadata": metadata, "version": version, **record}
    arrays: dict[str, Floats] = {}
    # The item has arrays, and they were read.
    if rest and rest[0] is not None:
        start = 0
        for name in _names(generation):
            width = generation.widths[name]
            arrays[name] = np.frombuffer(rest[0], "<f4", width, start)
            start += 4 * width
        if VECTOR not in arrays:
            arrays[VECTOR] = rest[1].to_numpy()
    return Row(record, arrays)
