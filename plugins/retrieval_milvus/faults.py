"""What Milvus and its client raise: whether it means that nobody answers, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from pymilvus import MilvusException

TOKEN = "RETRIEVAL_MILVUS_TOKEN"
_AWAY = (
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED,
)  # fmt: skip
_REFUSED = (
    grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED,
)  # fmt: skip


def is_away(fault: Exception) -> bool:
    """Return whether a fault means that the server cannot be reached or is not ready, rather than that it refuses."""
    if isinstance(rpc := _rpc(fault), grpc.RpcError):
        return rpc.code() not in _REFUSED
    if isinstance(fault, ValueError):
        return "closed channel" in str(fault)
    said = str(fault).lower()
    code = getattr(fault, "code", None)
    return code in _AWAY or code in (2, 3, 5, 101, 102, 103, 104, 106, 500, 501, 502, 503, 901) or any(
        word in said
        for word in ("unavailable", "fail connecting", "not ready", "not loaded", "no available", "timeout", "timed out", "deadline",
                     "unhealthy", "initializing", "not serving", "channel not", "rate limit", "retry")
    )  # fmt: skip


def _rpc(fault: BaseException) -> Any:
    """Return the fault of the connection that another one was made of, if there is one."""
    return fault if isinstance(fault, grpc.RpcError) else fault.__cause__


def sentence(fault: Exception) -> str:
    """Return what a fault says, on one line."""
    rpc = _rpc(fault)
    if isinstance(rpc, grpc.RpcError):
        said = rpc.details()
        if rpc.code() is grpc.StatusCode.UNAUTHENTICATED:
            return f"{_line(said)}. The environment variable {TOKEN} must hold user:password, or an API key."
    else:
        said = getattr(fault, "message", None) or fault
    return f"{_line(said) or type(fault).__name__}."


def _line(said: object) -> str:
    return " ".join(str(said).split())[:300].rstrip(".")


def is_missing(fault: MilvusException) -> bool:
    """Return whether a fault says that a collection is not there."""
    return fault.code == 100 or "not found" in str(fault) or "not exist" in str(fault)


def hint(fault: Exception, server: Mapping[str, Any]) -> str:
    """Return what else may help where a server does not answer: a server that speaks TLS closes any other connection."""
    plain = isinstance(server, dict) and "secure" not in server
    return (
        " If the server speaks TLS, write ?tls=true." if plain and "Socket closed" in sentence(fault) else ""
    )
