"""An index's rows in Qdrant: a collection for each table, a point for each row, all that filters look for in its payload."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ApiException, ResponseHandlingException, UnexpectedResponse
from retrieval import StoreError, stores

Floats = NDArray[np.float32]
T = TypeVar("T")

HEAD, LOCK = "head", "lock"
_FLOATS = {"least": "gte", "most": "lte"}
_OPS = {"<": "lt", "<=": "lte", ">": "gt", ">=": "gte"}
_INDEXED = {"digest": "keyword", "terms": "keyword", "kind": "keyword", "born": "integer", "died": "integer", "number": "integer"}  # fmt: skip
_BYTES = 8 << 20  # of one request
_ATTEMPTS = 6
_LONG = 20


class QdrantEngine(stores.Engine):
    """See above. Collections are called NAME and NAME~TABLE.

    Args:
        client: connected.
        name: of the index.
        address: what sentences call it.
        timeout: seconds that one question may take; None where no server is asked.
        exact: whether every vector is looked at, rather than Qdrant's graph.
    """

    orders_text = False

    def __init__(
        self, client: QdrantClient, name: str, address: str, timeout: float | None, exact: bool = True
    ) -> None:
        self._client, self._name, self._address = client, name, address
        self._timeout, self._exact = timeout, exact
        self.page_rows = 1000 if timeout is not None else 1 << 30
        self._held: str | None = None  # of the in-process mode, which one process has open
        self._keys: tuple[Any, list[tuple[str, int]]] | None = None  # of the last scan, in order

    def _ask(self, question: Callable[[], T]) -> T:
        """Ask, again after a while where nobody answers: everything that is asked can be asked twice."""
        for attempt in range(_ATTEMPTS):
            if time.monotonic() > stores.stop_at():
                raise stores.TooSlow(f"Reading {self._address} takes too long. Ask for less.")
            try:
                return question()
            except (ResponseHandlingException, UnexpectedResponse) as fault:
                status = fault.status_code if isinstance(fault, UnexpectedResponse) else None
                if status is not None and status not in (408, 429, 500, 502, 503, 504):
                    raise StoreError(f"{self._address}: Qdrant refuses: {_sentence(fault)}") from None
                if attempt + 1 == _ATTEMPTS:
                    raise self._away(fault) from None
            except ApiException as fault:
                raise StoreError(f"{self._address}: Qdrant refuses: {_sentence(fault)}") from None
            time.sleep(0.05 * 2**attempt)
        raise AssertionError

    def _away(self, fault: Exception) -> stores.StoreUnavailable:
        return stores.StoreUnavailable(
            f"Qdrant does not answer for {self._address}: {_sentence(fault)} Try again in a moment."
        )

    def _collection(self, table: str) -> str:
        return self._name if table == stores.RECORDS else f"{self._name}~{table}"

    def _there(self, table: str) -> bool:
        return bool(self._ask(lambda: self._client.collection_exists(self._collection(table))))

    # The whole

    def head(self) -> str | None:
        """Return the point 0 of a small collection; see `Engine`."""
        if not self._there(HEAD):
            return None
        found = self._ask(lambda: self._client.retrieve(self._collection(HEAD), [0], with_payload=True, consistency=self._all()))  # fmt: skip
        return str((found[0].payload or {})["text"]) if found else None

    def _all(self) -> Any:
        return models.ReadConsistencyType.ALL if self._timeout is not None else None

    def keep(self, head: str) -> None:
        """Replace the head; see `Engine`."""
        if not self._there(HEAD):
            self._make(HEAD, {})
        self._write(HEAD, [models.PointStruct(id=0, vector={"v": [0.0]}, payload={"text": head})])

    def make(self) -> None:
        """Make the table of items; see `Engine`."""
        self.drop()
        self._make(stores.RECORDS, {})

    def make_table(
        self, table: str, widths: Mapping[str, int], structure: str, options: Mapping[str, Any]
    ) -> None:
        """Make a collection; see `Engine`."""
        self._make(table, widths)

    def _make(self, table: str, widths: Mapping[str, int]) -> None:
        name = self._collection(table)
        vectors = {
            vector: models.VectorParams(size=width, distance=models.Distance.EUCLID)
            for vector, width in (widths or {"v": 1}).items()
        }
        self.drop_table(table)
        self._ask(lambda: self._client.create_collection(name, vectors_config=vectors))
        for field, kind in _INDEXED.items() if self._timeout is not None and table != HEAD else ():
            self._index(name, field, kind)

    def _index(self, name: str, field: str, kind: str) -> None:
        self._ask(
            lambda: self._client.create_payload_index(name, field, models.PayloadSchemaType(kind), wait=True)
        )

    def drop_table(self, table: str) -> None:
        """Delete a collection; see `Engine`."""
        if self._there(table):
            self._ask(lambda: self._client.delete_collection(self._collection(table)))

    def drop(self) -> None:
        """Delete all collections, the head first; see `Engine`."""
        self.drop_table(HEAD)
        listed = self._ask(self._client.get_collections).collections
        for one in sorted(each.name for each in listed):
            if one.startswith(f"{self._name}~g"):
                self.drop_table(one.removeprefix(f"{self._name}~"))
        self.drop_table(stores.RECORDS)

    # Rows

    def _write(self, table: str, points: Sequence[models.PointStruct]) -> None:
        name = self._collection(table)
        self._ask(lambda: self._client.upsert(name, list(points), wait=True))

    def put(self, table: str, rows: Sequence[stores.Row]) -> int:
        """Write points; see `Engine`."""
        waiting, size = [], 0
        for row in rows:
            waiting.append(_point(row))
            size += len(row.body) + 30 * len(row.terms) + 20 * sum(map(len, row.vectors.values())) + 500
            if size > _BYTES:
                self._write(table, waiting)
                waiting, size = [], 0
        if waiting:
            self._write(table, waiting)
        return 0

    def end(self, table: str, where: stores.Condition, moment: int, *, seen: int) -> int:
        """Set one entry of the payload; see `Engine`."""
        self._ask(lambda: self._client.set_payload(self._collection(table), {"died": moment}, points=_filter(where), wait=True))  # fmt: skip
        return 0

    def erase(self, table: str, where: stores.Condition, *, seen: int) -> int:
        """Delete points; see `Engine`."""
        self._ask(lambda: self._client.delete(self._collection(table), models.FilterSelector(filter=_filter(where)), wait=True))  # fmt: skip
        return 0

    def _scroll(self, table: str, where: stores.Condition, **what: Any) -> Iterator[models.Record]:
        offset, chosen, name = None, _filter(where), self._collection(table)
        while True:
            ask = partial(
                self._client.scroll,
                name,
                chosen,
                limit=self.page_rows,
                offset=offset,
                consistency=self._all(),
                **what,
            )
            found, offset = self._ask(ask)
            yield from found
            if offset is None:
                return

    def fetch(
        self, table: str, where: stores.Condition, *, seen: int, vectors: bool = False
    ) -> list[stores.Row]:
        """Return rows; see `Engine`."""
        named, rest = _named(where)
        if named is not None:
            rows = self._retrieve(table, named, vectors)
        else:
            # the in-process mode compares each row with each value
            native = rest if self._timeout is None else where
            rows = [_row(one) for one in self._scroll(table, native, with_payload=True, with_vectors=vectors)]
        return list(filter(stores.holds(where), rows))

    def _retrieve(self, table: str, numbers: Sequence[int], vectors: bool = False) -> list[stores.Row]:
        name = self._collection(table)
        found = self._ask(
            lambda: self._client.retrieve(
                name, numbers, with_payload=True, with_vectors=vectors, consistency=self._all()
            )
        )
        return [_row(one) for one in found]

    def page(
        self, table: str, where: stores.Condition, after: str, limit: int, *, seen: int
    ) -> list[stores.Row]:
        """Return rows in the order of their keys, which Qdrant does not know: they are listed once for all pages of a scan."""
        if self._keys is None or self._keys[0] != (table, where):
            listed = self._scroll(table, where, with_payload=["key"], with_vectors=False)
            self._keys = (
                (table, where),
                sorted((str((one.payload or {})["key"]), int(one.id)) for one in listed),
            )
        behind = [number for key, number in self._keys[1] if key > after][:limit]
        found = self._retrieve(table, behind) if behind else []
        return sorted(found, key=lambda row: row.key)

    def count(self, table: str, where: stores.Condition, *, seen: int) -> int:
        """Return how many rows there are; see `Engine`."""
        name, chosen = self._collection(table), _filter(where)
        return int(self._ask(lambda: self._client.count(name, chosen, exact=True)).count)

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
        """Return the nearest points; see `Engine`."""
        name, chosen = self._collection(table), _filter(where)
        params = models.SearchParams(exact=True) if self._exact and self._timeout is not None else None
        asked = [
            models.QueryRequest(query=query.tolist(), using=vector, filter=chosen, limit=count, params=params)
            for query in queries
        ]
        found = self._ask(lambda: self._client.query_batch_points(name, asked, consistency=self._all()))
        return [[int(point.id) for point in one.points] for one in found]

    # One writer: whoever made the collection

    def claim(self, text: str) -> bool:
        """Make a collection, which only one can; see `Engine`."""
        if self._timeout is None:
            self._held = text
            return True
        one = {"v": models.VectorParams(size=1, distance=models.Distance.EUCLID)}
        try:
            self._client.create_collection(self._collection(LOCK), vectors_config=one)
        except UnexpectedResponse as fault:
            if fault.status_code in (400, 409):  # it is there
                return False
            raise self._away(fault) from None
        except ResponseHandlingException as fault:
            raise self._away(fault) from None
        self.renew(text)
        return True

    def holder(self) -> str | None:
        """Return what that collection says; see `Engine`."""
        if self._timeout is None:
            return self._held
        if not self._there(LOCK):
            return None
        found = self._ask(lambda: self._client.retrieve(self._collection(LOCK), [0]))
        return str((found[0].payload or {})["text"]) if found else "{}"

    def renew(self, text: str) -> None:
        """Say who writes; see `Engine`."""
        if self._timeout is not None:
            self._write(LOCK, [models.PointStruct(id=0, vector={"v": [0.0]}, payload={"text": text})])

    def release(self) -> None:
        """Delete that collection; see `Engine`."""
        self._held = None
        if self._timeout is not None:
            self.drop_table(LOCK)

    def close(self) -> None:
        """Close the connection; see `Engine`."""
        self._client.close()


def _sentence(fault: Exception) -> str:
    text = " ".join(str(fault).split())[:300].rstrip(".")
    return f"{text or type(fault).__name__}."


def _point(row: stores.Row) -> models.PointStruct:
    orders = {
        name: dict(zip(("low", "more"), stores.halves(text), strict=True))
        for name, text in row.orders.items()
        if name[0] in "nN"
    }
    payload = {
        "kind": row.kind, "born": row.born, "died": row.died, "digest": row.digest, "key": row.key,
        "number": row.number, "terms": list(row.terms), "orders": orders, "texts": dict(row.orders), "body": row.body,
    }  # fmt: skip
    vectors = {name: vector.tolist() for name, vector in row.vectors.items()} or {"v": [0.0]}
    return models.PointStruct(id=row.number, vector=vectors, payload=payload)


def _row(point: models.Record) -> stores.Row:
    said = point.payload or {}
    given = point.vector if isinstance(point.vector, dict) else {}
    vectors = {name: np.asarray(vector, np.float32) for name, vector in given.items() if name != "v"}
    return stores.Row(
        said["number"], said["kind"], said["born"], said["died"], said["digest"], said["key"], tuple(said["terms"]),
        said["texts"], said["body"], vectors,
    )  # fmt: skip


def _flat(where: stores.Condition) -> list[stores.Condition]:
    """Return the conditions all of which must be true."""
    if not isinstance(where, stores.Every):
        return [where]
    return [inner for part in where.parts for inner in _flat(part)]


def _named(where: stores.Condition) -> tuple[Sequence[int] | None, stores.Condition]:
    """Return the numbers that a condition names, None if it names none; and what it says besides long lists."""
    for part in _flat(where):
        if isinstance(part, stores.OneOf) and part.column == "number":
            return part.values, where
    short = (
        part for part in _flat(where) if not (isinstance(part, stores.OneOf) and len(part.values) > _LONG)
    )
    return None, stores.Every(tuple(short))


def _filter(where: stores.Condition) -> models.Filter:
    made = _condition(where)
    return made if isinstance(made, models.Filter) else models.Filter(must=[made])


def _condition(where: stores.Condition) -> Any:
    """Return a condition of Qdrant's: values are values there, so none can be taken for anything else."""
    if isinstance(where, stores.Between):
        return models.FieldCondition(key=where.column, range=models.Range(gte=where.least, lte=where.most))
    if isinstance(where, stores.OneOf):
        if where.column == "number":
            return models.HasIdCondition(has_id=list(where.values))
        one = len(where.values) == 1
        match = models.MatchValue(value=where.values[0]) if one else models.MatchAny(any=list(where.values))
        return models.FieldCondition(key=where.column, match=match)
    if isinstance(where, stores.Has):
        found = models.FieldCondition(key="terms", match=models.MatchAny(any=list(where.terms)))
        return models.Filter(must_not=[found]) if where.negated else found
    if isinstance(where, stores.Every):
        return models.Filter(must=[_condition(part) for part in _flat(where)])
    if isinstance(where, stores.Either):
        parts = [_condition(part) for part in where.parts]
        return models.Filter(should=parts) if parts else models.HasIdCondition(has_id=[])
    low, more = stores.halves(where.text)
    key = f"orders.{where.name}"
    strict = where.op[0]
    beyond = models.FieldCondition(key=f"{key}.low", range=models.Range(**{_OPS[strict]: low}))
    at = models.FieldCondition(key=f"{key}.low", range=models.Range(gte=low, lte=low))
    rest = models.FieldCondition(key=f"{key}.more", range=models.Range(**{_OPS[where.op]: more}))
    return models.Filter(should=[beyond, models.Filter(must=[at, rest])])
