"""A store in Milvus: one row per item and sub-space; all of the item but the vector is JSON."""

from __future__ import annotations

import json
import logging
import random
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import grpc
import numpy as np
from pymilvus import DataType, MilvusClient, MilvusException
from pymilvus.client.ts_utils import get_collection_ts
from retrieval.errors import DataError, StoreError
from retrieval.store.contract import StoreUnavailable, stop_at
from retrieval.store.items import VECTOR, Floats, Generation

from retrieval_engines.engine_calls import EXACT, Conditions, one_line
from retrieval_engines.register import REGISTER, RegisterContent
from retrieval_engines.remote_store import RemoteStore
from retrieval_engines.rows import Row

# pymilvus logs a traceback for each refused request; this module raises a sentence instead.
logging.getLogger("pymilvus").setLevel(logging.CRITICAL)

# Names of a collection's properties.
NOTE = "retrieval.note."
WRITTEN = "retrieval.written"
SETTLED = "retrieval.settled"
# Parameters of the HNSW graph.
GRAPH = {"M": 16, "efConstruction": 200}
# Bounds of `ef`, the breadth of a search in the graph.
MIN_BREADTH = 64
MAX_BREADTH = 32_768
# Size of a request that writes rows.
REQUEST_BYTES = 2 << 20
# Maximum number of keys per request.
KEYS = 500
# Two digits per byte of an id, and the number of a sub-space.
KEY_BYTES = 8100
TEXT_BYTES = 65_000
REFUSALS = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)
# Milvus's error codes for a server that is unreachable or not ready.
AWAY = frozenset((2, 3, 5, 101, 102, 103, 104, 106, 500, 501, 502, 503, 901))
AWAY_WORDS = re.compile(
    "unavailable|fail connecting|not ready|not loaded|no available|timeout|timed out|deadline"
    "|unhealthy|initializing|not serving|channel not|rate limit|retry",
    re.IGNORECASE,
)
BAD_TLS = re.compile("WRONG_VERSION_NUMBER|CERTIFICATE_VERIFY_FAILED|security handshaker|Hostname")
# Rows of the register that name who changes items now, and how long they count.
CLAIM = "changing "
CLAIM_SECONDS = 60.0
# Note with the name of the last claim.
CHANGED = "changed"
PLAIN = re.compile(r"[\w .,:;/@#+-]*")
"""Text and names that need no escaping in an expression; filters with any other are refused."""


class MilvusStore(RemoteStore):
    """A store in Milvus; `server` has the arguments of `MilvusClient`.

    The notes are properties of the collection of the register, because properties are never stale.
    """

    engine = "Milvus"
    errors = (MilvusException, grpc.RpcError, ValueError)
    capabilities = frozenset({"ordered"})
    # Milvus refuses a search for more.
    most_found = 16_384

    def __init__(
        self, server: Mapping[str, Any], address: str, name: str, timeout: float, exact: bool = True
    ) -> None:
        super().__init__(None, address, name, timeout, exact)
        self._server = server
        # Name and properties of the served collection.
        self._properties: tuple[str, Mapping[str, str]] = ("", {})
        self._client = self._request(MilvusClient, **server, dedicated=True)
        self._server_address = self._client._get_connection().server_address
        if server["db_name"] != "default":
            # Without the database, this raises the error that every later request would.
            self._collections()

    def _time_limit(self, seconds: float) -> dict[str, Any]:
        return {"timeout": seconds}

    def _explain_error(self, error: Exception) -> tuple[bool, str]:
        rpc: Any = error
        if not isinstance(error, grpc.RpcError):
            rpc = error.__cause__
        code: Any = getattr(error, "code", None)
        message = getattr(error, "message", None) or error
        if isinstance(rpc, grpc.RpcError):
            code = rpc.code()
            message = rpc.details()
        text = one_line(message) or type(error).__name__
        if BAD_TLS.search(text):
            return False, (
                f"{text}. Name the PEM file of the authority that signed the server's certificate"
                " with ?tls=true&ca=FILE. If the server does not use TLS, remove '?tls=true'."
            )
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return False, (
                f"{text}. The environment variable RETRIEVAL_MILVUS_TOKEN must hold user:password,"
                " or an API key."
            )
        if isinstance(code, grpc.StatusCode):
            away = code not in REFUSALS
        elif isinstance(error, ValueError):
            away = "closed channel" in text
        else:
            away = code in AWAY or bool(AWAY_WORDS.search(str(error)))
        # A server that speaks TLS closes plain connections.
        if away and "Socket closed" in text and "secure" not in self._server:
            return True, f"{text}. If the server speaks TLS, write ?tls=true."
        return away, f"{text}."

    # Collections

    def _collections(self) -> list[str]:
        return list(self._request(self._client.list_collections))

    def _delete_collection(self, name: str) -> None:
        self._request(self._client.drop_collection, name)

    def _describe(self, name: str) -> dict[str, Any] | None:
        def ask(timeout: float) -> dict[str, Any]:
            try:
                return dict(self._client.describe_collection(name, timeout=timeout))
            except MilvusException as error:
                if error.code == 100 or "not found" in str(error) or "not exist" in str(error):
                    return {}
                raise

        return self._request(ask) or None

    def _aliased_collection(self) -> str | None:
        described = self._describe(self.name)
        if described is None:
            return None
        collection = str(described["collection_name"])
        if collection == self.name:
            raise StoreError(f"{self.address}: the server has another collection of this name.")
        self._properties = (collection, described.get("properties", {}))
        return collection

    def _move_alias(self, number: int | None) -> None:
        if number is None:
            if self._aliased_collection() is not None:
                self._request(self._client.drop_alias, self.name)
            return
        move = self._client.alter_alias
        if self._aliased_collection() is None:
            move = self._client.create_alias
        self._request(move, self.collection(number), self.name)
        # The second change of properties makes the alias survive a power cut, too.
        self._set_properties(self.collection(0), {})

    def _create_collection(self, generation: Generation) -> None:
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("key", DataType.VARCHAR, is_primary=True, max_length=KEY_BYTES)
        schema.add_field("space", DataType.INT64)
        schema.add_field("record", DataType.JSON)
        schema.add_field("arrays", DataType.VARCHAR, max_length=TEXT_BYTES)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=_dimensions(generation))
        name = self.collection(generation.number)
        self._delete_collections(name)
        self._request(self._client.create_collection, name, schema=schema, num_shards=1)
        kind: dict[str, Any] = {"index_type": "FLAT"}
        # Nobody searches the register, so it needs no graph.
        if generation.number and not self._exact:
            kind = {"index_type": "HNSW", "params": GRAPH}
        params = self._client.prepare_index_params()
        params.add_index("vector", index_name="vector", metric_type="L2", **kind)
        self._request(self._client.create_index, name, params, sync=False)
        self._request(self._client.load_collection, name)

    def _set_properties(self, name: str, properties: Mapping[str, str]) -> None:
        """Set properties of a collection so that they survive a power cut.

        A single etcd server, where Milvus keeps properties, confirms a change before it is on disk,
        but accepts the next change only after that ("Durability API guarantee broken in single node
        cluster"). So each change is followed by a second one.
        """
        for change in (dict(properties), {SETTLED: str(time.time_ns())}):
            if change:
                self._request(self._client.alter_collection_properties, name, change)

    # The register

    def _write_notes(self, notes: Mapping[str, Any]) -> None:
        properties = {NOTE + name: json.dumps(note) for name, note in notes.items()}
        self._set_properties(self.collection(0), properties)

    def _read_notes(self) -> dict[str, Any]:
        register = self._describe(self.collection(0))
        if register is None:
            raise self._lost_error()
        return {
            name.removeprefix(NOTE): json.loads(text)
            for name, text in register.get("properties", {}).items()
            if name.startswith(NOTE)
        }

    # Items

    def _check_sizes(self, rows: Sequence[Row]) -> None:
        for row in rows:
            size = len(json.dumps(row.record, ensure_ascii=False).encode())
            if size > TEXT_BYTES:
                raise DataError(
                    f"The item {row.id!r} has {size:,} bytes of id, label, metadata and"
                    f" paths; Milvus stores at most {TEXT_BYTES:,} bytes."
                )

    def _write_rows(self, generation: Generation, rows: Sequence[Row]) -> None:
        name = self.collection(generation.number)
        dimensions = _dimensions(generation)
        for batch in Row.batches(rows, generation, REQUEST_BYTES, 4):
            plain: list[dict[str, Any]] = []
            for record, vectors in batch:
                plain += _plain_rows(record, vectors, dimensions)
            self._request(self._client.upsert, name, plain)
        self._publish_write(generation, name)

    def _delete_rows(self, generation: Generation, ids: Sequence[str]) -> None:
        name = self.collection(generation.number)
        for chunk in _chunks(ids):
            keys = list(map(_key, chunk))
            for space in range(1, len(generation.spans)):
                keys += [f"{_key(id)}.{space}" for id in chunk]
            self._request(self._client.delete, name, ids=keys)
        # Milvus returns no time for a deletion, so write a row after it, whose time is returned.
        register = self.collection(0)
        self._request(self._client.upsert, register, _plain_rows({"id": "now"}, [], 2))
        self._publish_write(generation, register)

    def _change(self, ids: Sequence[str], changes: Mapping[str, Any], bundle: str) -> int:
        with self._claim():
            return super()._change(ids, changes, bundle)

    @contextmanager
    def _claim(self) -> Iterator[None]:
        """Let no other process change items, because Milvus cannot compare and write.

        Who claims writes a row before reading those of all rivals. So of two who claim at once, at
        least one sees the other; whoever sees another withdraws.
        """
        end = self._patience()
        while True:
            name = f"{CLAIM}{uuid.uuid4().hex}"
            claim = Row({"id": name, "seconds": time.time()}, {})
            self._write_rows(REGISTER, [claim])
            if self._claims() == {name}:
                try:
                    yield
                finally:
                    # Whoever reads no claim afterwards reads that there was one.
                    self._write_notes({CHANGED: name})
                    self._delete_rows(REGISTER, [name])
                return
            self._delete_rows(REGISTER, [name])
            self._wait_for_claims(end)

    def _claims(self) -> set[str]:
        """Return the claims of all who change items now."""
        rows = self._read_page(REGISTER, (), CLAIM, KEYS)
        return {
            row.id
            for row in rows
            if row.id.startswith(CLAIM)
            # Whoever died cannot withdraw.
            and abs(time.time() - row.record["seconds"]) < CLAIM_SECONDS
        }

    def _patience(self) -> float:
        """Return the time at which a call that waits for others gives up."""
        return min(time.monotonic() + self.timeout, stop_at())

    def _wait_for_claims(self, end: float) -> None:
        if time.monotonic() > end:
            raise StoreUnavailable(
                f"Another process changes items of {self.address}, or died while it did. Milvus"
                f" cannot keep two changes at once. Try again in {CLAIM_SECONDS:.0f} seconds."
            )
        time.sleep(random.uniform(0.02, 0.3))

    def _exchange_rows(
        self, generation: Generation, rows: Sequence[Row], known: Mapping[str, Row]
    ) -> set[str]:
        # The root of a changed row is the version of the row that was added.
        changed = []
        for row in rows:
            root = known[row.id].record.get("root", known[row.id].version)
            changed.append(Row({**row.record, "root": root}, row.arrays))
        return super()._exchange_rows(generation, changed, known)

    def _undone(
        self, register: RegisterContent, written: Mapping[str, str | None]
    ) -> dict[str, Row]:
        """Return what changes wrote over rows; see `RemoteStore`.

        A change that read an item before it was written, and writes it later, had claimed the index
        by then: either its claim is still there, or the register says that there was one.
        """
        claims = self._claims()
        end = self._patience()
        while claims and claims & self._claims():
            self._wait_for_claims(end)
        latest = self._read_register()
        if not claims and latest.notes.get(CHANGED) == register.notes.get(CHANGED):
            return {}
        rows = self._read_rows(register.served, list(written))
        return {
            row.id: row for row in rows if row.record.get("root") not in (None, written[row.id])
        }

    def _publish_write(self, generation: Generation, last: str) -> None:
        """Store the time of the last write to collection `last`; readers wait for that write."""
        if generation.number:
            name = self.collection(generation.number)
            self._set_properties(name, {WRITTEN: str(self._last_write(last))})

    def _last_write(self, name: str) -> int:
        """Return the time of the last write of this process to a collection, or 0."""
        return int(get_collection_ts(name, self._server_address, self._server["db_name"]) or 0)

    def _consistency(self, name: str) -> dict[str, Any]:
        """Return how consistent a read must be.

        A read waits for the last write that is known, of any process. A strong read, which is
        slower, waits for all writes until now.
        """
        served, properties = self._properties
        if served == name:
            written = max(int(properties.get(WRITTEN, 0)), self._last_write(name))
            if written:
                return {"consistency_level": "Customized", "guarantee_timestamp": written}
        return {"consistency_level": "Strong"}

    def _query(
        self, generation: Generation, filter: str, fields: list[str], **options: Any
    ) -> list[dict[str, Any]]:
        name = self.collection(generation.number)
        options |= self._consistency(name)
        return list(
            self._request(self._client.query, name, filter=filter, output_fields=fields, **options)
        )

    def _read_rows(
        self, generation: Generation, ids: Sequence[str], arrays: bool = False
    ) -> list[Row]:
        fields = ["record"]
        if arrays:
            fields += ["space", "arrays", "vector"]
        rows: list[Row] = []
        for chunk in _chunks(ids):
            keys = json.dumps(list(map(_key, chunk)))
            for row in self._query(generation, f"key in {keys}", fields):
                rows.append(_row(row, generation))
        return rows

    def _read_page(
        self, generation: Generation, conditions: Conditions, after: str | None, limit: int
    ) -> list[Row]:
        # Each item has one such row: that of its first sub-space, or its only one.
        chosen = ["space <= 0", *conditions]
        if after is not None:
            chosen.append(f'key > "{_key(after)}"')
        # Milvus selects the rows with the lowest keys, but promises no order of them.
        rows = self._query(generation, _join(chosen, "and"), ["key", "record"], limit=limit)
        rows.sort(key=itemgetter("key"))
        return [_row(row, generation) for row in rows]

    def _count_rows(self, generation: Generation, conditions: Conditions) -> int:
        chosen = _join(["space <= 0", *conditions], "and")
        (answer,) = self._query(generation, chosen, ["count(*)"])
        return int(answer["count(*)"])

    def _nearest_ids(
        self,
        generation: Generation,
        space: int,
        queries: Floats,
        count: int,
        conditions: Conditions,
    ) -> list[list[str]]:
        name = self.collection(generation.number)
        # Exact collections ignore the breadth.
        breadth = min(max(MIN_BREADTH, 2 * count), MAX_BREADTH)
        # All sub-spaces are in one column. Zeros at the end change no distance.
        padding = _dimensions(generation) - queries.shape[1]
        answers = self._request(
            self._client.search,
            name,
            list(np.pad(queries, ((0, 0), (0, padding)))),
            filter=_join([f"space == {space}", *conditions], "and"),
            limit=count,
            output_fields=["key"],
            search_params={"metric_type": "L2", "params": {"ef": breadth}},
            anns_field="vector",
            **self._consistency(name),
        )
        return [[_id(hit["entity"]["key"]) for hit in hits] for hits in answers]

    def _join_conditions(self, joint: str, parts: Sequence[str]) -> str:
        if joint == "not":
            return f"(not ({parts[0]}))"
        return _join(parts, joint)

    def _condition(
        self, field: str | tuple[str, ...], op: str, values: Sequence[Any]
    ) -> str | None:
        """Return an expression; it contains text of a user only if that needs no escaping."""
        if op in ("!=", "exists"):
            return None
        if field == "id":
            return _condition_on_id(op, values)
        names = ["label"]
        may_be_list = False
        if isinstance(field, tuple):
            names = ["metadata", *field]
            may_be_list = field[0] in self.lists
        literals = [_literal(value) for value in values]
        if None in literals or not all(map(PLAIN.fullmatch, names)):
            return None
        if op == "=":
            op = "=="
        elif may_be_list or isinstance(values[0], str):
            return None
        path = "record" + "".join(f'["{name}"]' for name in names)
        parts = [f"{path} {op} {literal}" for literal in literals]
        if may_be_list:
            parts += [f"json_contains({path}, {literal})" for literal in literals]
        return _join(parts, "or")


def _condition_on_id(op: str, values: Sequence[Any]) -> str | None:
    keys = [_key(value) for value in values if isinstance(value, str)]
    if op != "=":
        return f'key {op} "{keys[0]}"' if keys else None
    # No row has such a sub-space, so this expression matches nothing.
    return f"key in {json.dumps(keys)}" if keys else "space > 1000000"


def _literal(value: Any) -> str | None:
    """Return a value as a literal of Milvus, or None if Milvus might read it differently."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"' if PLAIN.fullmatch(value) else None
    if value is None or abs(value) >= EXACT or "e" in repr(value):
        return None
    return repr(value)


def _key(text: str) -> str:
    """Return text as hexadecimal digits of UTF-8, which sort like its code points."""
    return text.encode().hex()


def _id(key: str) -> str:
    return bytes.fromhex(key.partition(".")[0]).decode()


def _chunks(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (names[start : start + KEYS] for start in range(0, len(names), KEYS))


def _join(parts: Sequence[str], joint: str) -> str:
    """Join expressions as a balanced tree, because the server's parser is recursive."""
    parts = list(parts)
    while len(parts) > 1:
        pairs = [parts[start : start + 2] for start in range(0, len(parts), 2)]
        parts = [f"({f' {joint} '.join(pair)})" for pair in pairs]
    return parts[0]


def _dimensions(generation: Generation) -> int:
    # Milvus takes no vectors of one number.
    return max(2, *(stop - start for start, stop in generation.spans))


def _plain_rows(
    record: dict[str, Any], vectors: Sequence[Floats], dimensions: int
) -> list[dict[str, Any]]:
    """Return one row per sub-space; without vectors, one row that searches do not return."""
    key = _key(record["id"])
    row = {
        "key": key,
        "space": -1,
        "arrays": json.dumps(record.pop("arrays", {})),
        "record": json.dumps(record, ensure_ascii=False),
        "vector": np.zeros(dimensions, np.float32),
    }
    rows = []
    for space, vector in enumerate(vectors):
        padded = np.pad(vector, (0, dimensions - len(vector)))
        rows.append(row | {"space": space, "vector": padded})
        # The arrays are in the first row.
        if space:
            rows[-1] |= {"key": f"{key}.{space}", "arrays": "{}"}
    return rows or [row]


def _row(row: Mapping[str, Any], generation: Generation) -> Row:
    record = row["record"]
    if isinstance(record, str | bytes):
        record = json.loads(record)
    vector = None
    # The item has arrays, and they were requested.
    if row.get("space", -1) >= 0:
        record = record | {"arrays": json.loads(row["arrays"])}
        vector = row["vector"][: generation.widths[VECTOR]]
    return Row.joined(record, vector)
