"""What Milvus and its client raise: whether it means that nobody answers, and what it says."""

from __future__ import annotations

from typing import Any

import grpc
from pymilvus import MilvusException

_REFUSED = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
)
_AWAY = (
    *(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN),
    grpc.StatusCode.CANCELLED,
    *(2, 3, 5, 101, 102, 103, 104, 106, 500, 501, 502, 503, 901),  # Milvus's own
)
_AWAY_WORDS = (
    *(
        "unavailable",
        "fail connecting",
        "not ready",
        "not loaded",
        "no available",
        "timeout",
        "timed out",
    ),
    *("deadline", "unhealthy", "initializing", "not serving", "channel not", "rate limit", "retry"),
)


def _rpc(fault: BaseException) -> Any:
    """Return the fault of the connection that another one was made of, if there is one."""
    return fault if isinstance(fault, grpc.RpcError) else fault.__cause__


def is_away(fault: Exception) -> bool:
    """Return whether the server cannot be reached or is not ready, rather than that it refuses."""
    if isinstance(rpc := _rpc(fault), grpc.RpcError):
        return rpc.code() not in _REFUSED
    if isinstance(fault, ValueError):
        return "closed channel" in str(fault)
    text = str(fault).lower()
    return getattr(fault, "code", None) in _AWAY or any(word in text for word in _AWAY_WORDS)


def sentence(fault: Exception) -> str:
    """Return what a fault says, on one line."""
    rpc = _rpc(fault)
    if not isinstance(rpc, grpc.RpcError):
        return f"{_line(getattr(fault, 'message', None) or fault) or type(fault).__name__}."
    text = _line(rpc.details()) or type(fault).__name__
    if rpc.code() is grpc.StatusCode.UNAUTHENTICATED:
        return (
            f"{text}. The environment variable RETRIEVAL_MILVUS_TOKEN must hold user:password, or"
            " an API key."
        )
    return f"{text}."


def _line(text: object) -> str:
    return " ".join(str(text).split())[:300].rstrip(".")


def is_missing(fault: MilvusException) -> bool:
    """Return whether a fault says that a collection is not there."""
    return fault.code == 100 or "not found" in str(fault) or "not exist" in str(fault)
