"""A store in Qdrant: one point per item, with named vectors per sub-space and a payload."""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from qdrant_client import models
from qdrant_client.http.exceptions import (
    ApiException,
    ResponseHandlingException,
    UnexpectedResponse,
)
from retrieval.errors import StoreError
from retrieval.store.items import Floats, Generation

from retrieval_engines.engine_calls import EXACT, Conditions, one_line
from retrieval_engines.remote_store import RemoteStore
from retrieval_engines.rows import Row

# Size of a request that writes points.
BATCH_BYTES = 8 << 20
# HTTP statuses after which a retry may succeed.
PASSING = (408, 429, 500, 502, 503, 504)
# Arrays are the largest part of an item, and most reads do not need them.
PLAIN = models.PayloadSelectorExclude(exclude=["arrays"])
# Id of the point that holds the notes.
NOTES = str(uuid.UUID(int=0))
# A search that begins after a write must see it, and a replica may lag behind.
EVERY_REPLICA = models.ReadConsistencyType.ALL
# Qdrant 1.17 and later write a point only if it matches a filter.
CONDITIONAL = (1, 17)
RANGES = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}


def point_of(text: str) -> str:
    """Return an item's point id: the first 128 bits of the SHA-256 of its id.

    `_read_page` lists items in the order of their point ids.
    """
    # Qdrant takes only integers and UUIDs as ids of points.
    return str(uuid.UUID(bytes=hashlib.sha256(text.encode()).digest()[:16]))


class QdrantStore(RemoteStore):
    """A store in Qdrant."""

    engine = "Qdrant"
    errors = (ApiException, ValueError)
    separator = "~"

    def _explain_error(self, error: Exception) -> tuple[bool, str]:
        # No response, or not an HTTP response.
        away = isinstance(error, ResponseHandlingException)
        if isinstance(error, UnexpectedResponse):
            away = error.status_code in PASSING
        return away, f"{one_line(error) or type(error).__name__}."

    # Collections

    def _collections(self) -> list[str]:
        answer = self._request(self._client.get_collections)
        return [collection.name for collection in answer.collections]

    def _delete_collection(self, name: str) -> None:
        self._request(self._client.delete_collection, name)

    def _aliased_collection(self) -> str | None:
        for alias in self._request(self._client.get_aliases).aliases:
            if alias.alias_name == self.name:
                return str(alias.collection_name)
        return None

    def _move_alias(self, number: int | None) -> None:
        change: Any
        if number is None:
            alias = models.DeleteAlias(alias_name=self.name)
            change = models.DeleteAliasOperation(delete_alias=alias)
        else:
            collection = self.collection(number)
            new = models.CreateAlias(collection_name=collection, alias_name=self.name)
            # `CreateAlias` replaces an alias that exists.
            change = models.CreateAliasOperation(create_alias=new)
        self._request(self._client.update_collection_aliases, [change])

    def _create_collection(self, generation: Generation) -> None:
        vectors = {
            f"v{space}": models.VectorParams(size=stop - start, distance=models.Distance.EUCLID)
            for space, (start, stop) in enumerate(generation.spans)
        }
        name = self.collection(generation.number)
        self._delete_collections(name)
        self._request(self._client.create_collection, name, vectors_config=vectors)
        if not generation.number:
            # `set_payload` changes only points that exist.
            self._upsert(0, [models.PointStruct(id=NOTES, vector={}, payload={})])

    # The register: the payload of one point of collection 0 has the notes of the index.

    def _write_notes(self, notes: Mapping[str, Any]) -> None:
        register = self.collection(0)
        self._request(self._client.set_payload, register, dict(notes), points=[NOTES], wait=True)

    def _read_notes(self) -> dict[str, Any]:
        for register in self._retrieve(0, [NOTES]):
            return dict(register.payload or {})
        raise self._lost_error()

    # Items

    def _upsert(self, number: int, points: list[models.PointStruct], **options: Any) -> None:
        name = self.collection(number)
        self._request(self._client.upsert, name, points, wait=True, **options)

    def _retrieve(
        self, number: int, points: Sequence[str], arrays: bool = False
    ) -> list[models.Record]:
        if not points:
            return []
        payload: Any = PLAIN
        if arrays:
            payload = True
        answer = self._request(
            self._client.retrieve,
            self.collection(number),
            points,
            with_payload=payload,
            with_vectors=arrays,
            consistency=EVERY_REPLICA,
        )
        return list(answer)

    def _write_rows(self, generation: Generation, rows: Sequence[Row], **options: Any) -> None:
        for batch in Row.batches(rows, generation, BATCH_BYTES, 20):
            points = []
            for payload, vectors in batch:
                named = {f"v{space}": vector.tolist() for space, vector in enumerate(vectors)}
                points.append(
                    models.PointStruct(id=point_of(payload["id"]), vector=named, payload=payload)
                )
            self._upsert(generation.number, points, **options)

    def _exchange_rows(
        self, generation: Generation, rows: Sequence[Row], known: Mapping[str, Row]
    ) -> set[str]:
        version = str(self._request(self._client.info).version)
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < CONDITIONAL:
            # It would ignore the condition.
            raise StoreError(
                f"{self.address}: Qdrant {version} cannot change an item only if nobody else has"
                " changed it. Upgrade the server to 1.17, or add the item as a whole."
            )
        same = [
            models.Filter(
                must=[
                    models.HasIdCondition(has_id=[point_of(id)]),
                    models.FieldCondition(
                        key="version", match=models.MatchValue(value=row.version)
                    ),
                ]
            )
            for id, row in known.items()
        ]
        only = models.UpdateMode.UPDATE_ONLY
        self._write_rows(
            generation, rows, update_filter=models.Filter(should=same), update_mode=only
        )
        written = {row.version for row in self._read_rows(generation, list(known))}
        return {row.id for row in rows if row.version not in written}

    def _delete_rows(self, generation: Generation, ids: Sequence[str]) -> None:
        points = [point_of(id) for id in ids]
        self._request(self._client.delete, self.collection(generation.number), points, wait=True)

    def _read_rows(
        self, generation: Generation, ids: Sequence[str], arrays: bool = False
    ) -> list[Row]:
        points = list(map(point_of, ids))
        return list(map(_row, self._retrieve(generation.number, points, arrays)))

    def _read_page(
        self, generation: Generation, conditions: Conditions, after: str | None, limit: int
    ) -> list[Row]:
        start = None
        if after is not None:
            start = point_of(after)
        points, _ = self._request(
            self._client.scroll,
            self.collection(generation.number),
            models.Filter(must=list(conditions)),
            # Qdrant includes this point, if it exists.
            offset=start,
            limit=limit + 1,
            with_payload=PLAIN,
            consistency=EVERY_REPLICA,
        )
        return [_row(point) for point in points if point.id != start][:limit]

    def _count_rows(self, generation: Generation, conditions: Conditions) -> int:
        name = self.collection(generation.number)
        chosen = models.Filter(must=list(conditions))
        return int(self._request(self._client.count, name, chosen, exact=True).count)

    def _nearest_ids(
        self,
        generation: Generation,
        space: int,
        queries: Floats,
        count: int,
        conditions: Conditions,
    ) -> list[list[str]]:
        params = models.SearchParams(exact=self._exact)
        requests = [
            models.QueryRequest(
                query=query.tolist(),
                using=f"v{space}",
                filter=models.Filter(must=list(conditions)),
                limit=count,
                params=params,
                with_payload=["id"],
            )
            for query in queries
        ]
        answers = self._request(
            self._client.query_batch_points,
            self.collection(generation.number),
            requests,
            consistency=EVERY_REPLICA,
        )
        return [[(point.payload or {})["id"] for point in answer.points] for answer in answers]

    def _join_conditions(self, joint: str, parts: Sequence[Any]) -> models.Condition:
        """Return one Qdrant filter that joins conditions.

        It is built from objects, not parsed from text, so no value can act as a condition.
        """
        kind = {"and": "must", "or": "should", "not": "must_not"}[joint]
        return models.Filter.model_validate({kind: list(parts)})

    def _condition(
        self, field: str | tuple[str, ...], op: str, values: Sequence[Any]
    ) -> models.Condition | None:
        if op in ("!=", "exists"):
            return None
        if field == "id":
            # A point's id is a hash, which has another order.
            if op != "=":
                return None
            points = [point_of(value) for value in values if isinstance(value, str)]
            return models.HasIdCondition(has_id=points)
        if isinstance(field, tuple):
            field = '"."'.join(("metadata", *field))
        conditions = [_compared(f'"{field}"', op, value) for value in values]
        if None in conditions:
            return None
        return self._join_conditions("or", conditions)


def _compared(key: str, op: str, value: Any) -> models.FieldCondition | None:
    if op == "=" and isinstance(value, bool | str):
        return models.FieldCondition(key=key, match=models.MatchValue(value=value))
    if value is None or isinstance(value, str) or abs(value) >= EXACT:
        return None
    # `MatchValue` takes only integers, and 1 equals 1.0.
    bounds = {"gte": value, "lte": value}
    if op != "=":
        bounds = {RANGES[op]: value}
    return models.FieldCondition(key=key, range=models.Range(**bounds))


def _row(point: models.Record) -> Row:
    vector: Any = None
    # None if vectors were not requested.
    if isinstance(point.vector, dict):
        vector = point.vector.get("v0")
    return Row.joined(point.payload or {}, vector)
