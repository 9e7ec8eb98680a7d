"""Rows and parameters, as Milvus has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pymilvus import DataType, MilvusClient
from retrieval import stores

Floats = NDArray[np.float32]

KINDS = {"flat": "FLAT", "hnsw": "HNSW", "ivf": "IVF_FLAT", "sq8": "IVF_SQ8"}
"""What Milvus calls the structures."""
_LONGEST_KEY = 8100


def level(seen: int) -> dict[str, Any]:
    """Return how much of what was written an answer must have: all up to a time, or all of it."""
    if not seen:
        return {"consistency_level": "Strong"}
    return {"consistency_level": "Customized", "guarantee_timestamp": seen}


def columns(parted: bool) -> list[str]:
    """Return the names of what a row has besides its vector and, of items, its `id`; `parted` as in `schema`."""
    names = ["number", "kind", "born", "died", "digest", "key", "terms", "orders", "body"]
    return [*names, "part"] if parted else names


def schema(width: int, terms: int, records: bool, parted: bool) -> Any:
    """Return the columns of a collection.

    Args:
        width: numbers of its vectors.
        terms: the most terms of a row.
        records: whether it is that of items, whose order is kept.
        parted: whether rows are kept apart by a field.
    """
    made = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
    if records:
        made.add_field("id", DataType.VARCHAR, is_primary=True, max_length=_LONGEST_KEY)
    made.add_field("number", DataType.INT64, is_primary=not records)
    for column in ("born", "died"):
        made.add_field(column, DataType.INT64)
    for column, length in (("kind", 8), ("digest", 32), ("key", _LONGEST_KEY), ("body", 65_535)):
        made.add_field(column, DataType.VARCHAR, max_length=length)
    if parted:
        made.add_field("part", DataType.VARCHAR, max_length=24)
    made.add_field("terms", DataType.ARRAY, element_type=DataType.VARCHAR, max_capacity=terms, max_length=24)
    made.add_field("orders", DataType.JSON)
    made.add_field("vector", DataType.FLOAT_VECTOR, dim=max(2, width))  # the server takes none of 1
    return made


def build(structure: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an index by the names that Milvus has for those of the built-in back ends."""
    if structure == "hnsw":
        return {"M": int(options.get("m", 16)), "efConstruction": int(options.get("ef_construction", 200))}
    if structure == "flat":
        return {}
    # of small numbers, `sq8` looks at every one, as the built-in back end does
    return {"nlist": int(options.get("lists") or (1024 if structure == "ivf" else 1))}


def is_built(found: Mapping[str, Any] | None, structure: str, options: Mapping[str, Any]) -> bool:
    """Return whether an index that Milvus describes, if there is one, is this structure with these parameters of `build`."""
    wanted = {"index_type": KINDS[structure], **build(structure, options)}
    return all(str((found or {}).get(name)) == str(value) for name, value in wanted.items())


def searching(options: Mapping[str, Any], count: int) -> dict[str, int]:
    """Return the parameters of a search for some rows, likewise; Milvus takes those that its index has."""
    return {
        "ef": min(max(int(options.get("ef_search", 64)), 2 * count), 32_768),
        "nprobe": int(options.get("probes") or max(32, int(options.get("lists") or 0) // 16)),
    }


def padded(vector: Floats) -> Floats:
    """Return a vector that Milvus takes: of two numbers at least."""
    return vector if len(vector) > 1 else np.array([vector[0], 0], np.float32)


def plain_row(row: stores.Row, table: str, at: int, parted: bool) -> dict[str, Any]:
    """Return a row as a collection has it: that of its vector `at`, with its part where rows are kept apart."""
    vector = row.vectors.get(f"v{at}")
    made = {
        "number": row.number, "kind": row.kind, "born": row.born, "died": row.died, "digest": row.digest, "key": row.key,
        "terms": list(row.terms), "orders": dict(row.orders), "body": "" if at else row.body,
        "vector": np.zeros(2, np.float32) if vector is None else padded(vector),
    }  # fmt: skip
    if parted:
        made["part"] = row.part or stores.LOOSE
    return {"id": f"{row.key}.{row.number:016x}", **made} if table == stores.RECORDS else made


def row_of(said: Mapping[str, Any], vectors: Sequence[Any]) -> stores.Row:
    """Return the row of what Milvus gave."""
    orders = said["orders"]
    made = {
        f"v{at}": np.asarray(vector, np.float32) for at, vector in enumerate(vectors) if vector is not None
    }
    return stores.Row(
        said["number"], said["kind"], said["born"], said["died"], said["digest"], said["key"], tuple(said["terms"]),
        orders, said["body"], made, said.get("part", ""),
    )  # fmt: skip
