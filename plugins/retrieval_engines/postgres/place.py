"""The place of an index in a Postgres database."""

from __future__ import annotations

import math

from retrieval.errors import StoreError
from retrieval.plugin import stores

from retrieval_engines.remote_place import RemotePlace, check_name, need_client
from retrieval_engines.remote_store import RemoteStore

# "__" separates the parts of a table's name, which has at most 63 bytes.
_NAME = r"(?=.{1,40}$)[A-Za-z_](?:_?[A-Za-z0-9])*_?"


class PostgresPlace(RemotePlace):
    """A database of a Postgres server with the extension pgvector.

    User, password and TLS come from libpq's environment variables, such as PGUSER, PGPASSWORD and
    PGSSLMODE, or from its file ~/.pgpass.

    Args:
        address: `postgresql://host:5432/database/photos`. Without a host, port or database, libpq
            uses PGHOST, PGPORT or PGDATABASE.
        timeout: time limit of one request to the server, including retries, in seconds.
        exact: whether to search exactly. Otherwise a generation is created with an HNSW graph,
            whose search is faster but may miss items. The graph takes vectors of up to 4,000
            numbers.
        connections: most connections of this process to the server.
    """

    def __init__(
        self,
        address: stores.Address,
        timeout: float = 30.0,
        exact: bool = True,
        connections: int = 8,
    ) -> None:
        super().__init__(address, timeout, exact)
        check_name(address, _NAME, "40 characters, which are letters, digits and single '_'")
        if address.path.strip("/").count("/") > 1:
            raise StoreError(
                f"{address} has too many parts. Write {address.scheme}://HOST/DATABASE/NAME."
            )
        if not 1 <= connections <= 1000:
            raise StoreError(f"{address}: write connections=NUMBER with 1 to 1,000 connections.")
        self._connections = connections

    def store(self) -> RemoteStore:
        """Return a store, which connects with its first request; see `RemotePlace`."""
        for module in ("psycopg", "pgvector"):
            need_client(module, "postgres")
        from retrieval_engines.postgres.connections import Connections
        from retrieval_engines.postgres.words import PostgresWords

        address = self.address
        connections = Connections(
            self._connections,
            host=address.host,
            port=address.port,
            dbname=address.path.strip("/").rpartition("/")[0] or None,
            connect_timeout=max(2, math.ceil(self._timeout)),
            # A machine that vanished answers nothing.
            tcp_user_timeout=math.ceil(1000 * self._timeout),
        )
        return PostgresWords(connections, str(address), address.name, self._timeout, self._exact)
