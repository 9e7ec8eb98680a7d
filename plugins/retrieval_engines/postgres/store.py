"""A store in Postgres: a table per generation, and every call in one transaction."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, LiteralString, TypeAlias
from uuid import UUID

import psycopg
from psycopg.sql import SQL, Composed, Identifier, Literal
from psycopg.types.json import Jsonb
from retrieval.errors import DataError, StoreError
from retrieval.store.contract import stop_at
from retrieval.store.copy_store import PAGE
from retrieval.store.filters import Filter
from retrieval.store.filters.tree import Field, Joint
from retrieval.store.items import Floats, Generation, Item, usable
from retrieval.store.words import WITHOUT_WORDS

from retrieval_engines.engine_calls import Conditions, one_line
from retrieval_engines.postgres import words
from retrieval_engines.postgres.connections import Connection, Connections, to_json
from retrieval_engines.register import REGISTER, RegisterContent
from retrieval_engines.remote_store import RemoteStore
from retrieval_engines.rows import Row

# pgvector keeps longer vectors neither in a table, nor in a graph of float32 or float16.
MOST_NUMBERS = 16_000
MOST_IN_GRAPH = 2_000
MOST_IN_HALF_GRAPH = 4_000
# Larger than every number.
MOST_WRITES = (1 << 63) - 1
# Width of a graph's search; pgvector takes up to 1,000.
MIN_BREADTH = 100
MAX_BREADTH = 1_000
# Classes of SQLSTATE after which a retry may succeed: lost connections, conflicts, shortages,
# locks, shutdowns and timeouts. After 53100 (the disk is full) it does not.
PASSING = ("08", "40", "53", "55", "57")
FULL = "53100"
# A server that refuses a connection gives no SQLSTATE.
REFUSED = re.compile("authentication failed|no password|pg_hba.conf|does not exist|permission")
EXACTLY = SQL("set local enable_indexscan = off; set local parallel_setup_cost = {}")
BROADLY = SQL("set local hnsw.ef_search = {}; set local hnsw.iterative_scan = relaxed_order")
# Starting two workers takes the CPU time of comparing 70,000 vectors of 128 numbers. By default,
# Postgres starts them for so many vectors of any width; with this, for 300,000 of this width.
WORKERS_COST = 5000 * 128
OPS = {"<": SQL("<"), "<=": SQL("<="), ">": SQL(">"), ">=": SQL(">="), "!=": SQL("<>")}
JOINTS = {"and": SQL(" and "), "or": SQL(" or ")}
WRITE = SQL(
    # After the lock, each statement sees what earlier writers wrote.
    "begin isolation level read committed read write; {limits};"
    " select set_config('synchronous_commit', 'on', true)"
    " where current_setting('synchronous_commit') = 'off';"
    " select pg_advisory_xact_lock(hashtextextended({lock}, 0))"
)
READ = SQL("begin isolation level repeatable read read only; {limits}")
BUILD = SQL("begin isolation level read committed read write; {limits}")
LIMITS = SQL(
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
TABLE = (
    # An exact search takes as long as it takes to read the rows. It needs their first columns, and
    # vectors that stay in their row, not those that Postgres moves elsewhere.
    'create table {table} (id text collate "C" primary key, {vectors}, number bigint not null,'
    ' label text collate "C", version uuid not null, metadata jsonb not null, record jsonb'
    " not null) with (toast_tuple_target = 8160)",
    "create index on {table} using hash (label)",
    "create index on {table} (number)",
    "create index on {table} using gin (metadata jsonb_path_ops)",
)

GRAPH = (
    "create index {fresh} on {table} using hnsw (({column}) {operators})",
    "drop index if exists {name}",
    "alter index {fresh} rename to {name}",
)

Text: TypeAlias = SQL | Composed | Identifier | Literal
Part: TypeAlias = tuple[Text, tuple[Any, ...]]
"""A condition in SQL, and its parameters in order. The text has no value of a user."""


class PostgresStore(RemoteStore):
    """A store in Postgres."""

    engine = "Postgres"
    errors = (psycopg.Error,)
    capabilities = frozenset({"atomic", "filters", "ordered", "words"})

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
        # The transaction of a thread: its connection, and the index's row of `retrieval_indexes`.
        self._current = threading.local()

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
    def _transaction(self, opening: SQL) -> Iterator[Connection]:
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

    def _begin(self, opening: SQL) -> Connection:
        seconds = max(0.001, min(self.timeout, stop_at() - time.monotonic()))
        limits = LIMITS.format(Literal(round(1000 * seconds)))
        text = opening.format(limits=limits, lock=Literal(f"retrieval {self.name}"))
        select = SQL("select served, notes from retrieval_indexes where name = {}")
        connection: Connection = self._client.take(seconds)
        try:
            try:
                cursor = connection.execute(
                    SQL("{}; {}").format(text, select.format(Literal(self.name)))
                )
                while cursor.nextset():
                    pass
                self._current.register = cursor.fetchone()
            except psycopg.errors.UndefinedTable:
                # This database never had an index.
                connection.rollback()
                connection.execute(text)
                self._current.register = None
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

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._transaction(READ):
            yield

    def _may_retry(self) -> bool:
        return getattr(self._current, "connection", None) is None

    def _run(self, call: Callable[[Connection], Any]) -> Any:
        """Return what `call` returns, in a transaction of its own outside of one."""
        with self._transaction(READ) as connection:
            return self._request(call, connection)

    def _execute(self, text: LiteralString, *values: Any, **names: Text) -> list[tuple[Any, ...]]:
        """Return the rows of a statement; `names` are the parts of its text in braces."""

        def execute(connection: Connection) -> list[tuple[Any, ...]]:
            cursor = connection.execute(SQL(text).format(**names), values or None, binary=True)
            return cursor.fetchall() if cursor.description else []

        return list(self._run(execute))

    def _on(
        self, generation: Generation, text: LiteralString, *values: Any, **names: Text
    ) -> list[tuple[Any, ...]]:
        """Return the rows of a statement on the table of a generation; see `_execute`."""
        return self._execute(text, *values, table=self._table(generation), **names)

    # Tables

    def _table(self, generation: Generation) -> Identifier:
        return Identifier(self.collection(generation.number))

    def _collections(self) -> list[str]:
        rows = self._execute("select tablename from pg_tables where schemaname = current_schema()")
        return [name for (name,) in rows]

    def _delete_collection(self, name: str) -> None:
        self._execute("drop table if exists {table}", table=Identifier(name))

    # The register: a row of `retrieval_indexes`, which each transaction begins by reading.

    def _register(self) -> tuple[str | None, dict[str, Any]] | None:
        """Return the name of the table that is served, and the notes; None without an index."""
        with self._reading():
            register: tuple[str | None, dict[str, Any]] | None = self._current.register
            return register

    def _aliased_collection(self) -> str | None:
        register = self._register()
        return register and register[0]

    def _read_notes(self) -> dict[str, Any]:
        register = self._register()
        if register is None:
            raise self._lost_error()
        return dict(register[1])

    def _change_register(self, text: LiteralString, *values: Any) -> None:
        rows = self._execute(text + " returning served, notes", *values)
        self._current.register = next(iter(rows), None)

    def _move_alias(self, number: int | None) -> None:
        if number is None:
            if self._register() is not None:
                self._change_register("delete from retrieval_indexes where name = %s", self.name)
            return
        self._change_register(
            "update retrieval_indexes set served = %s where name = %s",
            self.collection(number),
            self.name,
        )

    def _write_notes(self, notes: Mapping[str, Any]) -> None:
        self._change_register(
            "update retrieval_indexes set notes = notes || %s where name = %s",
            Jsonb(dict(notes)),
            self.name,
        )

    def _create_collection(self, generation: Generation) -> None:
        if not generation.number:
            self._execute(
                'create table if not exists retrieval_indexes (name text collate "C" primary key,'
                " served text, notes jsonb not null)"
            )
            self._change_register(
                "insert into retrieval_indexes values (%s, null, '{{}}')", self.name
            )
            self._on(generation, "create table {table} (id text primary key, content bytea)")
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
        for text in TABLE:
            self._on(generation, text, vectors=SQL(", ").join(vectors))
        # A later generation is filled first: `switch`.
        if not self._exact and generation.number == 1:
            self._build_graphs(generation)

    def _build_graphs(self, generation: Generation) -> None:
        """Build the graph of each sub-space; until the end, searches use the earlier one."""
        self._execute("set local statement_timeout = 0")
        for space, (start, stop) in enumerate(generation.spans):
            operators = "vector_l2_ops"
            if stop - start > MOST_IN_GRAPH:
                operators = "halfvec_l2_ops"
            name = f"{self.collection(generation.number)}_v{space}"
            for text in GRAPH:
                self._on(
                    generation,
                    text,
                    name=Identifier(name),
                    fresh=Identifier(f"{name}_"),
                    column=_searched(generation, space)[0],
                    operators=SQL(operators),
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
        types = {"id": "text", "content": "bytea"}
        self._copy(self._table(REGISTER), types, pieces.items())

    def _read_bytes(self, names: Sequence[str]) -> dict[str, bytes]:
        text = "select id, content from {table} where id = any(%s)"
        return dict(self._on(REGISTER, text, list(names)))

    def _copy(
        self, table: Identifier, columns: Mapping[str, str], rows: Iterable[Sequence[Any]]
    ) -> None:
        """Add rows to a table, whose columns have these types."""
        text = SQL("copy {} ({}) from stdin (format binary)").format(table, _names(columns))

        def copy(connection: Connection) -> None:
            with connection.cursor() as cursor, cursor.copy(text) as target:
                target.set_types(list(columns.values()))
                for row in rows:
                    target.write_row(row)

        self._run(copy)

    def _write_rows(self, generation: Generation, rows: Sequence[Row]) -> None:
        ((last,),) = self._on(generation, "select coalesce(max(number), 0) from {table}")
        self._delete_rows(generation, [row.id for row in rows])
        vectors = {f"v{space}": "vector" for space in range(len(generation.spans))}
        nothing: Sequence[Any] = [None] * len(vectors)
        values = []
        for number, row in enumerate(rows, last + 1):
            record, numbers = row.split(generation)
            # A migration keeps the numbers.
            record.setdefault("number", number)
            own = [record.pop(name) for name in COLUMNS if name != "record"]
            own[-2:] = [UUID(own[-2]), Jsonb(own[-1])]
            values.append([*own, Jsonb(record), *(numbers or nothing)])
        self._copy(self._table(generation), COLUMNS | vectors, values)
        if self._has_words(generation):
            self._write_words(rows)

    def _delete_rows(self, generation: Generation, ids: Sequence[str]) -> None:
        self._on(generation, "delete from {table} where id = any(%s)", list(ids))
        if generation.number and self._has_words(generation):
            text: LiteralString = "delete from {words} where id = any(%s)"
            self._execute(text, list(ids), words=self._words)

    def _read_rows(
        self, generation: Generation, ids: Sequence[str], arrays: bool = False
    ) -> list[Row]:
        if not ids:
            return []
        columns = PLAIN
        if arrays:
            columns = WHOLE
        text = "select {columns} from {table} where id = any(%s)"
        return list(map(_row, self._on(generation, text, list(ids), columns=columns)))

    def _read_page(
        self, generation: Generation, conditions: Conditions, after: str | None, limit: int
    ) -> list[Row]:
        # No id is empty.
        return self._page(generation, conditions, ("id", "id > %s", after or ""), limit)

    def _page(
        self,
        generation: Generation,
        conditions: Conditions,
        order: tuple[LiteralString, LiteralString, Any],
        limit: int,
    ) -> list[Row]:
        where, values = _all_of(conditions)
        key, beyond, last = order
        rows = self._on(
            generation,
            "select {columns} from {table} where {beyond} and {where} order by {key} limit %s",
            last,
            *values,
            limit,
            columns=PLAIN,
            where=where,
            beyond=SQL(beyond),
            key=SQL(key),
        )
        return list(map(_row, rows))

    def _count_rows(self, generation: Generation, conditions: Conditions) -> int:
        where, values = _all_of(conditions)
        text: LiteralString = "select count(*) from {table} where {where}"
        ((count,),) = self._on(generation, text, *values, where=where)
        return int(count)

    def newest(
        self, filter: Filter | None = None, *, before: int | None = None, limit: int = 1000
    ) -> list[tuple[int, Item]]:
        """Return a page of items, the newest first; see `Store`."""
        with self._reading():
            served = self._read_register().served
            order = ("number desc", "number < %s", before or MOST_WRITES)
            page = self._page(served, self._conditions(filter), order, limit)
        if not page:
            self.refuse_impossible(filter)
        return [(row.record["number"], row.item()) for row in page]

    def _versions(self, generation: Generation) -> dict[str, str]:
        rows = self._on(generation, "select id, version from {table}")
        return {id: version.hex for id, version in rows}

    def _nearest_ids(
        self,
        generation: Generation,
        space: int,
        queries: Floats,
        count: int,
        conditions: Conditions,
    ) -> list[list[str]]:
        where, values = _all_of(conditions)
        text = SQL(
            "select id from {} where v0 is not null and {} order by {} <-> %b{} limit %s"
        ).format(self._table(generation), where, *_searched(generation, space))

        def nearest(setting: SQL | Composed, chosen: Floats) -> list[list[str]]:
            def search(connection: Connection) -> list[list[str]]:
                connection.execute(setting)
                # A query is sent before the answer to the last one has arrived.
                with connection.pipeline():
                    cursors = [
                        connection.execute(text, (*values, query, count), binary=True)
                        for query in chosen
                    ]
                    return [[id for (id,) in cursor] for cursor in cursors]

            return list(self._run(search))

        exactly = EXACTLY.format(Literal(round(WORKERS_COST / queries.shape[1])))
        if self._exact:
            return nearest(exactly, queries)
        breadth = min(max(MIN_BREADTH, 2 * count), MAX_BREADTH)
        answers = nearest(BROADLY.format(Literal(breadth)), queries)
        # The search of a graph may end before it has found as many that match a filter.
        short = [number for number, ids in enumerate(answers) if len(ids) < count]
        for number, ids in zip(short, nearest(exactly, queries[short]), strict=True):
            answers[number] = ids
        return answers

    # Words. The note "words" is the id up to which the items' words were read, or True for all.

    @property
    def _words(self) -> Identifier:
        return Identifier(f"{self._prefix}words")

    def _has_words(self, generation: Generation) -> bool:
        """Return whether a write to a generation changes words; all generations share them."""
        return generation.state == "served" and "words" in self._read_notes()

    def _write_words(self, rows: Sequence[Row]) -> None:
        lists = ((row.id, words.words_of(row)) for row in rows)
        self._copy(self._words, words.COLUMNS, lists)

    def keep_words(self, report: Callable[[int], object] = lambda count: None) -> None:
        """Keep the words of all items from now on; see `Store`."""
        while not self.keeps_words():
            with self._writing():
                served = self._read_register().served
                after = self._read_notes().get("words")
                if after is None:
                    for text in words.CREATE:
                        self._execute(text, words=self._words)
                rows = self._read_page(served, (), after, PAGE)
                # Those that were written since the first page have their words.
                known = set(
                    self._execute(
                        "select id from {words} where id = any(%s)",
                        [row.id for row in rows],
                        words=self._words,
                    )
                )
                self._write_words([row for row in rows if (row.id,) not in known])
                self._write_notes({"words": not rows or rows[-1].id})
            report(len(rows))

    def keeps_words(self) -> bool:
        """Return whether the index has the words of all items."""
        return self._read_notes().get("words") is True

    def search_words(
        self, text: str, count: int, *, filter: Filter | None = None, also: Sequence[str] = ()
    ) -> list[tuple[str, float]]:
        """Return the items that fit the words of a text best; see `Store`."""
        with self._reading():
            register = self._read_register()
            if register.notes.get("words") is not True:
                raise DataError(WITHOUT_WORDS)
            where, values = _all_of(self._conditions(filter))
            if filter is not None:
                where = SQL("id in (select id from {} where {})").format(
                    self._table(register.served), where
                )
            terms = words.terms_of(text)
            parameters = (terms, terms, *values, count, usable(also), count)
            return self._execute(words.SEARCH, *parameters, words=self._words, where=where)

    # Filters

    def _join_conditions(self, joint: Joint, parts: Sequence[Part]) -> Part:
        values = tuple(value for _, values in parts for value in values)
        texts = [text for text, _ in parts]
        if joint == "not":
            return SQL("(not {})").format(*texts), values
        return SQL("({})").format(JOINTS[joint].join(texts)), values

    def _condition(self, field: Field, op: str, values: Sequence[Any]) -> Part:
        """Return a condition that is true or false, but never null."""
        if isinstance(field, str):
            column = Identifier(field)
            if op == "exists":
                return SQL("({} is not null)").format(column), ()
            if op == "=":
                return SQL("({0} is not null and {0} = any(%s))").format(column), (list(values),)
            return SQL("coalesce({} {} %s, false)").format(column, OPS[op]), tuple(values)
        if op == "=":
            # A list holds a value that equals one of its elements.
            objects = [_nested(field, entry) for value in values for entry in (value, [value])]
            return SQL("(metadata @> any(%s::jsonb[]))"), (list(map(to_json, objects)),)
        # An operand of text finds a name in an object, and nothing in a list.
        value = SQL("(metadata{})").format(SQL("").join([SQL(" -> %s::text")] * len(field)))
        if op == "exists":
            return SQL("({} is not null)").format(value), field
        operand = to_json(values[0])
        if op == "!=":
            # A list is within another if each of its elements equals one of the other's.
            text = SQL("coalesce(not {} <@ jsonb_build_array(%s::jsonb), false)")
            return text.format(value), (*field, operand)
        # jsonpath compares text by code points, and nothing with a value of another type. It looks
        # into a list, but not into a list in a list.
        path = f'$ ? (@.type() != "array" && @ {op} $bound)'
        text = SQL("coalesce(jsonb_path_exists({}, %s::jsonpath, %s::jsonb, true), false)")
        return text.format(value), (*field, path, f'{{"bound": {operand}}}')


def _nested(field: Sequence[str], value: Any) -> Any:
    """Return an object that has a value in a field."""
    for name in reversed(field):
        value = {name: value}
    return value


def _names(names: Iterable[str]) -> Composed:
    return SQL(", ").join(map(Identifier, names))


# Most reads do not need arrays, which are long.
PLAIN = SQL("{}, record - 'arrays'").format(_names(name for name in COLUMNS if name != "record"))
WHOLE = _names((*COLUMNS, "v0"))


def _all_of(conditions: Conditions) -> Part:
    texts = [text for text, _ in conditions]
    values = tuple(value for _, values in conditions for value in values)
    return SQL(" and ").join([SQL("true"), *texts]), values


def _searched(generation: Generation, space: int) -> tuple[Composed, Composed]:
    """Return what is compared with a query, which is what a graph has, and the query's cast."""
    start, stop = generation.spans[space]
    half = SQL("{}").format(SQL(""))
    if stop - start > MOST_IN_GRAPH:
        half = SQL("::halfvec({})").format(Literal(stop - start))
    return SQL("{}{}").format(Identifier(f"v{space}"), half), half


def _row(values: Sequence[Any]) -> Row:
    own = dict(zip(COLUMNS, values, strict=False))
    record = own.pop("record") | own | {"version": own["version"].hex}
    vector = None
    # The item has arrays, and they were read.
    if len(values) > len(COLUMNS) and values[-1] is not None:
        vector = values[-1].to_numpy()
    return Row.joined(record, vector)
