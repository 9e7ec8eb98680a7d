"""Connections to Postgres: opened when needed, kept for the next call, and limited in number."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import Any, TypeAlias

import psycopg
from pgvector.psycopg import register_vector
from psycopg.types import TypeInfo
from psycopg.types.json import set_json_dumps, set_json_loads
from retrieval.errors import StoreError
from retrieval.store.contract import StoreUnavailable
from retrieval.store.filters.tree import is_long

from retrieval_engines.engine_calls import EXACT

Connection: TypeAlias = "psycopg.Connection[tuple[Any, ...]]"


class Connections:
    """A limited number of connections, each used by one call at a time.

    psycopg's own pool connects in the background and logs why it cannot; here the call that needs
    a connection gets the reason as its error.

    Args:
        most: largest number of connections at a time.
        parameters: libpq's parameters of a connection; None leaves one to the environment.

    Attributes:
        current: the open transaction of each thread: its `connection`, and the row of the index in
            `retrieval_indexes` as `register`.
    """

    def __init__(self, most: int, **parameters: Any) -> None:
        self._most = most
        self._parameters = parameters
        self.current = threading.local()
        self._free = threading.BoundedSemaphore(most)
        # Python's lists need no lock for `append` and `pop`.
        self._idle: list[Connection] = []
        self._closed = False

    def take(self, seconds: float) -> Connection:
        """Return a connection; wait up to `seconds` for one that is in use.

        Raises:
            StoreUnavailable: all connections stay in use.
            StoreError: the database lacks pgvector, or its text is not UTF-8.
            psycopg.Error: the server refuses a connection, or it does not answer.
        """
        if not self._free.acquire(timeout=seconds):
            raise StoreUnavailable(
                f"All {self._most} connections to Postgres are in use for {seconds:.0f} seconds."
                " Try again, or allow more with ?connections=NUMBER."
            )
        try:
            with suppress(IndexError):
                return self._idle.pop()
            return self._connect()
        except BaseException:
            self._free.release()
            raise

    def _connect(self) -> Connection:
        connection: Connection = psycopg.connect(
            **self._parameters,
            autocommit=True,
            application_name="retrieval",
            client_encoding="utf8",
            # Values decide the plan, and PgBouncer need not know of prepared statements.
            prepare_threshold=None,
        )
        lacking = None
        if connection.info.parameter_status("server_encoding") != "UTF8":
            lacking = "does not hold text as UTF-8. Create one with the encoding UTF8."
        elif TypeInfo.fetch(connection, "vector") is None:
            lacking = "lacks pgvector. Let its administrator run: CREATE EXTENSION vector;"
        if lacking is not None:
            error = StoreError(f"The database {connection.info.dbname} {lacking}")
            connection.close()
            raise error
        set_json_dumps(to_json, connection)
        set_json_loads(from_json, connection)
        register_vector(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """End the transaction of a connection, and keep the connection unless it is broken."""
        with suppress(psycopg.Error):
            connection.rollback()
        if self._closed:
            connection.close()
        if not connection.closed:
            self._idle.append(connection)
        self._free.release()

    def close_idle(self) -> None:
        """Close the connections that are not in use."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def close(self) -> None:
        """Close all connections; those in use are closed when they are given back."""
        self._closed = True
        self.close_idle()


def to_json(value: Any) -> str:
    """Return JSON whose numbers jsonb, which keeps decimal digits, compares like float64."""
    text = json.dumps(value, ensure_ascii=False)
    # Larger floats have an exponent, and fewer digits than the whole numbers that they are.
    if "e+" in text:
        text = json.dumps(json.loads(text, parse_float=_whole), ensure_ascii=False)
    return text


def from_json(text: str | bytes) -> Any:
    """Return the value of `to_json`'s text."""
    return json.loads(text, parse_int=_limited)


def _whole(text: str) -> int | float:
    number = float(text)
    if abs(number) >= EXACT:
        return int(number)
    return number


def _limited(text: str) -> int | float:
    number = int(text)
    # Metadata have no such integers.
    if is_long(number):
        return float(number)
    return number
