"""A store in Milvus: one row per item and sub-space; all of the item but the vector is JSON."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from pymilvus import DataType, MilvusClient, MilvusException
from pymilvus.client.ts_utils import get_collection_ts
from retrieval.errors import DataError, StoreError
from retrieval.plugin import stores

from retrieval_engines.remote import RemoteStore
from retrieval_engines.rows import Row

Floats = NDArray[np.float32]
Generation = stores.Generation

Conditions = Sequence[str]

# pymilvus logs a traceback for each refused request; this module raises a sentence instead.
logging.getLogger("pymilvus").setLevel(logging.CRITICAL)

NOTE, WRITTEN, SETTLED = "retrieval.note.", "retrieval.written", "retrieval.settled"
GRAPH = {"M": 16, "efConstruction": 200}  # parameters of the HNSW graph
BREADTH, MOST_BREADTH = 64, 32_768  # minimum and maximum `ef` of a search in the graph
REQUEST_BYTES = 2 << 20  # size of a request that writes rows
KEYS = 500  # maximum number of keys per request
KEY_BYTES, TEXT_BYTES = 8100, 65_000  # maximum sizes; a key has two digits per byte of an id
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
EXACT = 1 << 53  # float64 represents smaller integers exactly
PLAIN = re.compile(r"[\w .,:;/@#+-]*")
"""Text and names that need no escaping in an expression; filters with any other are refused."""


class MilvusStore(RemoteStore):
    """A store in Milvus; `server` has the arguments of `MilvusClient`.

    The notes are properties of the collection of the register, because properties are never stale.
    """

    engine, errors = "Milvus", (MilvusException, grpc.RpcError, ValueError)
    capabilities = frozenset({"ordered"})
    most_found = 16_384

    def __init__(
        self, server: Mapping[str, Any], address: str, name: str, timeout: float, exact: bool = True
    ) -> None:
        super().__init__(address, name)
        self._server, self.timeout, self._exact = server, timeout, exact
        self._properties: tuple[str, Mapping[str, str]] = ("", {})  # of the served collection
        self._client = self._ask(MilvusClient, **server, dedicated=True)
        self._server_address = self._client._get_connection().server_address
        if server["db_name"] != "default":
            self._collections()  # raises if the database does not exist

    def _limit(self, seconds: float) -> dict[str, Any]:
        return {"timeout": seconds}

    def _fault(self, error: Exception) -> tuple[bool, str]:
        rpc: Any = error if isinstance(error, grpc.RpcError) else error.__cause__
        code: Any = getattr(error, "code", None)
        message = getattr(error, "message", None) or error
        if isinstance(rpc, grpc.RpcError):
            code, message = rpc.code(), rpc.details()
        text = " ".join(str(message).split())[:300].rstrip(".") or type(error).__name__
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
        advice = " Try again in a moment." if away else ""
        if away and "Socket closed" in text and "secure" not in self._server:
            advice += " If the server speaks TLS, write ?tls=true."  # it closes plain connections
        return away, f"{text}.{advice}"

    # Collections

    def _collections(self) -> list[str]:
        return list(self._ask(self._client.list_collections))

    def _described(self, name: str) -> dict[str, Any] | None:
        def ask(timeout: float) -> dict[str, Any]:
            try:
                return dict(self._client.describe_collection(name, timeout=timeout))
            except MilvusException as error:
                if error.code == 100 or "not found" in str(error) or "not exist" in str(error):
                    return {}
                raise

        return self._ask(ask) or None

    def _alias(self) -> str | None:
        described = self._described(self.name)
        if described is None:
            return None
        collection = str(described["collection_name"])
        if collection == self.name:
            raise StoreError(f"{self.address}: the server has another collection of this name.")
        self._properties = (collection, described.get("properties", {}))
        return collection

    def _point(self, number: int | None) -> None:
        if number is None:
            if self._alias() is not None:
                self._ask(self._client.drop_alias, self.name)
            return
        move = self._client.create_alias if self._alias() is None else self._client.alter_alias
        self._ask(move, self.collection(number), self.name)
        self._set(self.collection(0), {})

    def _make(self, generation: Generation) -> None:
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("key", DataType.VARCHAR, is_primary=True, max_length=KEY_BYTES)
        schema.add_field("space", DataType.INT64)
        schema.add_field("record", DataType.JSON)
        schema.add_field("arrays", DataType.VARCHAR, max_length=TEXT_BYTES)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=_dimensions(generation))
        name = self.collection(generation.number)
        self._remove(name)
        self._ask(self._client.create_collection, name, schema=schema, num_shards=1)
        params = self._client.prepare_index_params()
        kind, built = ("FLAT", {}) if self._exact or not generation.number else ("HNSW", GRAPH)
        params.add_index(
            "vector", index_name="vector", index_type=kind, metric_type="L2", params=built
        )
        self._ask(self._client.create_index, name, params, sync=False)
        self._ask(self._client.load_collection, name)

    def _remove(self, prefix: str) -> None:
        for name in self._collections():
            if name.startswith(prefix):
                self._ask(self._client.drop_collection, name)

    def _set(self, name: str, properties: Mapping[str, str]) -> None:
        """Set properties of a collection so that they survive a power cut.

        A single etcd server, where Milvus keeps properties, confirms a change before it is on disk,
        but accepts the next change only after that ("Durability API guarantee broken in single node
        cluster"). So each change is followed by a second one.
        """
        for change in (dict(properties), {SETTLED: str(time.time_ns())}):
            if change:
                self._ask(self._client.alter_collection_properties, name, change)

    # The register

    def _note(self, notes: Mapping[str, Any]) -> None:
        self._set(
            self.collection(0), {NOTE + name: json.dumps(note) for name, note in notes.items()}
        )

    def _notes(self) -> dict[str, Any]:
        register = self._described(self.collection(0))
        if register is None:
            raise self._lost()
        properties = register.get("properties", {}).items()
        return {
            key[len(NOTE) :]: json.loads(text) for key, text in properties if key.startswith(NOTE)
        }

    # Items

    def _fit(self, rows: Sequence[Row]) -> None:
        for row in rows:
            size = len(json.dumps(row.record, ensure_ascii=False).encode())
            if size > TEXT_BYTES:
                raise DataError(
                    f"The item {row.record['id']!r} has {size:,} bytes of id, label, metadata and"
                    f" paths; Milvus stores at most {TEXT_BYTES:,} bytes."
                )

    def _put(self, generation: Generation, rows: Sequence[Row]) -> None:
        name, dimensions = self.collection(generation.number), _dimensions(generation)
        for batch in Row.batches(rows, generation, REQUEST_BYTES, 4):
            plain = [row for item in batch for row in _plain_rows(*item, dimensions)]
            self._ask(self._client.upsert, name, plain)
        self._wrote(generation, name)

    def _erase(self, generation: Generation, ids: Sequence[str]) -> None:
        spaces = range(1, len(generation.spans))
        for some in _chunks(ids):
            keys = [key for id in some for key in (_key(id), *(f"{_key(id)}.{n}" for n in spaces))]
            self._ask(self._client.delete, self.collection(generation.number), ids=keys)
        # Milvus returns no time for a deletion, so write a row after it, whose time is returned.
        self._ask(self._client.upsert, self.collection(0), list(_plain_rows({"id": "now"}, [], 2)))
        self._wrote(generation, self.collection(0))

    def _wrote(self, generation: Generation, last: str) -> None:
        """Store the time of the last write to collection `last`; readers wait for that write."""
        if generation.number:
            self._set(self.collection(generation.number), {WRITTEN: str(self._own(last))})

    def _own(self, name: str) -> int:
        """Return the time of the last write of this process to a collection, or 0."""
        return int(get_collection_ts(name, self._server_address, self._server["db_name"]) or 0)

    def _level(self, name: str) -> dict[str, Any]:
        """Return the consistency of a read: after the last known write, or strong, the slower."""
        served, properties = self._properties
        seen = max(int(properties.get(WRITTEN, 0)), self._own(name)) if served == name else 0
        if not seen:
            return {"consistency_level": "Strong"}
        return {"consistency_level": "Customized", "guarantee_timestamp": seen}

    def _query(
        self, generation: Generation, filter: str, fields: list[str], **options: Any
    ) -> list[dict[str, Any]]:
        name = self.collection(generation.number)
        options |= self._level(name)
        return list(
            self._ask(self._client.query, name, filter=filter, output_fields=fields, **options)
        )

    def _rows(self, generation: Generation, ids: Sequence[str], arrays: bool) -> list[Row]:
        fields = ["record", *(["space", "arrays", "vector"] if arrays else [])]
        return [
            _row(row, generation)
            for some in _chunks(ids)
            for row in self._query(
                generation, f"key in {json.dumps(list(map(_key, some)))}", fields
            )
        ]

    def _page(
        self, generation: Generation, conditions: Conditions, after: str | None, limit: int
    ) -> list[Row]:
        chosen = ["space <= 0", *conditions]
        if after is not None:
            chosen.append(f'key > "{_key(after)}"')
        rows = self._query(generation, _joined(chosen, "and"), ["key", "record"], limit=limit)
        return [_row(row, generation) for row in sorted(rows, key=lambda row: str(row["key"]))]

    def _count(self, generation: Generation, conditions: Conditions) -> int:
        chosen = _joined(["space <= 0", *conditions], "and")
        (answer,) = self._query(generation, chosen, ["count(*)"])
        return int(answer["count(*)"])

    def _nearest(
        self,
        generation: Generation,
        space: int,
        queries: Floats,
        count: int,
        conditions: Conditions,
    ) -> list[list[str]]:
        name = self.collection(generation.number)
        breadth = min(max(BREADTH, 2 * count), MOST_BREADTH)  # ignored by exact collections
        answers = self._ask(
            self._client.search,
            name,
            list(np.pad(queries, ((0, 0), (0, _dimensions(generation) - queries.shape[1])))),
            filter=_joined([f"space == {space}", *conditions], "and"),
            limit=count,
            output_fields=["key"],
            search_params={"metric_type": "L2", "params": {"ef": breadth}},
            anns_field="vector",
            **self._level(name),
        )
        return [[_id(hit["entity"]["key"]) for hit in hits] for hits in answers]

    def _combined(self, joint: str, parts: Sequence[str]) -> str:
        return f"(not ({parts[0]}))" if joint == "not" else _joined(parts, joint)

    def _condition(
        self, field: str | tuple[str, ...], op: str, values: Sequence[Any]
    ) -> str | None:
        """Return an expression; it contains text of a user only if that needs no escaping."""
        if field == "id":
            keys = [_key(value) for value in values if isinstance(value, str)]
            if op == "=":
                # No row has such a sub-space, so this expression matches nothing.
                return f"key in {json.dumps(keys)}" if keys else "space > 1000000"
            return f'key {op} "{keys[0]}"' if keys else None
        names = [field] if isinstance(field, str) else ["metadata", *field]
        literals = [_literal(value) for value in values]
        if None in literals or not all(map(PLAIN.fullmatch, names)):
            return None
        lists = field != "label" and field[0] in self.lists
        if op != "=" and (lists or isinstance(values[0], str)):
            return None
        path = f"record{''.join(f'[{json.dumps(name, ensure_ascii=False)}]' for name in names)}"
        parts = [f"{path} {'==' if op == '=' else op} {literal}" for literal in literals]
        if lists:
            parts += [f"json_contains({path}, {literal})" for literal in literals]
        return _joined(parts, "or")


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


def _joined(parts: Sequence[str], joint: str) -> str:
    """Join expressions as a balanced tree, because the server's parser is recursive."""
    parts = list(parts)
    while len(parts) > 1:
        pairs = [parts[start : start + 2] for start in range(0, len(parts), 2)]
        parts = [f"({f' {joint} '.join(pair)})" for pair in pairs]
    return parts[0]


def _dimensions(generation: Generation) -> int:
    return max(2, *(stop - start for start, stop in generation.spans))


def _plain_rows(
    record: dict[str, Any], vectors: Sequence[Floats], dimensions: int
) -> Iterator[dict[str, Any]]:
    """Yield one row per sub-space; without vectors, one row that searches do not return."""
    arrays = json.dumps(record.pop("arrays", {}))
    key, plain = _key(record["id"]), json.dumps(record, ensure_ascii=False)
    for space, vector in enumerate(vectors or [np.zeros(0, np.float32)]):
        yield {
            "key": f"{key}.{space}" if space else key,
            "space": space if vectors else -1,
            "record": plain,
            "arrays": "{}" if space else arrays,
            "vector": np.pad(vector, (0, dimensions - len(vector))),
        }


def _row(row: Mapping[str, Any], generation: Generation) -> Row:
    record = row["record"]
    record = dict(json.loads(record) if isinstance(record, str | bytes) else record)
    if row.get("space", -1) < 0:
        return Row.joined(record, None)
    record["arrays"] = json.loads(row["arrays"])
    return Row.joined(record, row["vector"][: generation.widths["vector"]])
