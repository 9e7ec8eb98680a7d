"""Qdrant's in-process mode, which needs no server."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("qdrant_client", reason="the extra `qdrant` is not installed")
from qdrant_client import QdrantClient


class Memory:
    """Qdrant's in-process mode, locked for threads; closing a store keeps its content."""

    def __init__(self) -> None:
        self._client, self._turn = QdrantClient(":memory:"), threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments, **named):
            with self._turn:
                return getattr(self._client, name)(*arguments, **named)

        return call

    def close(self) -> None:
        pass
