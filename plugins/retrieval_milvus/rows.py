"""Rows, parameters and faults, as Milvus has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from retrieval import stores

Floats = NDArray[np.float32]

_AWAY = (
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED,
)  # fmt: skip


def level(seen: int) -> dict[str, Any]:
    """Return how much of what was written an answer must have: all up to a time, or all of it."""
    if not seen:
        return {"consistency_level": "Strong"}
    return {"consistency_level": "Customized", "guarantee_timestamp": seen}


def build(structure: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of an index by the names that Milvus has for those of the built-in back ends."""
    if structure == "hnsw":
        return {"M": int(options.get("m", 16)), "efConstruction": int(options.get("ef_construction", 200))}
    return {} if structure == "flat" else {"nlist": int(options.get("lists") or 1024)}


def is_away(fault: Exception) -> bool:
    """Return whether a fault means that the server cannot be reached or is not ready, rather than that it refuses."""
    if isinstance(fault, grpc.RpcError):
        return True
    if isinstance(fault, ValueError):
        return "closed channel" in str(fault)
    said = str(fault).lower()
    code = getattr(fault, "code", None)
    return code in _AWAY or code in (2, 3, 5, 101, 102, 103, 104, 106, 500, 501, 502, 503, 901) or any(
        word in said
        for word in ("unavailable", "fail connecting", "not ready", "not loaded", "no available", "timeout", "timed out", "deadline",
                     "unhealthy", "initializing", "not serving", "channel not", "rate limit", "retry")
    )  # fmt: skip


def sentence(fault: Exception) -> str:
    """Return what a fault says, on one line."""
    text = " ".join(str(getattr(fault, "message", None) or fault).split())[:300].rstrip(".")
    return f"{text or type(fault).__name__}."


def padded(vector: Floats) -> Floats:
    """Return a vector that Milvus takes: of two numbers at least."""
    return vector if len(vector) > 1 else np.array([vector[0], 0], np.float32)


def plain_row(row: stores.Row, table: str, at: int) -> dict[str, Any]:
    """Return a row as a collection has it: that of its vector `at`."""
    vector = row.vectors.get(f"v{at}")
    made = {
        "number": row.number, "kind": row.kind, "born": row.born, "died": row.died, "digest": row.digest, "key": row.key,
        "terms": list(row.terms), "orders": dict(row.orders), "body": "" if at else row.body,
        "vector": np.zeros(2, np.float32) if vector is None else padded(vector),
    }  # fmt: skip
    return {"id": f"{row.key}.{row.number:016x}", **made} if table == stores.RECORDS else made


def row_of(said: Mapping[str, Any], vectors: Sequence[Any]) -> stores.Row:
    """Return the row of what Milvus gave."""
    orders = said["orders"]
    made = {
        f"v{at}": np.asarray(vector, np.float32) for at, vector in enumerate(vectors) if vector is not None
    }
    return stores.Row(
        said["number"], said["kind"], said["born"], said["died"], said["digest"], said["key"], tuple(said["terms"]),
        orders, said["body"], made,
    )  # fmt: skip
