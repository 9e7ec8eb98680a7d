"""An index's rows in Milvus: a collection for each table, and one more for each further vector of its rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from pymilvus import DataType, MilvusClient, MilvusException
from pymilvus.client.ts_utils import get_collection_ts
from retrieval import StoreError, stores

from retrieval_milvus.expressions import PARTITIONS, expression, partition_of, partitions
from retrieval_milvus.faults import hint, is_away, is_missing, sentence
from retrieval_milvus.rows import (
    KINDS,
    build,
    columns,
    is_built,
    level,
    padded,
    plain_row,
    row_of,
    schema,
    searching,
)

Floats = NDArray[np.float32]

# It writes a traceback for whatever a server refuses; all of that is raised as a sentence here.
logging.getLogger("pymilvus").setLevel(logging.CRITICAL)

HEAD, LEASE = "retrieval.head", "retrieval.lease"
SETTLED, PARTITION = "retrieval.settled", "retrieval.partition"
"""Properties of collections: a server's description of one is never an older one."""
_BYTES = 2 << 20  # of one request
_ROWS = 8000  # of one answer


class MilvusEngine(stores.Engine):
    """See above. Collections are called NAME and NAME__TABLE.

    Args:
        server: what `MilvusClient` takes: `uri`, `token`, `db_name`, and certificates.
        name: of the index.
        address: what sentences call it.
        timeout: seconds that one question may take.
        partition: see `Engine`; of an index that is made.
    """

    text_bytes = 65_000
    most_terms = 2000
    most_found = 16_384
    structures = tuple(KINDS)

    def __init__(
        self, server: Mapping[str, Any], name: str, address: str, timeout: float, partition: str = ""
    ) -> None:
        self._wanted = partition
        self._name, self._address, self._timeout, self._server = name, address, timeout, server
        self._indexes: dict[str, list[str]] = {}
        self._client = self._ask(MilvusClient, **server, dedicated=True)
        if server["db_name"] != "default":
            self._listed()  # a collection of a database that is not there is merely not found

    def _ask(self, question: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Ask, again after a while where nobody answers or the server is not ready: everything that is asked can be asked twice.

        Args:
            question: takes `timeout`, the seconds that it may take.
            given: its other arguments.
            named: those with names.
        """
        began, pause = time.monotonic(), 0.05
        while True:
            now = time.monotonic()
            if now > stores.stop_at():
                raise stores.TooSlow(f"Reading {self._address} takes too long. Ask for less.")
            try:
                left = max(0.5, min(self._timeout - (now - began), stores.stop_at() - now))
                return question(*given, **named, timeout=left)
            except (MilvusException, grpc.RpcError, ValueError) as fault:
                if not is_away(fault):
                    raise StoreError(f"{self._address}: Milvus refuses: {sentence(fault)}") from None
                if time.monotonic() - began + pause > self._timeout:
                    raise stores.StoreUnavailable(
                        f"Milvus does not answer for {self._address}: {sentence(fault)} Try again in a moment.{hint(fault, self._server)}"
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    def _collection(self, table: str, vector: int = 0) -> str:
        name = self._name if table == stores.RECORDS else f"{self._name}__{table}"
        return f"{name}__{vector}" if vector else name

    def _collections(self, table: str) -> list[str]:
        """Return the collections of a table: the first has everything, each further one the numbers and conditions of its vector."""
        first = self._collection(table)
        return sorted(name for name in self._listed() if name == first or (name.startswith(f"{first}__") and name[len(first) + 2 :].isdigit()))  # fmt: skip

    def _listed(self) -> list[str]:
        return list(self._ask(self._client.list_collections))

    def _properties(self, name: str) -> dict[str, str] | None:
        """Return the properties of a collection; None where there is none."""

        def ask(timeout: float) -> dict[str, str] | None:
            try:
                return dict(self._client.describe_collection(name, timeout=timeout).get("properties", {}))
            except MilvusException as fault:
                if is_missing(fault):
                    return None
                raise

        found: dict[str, str] | None = self._ask(ask)
        return found

    def _set(self, name: str, properties: Mapping[str, str]) -> None:
        self._ask(self._client.alter_collection_properties, name, dict(properties))

    # The whole

    def head(self) -> str | None:
        """Return a property of the first collection; see `Engine`."""
        found = self._properties(self._name) or {}
        if (head := found.get(HEAD)) is not None:
            self.partition = found.get(PARTITION, "")
            if self._wanted not in ("", self.partition):
                kept = f"by '{self.partition}'" if self.partition else "all together"
                raise StoreError(
                    f"{self._address} keeps its items {kept}: a partition is chosen when an index is made."
                )
        return head

    def keep(self, head: str) -> None:
        """Replace that property; see `Engine`.

        An etcd of one member answers before a change is on the disk, and takes no other one until it is ("Durability API guarantee broken in single
        node cluster", an issue of etcd's). So another one follows.
        """
        parted = {PARTITION: self.partition} if self.partition else {}
        self._set(self._name, {HEAD: head, **parted})
        self._set(self._name, {SETTLED: str(time.time_ns())})

    def make(self) -> None:
        """Make the collection of items, which is loaded while the first generation's is made; see `Engine`."""
        self.drop()
        self.partition = self._wanted
        self._make(stores.RECORDS, {"v0": 2}, "flat", {})

    def make_table(
        self, table: str, widths: Mapping[str, int], structure: str, options: Mapping[str, Any]
    ) -> None:
        """Make collections; see `Engine`."""
        self.drop_table(table)
        self._loaded(self._make(table, widths, structure, options))

    def _make(
        self, table: str, widths: Mapping[str, int], structure: str, options: Mapping[str, Any]
    ) -> list[str]:
        """Make collections, which the server loads from now on; return their names."""
        names = []
        for at, width in enumerate(widths.values()):
            ordered = table == stores.RECORDS
            made = schema(width, self.most_terms, ordered, bool(self.partition))
            name = self._collection(table, at)
            self._ask(self._client.create_collection, name, schema=made, num_shards=1)
            for part in range(PARTITIONS if self.partition and not ordered else 0):
                self._ask(self._client.create_partition, name, partition_of(f"{part:x}"))
            self._index(name, structure, options, wait=False)
            names.append(name)
        return names

    def _index(self, name: str, structure: str, options: Mapping[str, Any], *, wait: bool) -> None:
        params = self._client.prepare_index_params()
        params.add_index(
            "vector",
            index_name="vector",
            index_type=KINDS[structure],
            metric_type="L2",
            params=build(structure, options),
        )
        self._ask(self._client.create_index, name, params, sync=wait)
        self._ask(self._client.load_collection, name, _async=True)

    def restructure(
        self, table: str, widths: Mapping[str, int], structure: str, options: Mapping[str, Any]
    ) -> None:
        """Build another index; the table cannot be searched meanwhile, and questions wait. See `Engine`.

        Only what lies in files of the server's has an index, so it writes its latest rows to one first. Where only parameters of the search are
        others, nothing is built.
        """
        names = self._collections(table)
        for name in names:
            found = self._ask(self._client.describe_index, name, "vector")
            if not is_built(found, structure, options):
                self._ask(self._client.flush, name)
                self._ask(self._client.release_collection, name)
                self._ask(self._client.drop_index, name, "vector")
                self._index(name, structure, options, wait=True)
        self._loaded(names)

    def _loaded(self, names: Sequence[str]) -> None:
        """Wait until collections are loaded."""
        for name in names:
            self._ask(self._client.load_collection, name)

    def drop_table(self, table: str) -> None:
        """Delete collections; see `Engine`."""
        for name in self._collections(table):
            self._ask(self._client.drop_collection, name)

    def drop(self) -> None:
        """Delete all collections, that with the head first; see `Engine`."""
        listed = self._listed()
        for name in [self._name, *(one for one in listed if one.startswith(f"{self._name}__g"))]:
            if name in listed:
                self._ask(self._client.drop_collection, name)

    # Rows

    def _seen(self, name: str) -> int:
        """Return the server's time of what this process wrote last to a collection."""
        return int(
            get_collection_ts(name, self._client._get_connection().server_address, self._server["db_name"])
            or 0
        )

    def _write(self, table: str, rows: Sequence[stores.Row]) -> int:
        seen = 0
        for at, name in enumerate([self._collection(table), *self._further(table)]):
            apart: dict[str, list[dict[str, Any]]] = {}
            for row in rows:
                into = partition_of(row.part) if self.partition and table != stores.RECORDS else ""
                apart.setdefault(into, []).append(plain_row(row, table, at, bool(self.partition)))
            for into, plain in apart.items():
                self._ask(self._client.upsert, name, plain, partition_name=into)
            seen = max(seen, self._seen(name))
        return seen

    def _further(self, table: str) -> list[str]:
        if table == stores.RECORDS:
            return []
        if table not in self._indexes:
            self._indexes[table] = self._collections(table)[1:]
        return self._indexes[table]

    def put(self, table: str, rows: Sequence[stores.Row]) -> int:
        """Write rows; see `Engine`."""
        seen, size, waiting = 0, 0, []
        for row in rows:
            waiting.append(row)
            size += len(row.body) + 30 * len(row.terms) + 4 * sum(map(len, row.vectors.values())) + 500
            if size > _BYTES:
                seen, size, waiting = max(seen, self._write(table, waiting)), 0, []
        return max(seen, self._write(table, waiting)) if waiting else seen

    def end(self, table: str, where: stores.Condition, moment: int, *, seen: int) -> int:
        """Write rows once more: one column alone cannot be changed. See `Engine`."""
        rows = self.fetch(table, where, seen=seen, vectors=True)
        return self.put(table, [replace(row, died=moment) for row in rows])

    def erase(self, table: str, where: stores.Condition, *, seen: int) -> int:
        """Delete rows; see `Engine`."""
        written = 0
        for name in [self._collection(table), *self._further(table)]:
            key = "id" if table == stores.RECORDS else "number"
            for rows in self._pages(name, key, expression(where), [key], seen):
                keys = [row[key] for row in rows]
                self._ask(self._client.delete, name, ids=keys)
                written = max(written, self._seen(name))
        return written

    def _query(
        self, name: str, where: str, columns: list[str], seen: int, limit: int | None
    ) -> list[dict[str, Any]]:
        more = {"limit": limit} if limit is not None else {}
        return list(self._ask(self._client.query, name, filter=where, output_fields=columns, **more, **level(seen)))  # fmt: skip

    def _pages(
        self, name: str, key: str, where: str, columns: list[str], seen: int
    ) -> Iterator[list[dict[str, Any]]]:
        """Give rows in the order of their primary keys, which is how Milvus gives the first ones."""
        behind, limit = "", _ROWS if "body" not in columns else 1000
        while True:
            found = self._query(name, f"({where}){behind}", columns, seen, limit)
            if found:
                yield found
            if len(found) < limit:
                return
            last = max(row[key] for row in found)
            behind = f' and {key} > "{last}"' if isinstance(last, str) else f" and {key} > {last}"

    def fetch(
        self, table: str, where: stores.Condition, *, seen: int, vectors: bool = False
    ) -> list[stores.Row]:
        """Return rows; see `Engine`."""
        key = "id" if table == stores.RECORDS else "number"
        names = columns(bool(self.partition)) + ["vector"] * vectors + ["id"] * (key == "id")
        pages = self._pages(self._collection(table), key, expression(where), names, seen)
        found = list(chain.from_iterable(pages))
        further: list[dict[int, Any]] = []
        if vectors:
            for name in self._further(table):
                pages = self._pages(name, "number", expression(where), ["number", "vector"], seen)
                further.append({row["number"]: row["vector"] for row in chain.from_iterable(pages)})
        return [row_of(row, [row.get("vector"), *(one[row["number"]] for one in further)]) for row in found]

    def page(
        self, table: str, where: stores.Condition, after: str, limit: int, *, seen: int
    ) -> list[stores.Row]:
        """Return rows in the order of their keys; see `Engine`."""
        behind = (
            f' and id > "{after}/"' if after else ""
        )  # "/" comes behind the "." that follows a key, and before digits
        names, found = [*columns(bool(self.partition)), "id"], list[stores.Row]()
        while len(found) < limit:
            some = min(limit - len(found), 1000)
            chosen = f"({expression(where)}){behind}"
            rows = self._query(self._collection(table), chosen, names, seen, some)
            found += [row_of(row, []) for row in sorted(rows, key=lambda row: str(row["id"]))]
            if len(rows) < some:
                break
            behind = f' and id > "{found[-1].key}/"'
        return found

    def count(self, table: str, where: stores.Condition, *, seen: int) -> int:
        """Return how many rows there are; see `Engine`."""
        (found,) = self._query(self._collection(table), expression(where), ["count(*)"], seen, None)
        return int(found["count(*)"])

    def nearest(
        self,
        table: str,
        vector: str,
        queries: Floats,
        count: int,
        where: stores.Condition,
        *,
        seen: int,
        options: Mapping[str, Any],
    ) -> list[list[int]]:
        """Return the nearest rows; see `Engine`."""
        name, chosen = self._collection(table, int(vector[1:])), expression(where)
        asked = [padded(query) for query in queries]
        search = {"metric_type": "L2", "params": searching(options, count)}
        found = self._ask(
            self._client.search, name, asked, filter=chosen, limit=count, output_fields=["number"],
            search_params=search, anns_field="vector", partition_names=partitions(where, self.partition), **level(seen),
        )  # fmt: skip
        return [[int(one["entity"]["number"]) for one in hits] for hits in found]

    # One writer: whoever made the collection

    def claim(self, text: str) -> bool:
        """Make a collection whose description says who, so that one process can; see `Engine`."""
        name = self._collection("lock")
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False, description=text)
        schema.add_field("number", DataType.INT64, is_primary=True)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=2)

        def ask(timeout: float) -> bool:
            try:
                self._client.create_collection(
                    name, schema=schema, num_shards=1, properties={LEASE: text}, timeout=timeout
                )
                return True
            except MilvusException as fault:
                if "different parameters" in str(fault) or "already exist" in str(fault):
                    return False
                raise

        return bool(self._ask(ask))

    def holder(self) -> str | None:
        """Return what that collection says; see `Engine`."""
        found = self._properties(self._collection("lock"))
        return None if found is None else found.get(LEASE, "{}")

    def renew(self, text: str) -> None:
        """Say who writes; see `Engine`."""
        self._set(self._collection("lock"), {LEASE: text})

    def release(self) -> None:
        """Delete that collection; see `Engine`."""
        self._ask(self._client.drop_collection, self._collection("lock"))

    def close(self) -> None:
        """Close the connection; see `Engine`."""
        self._client.close()
