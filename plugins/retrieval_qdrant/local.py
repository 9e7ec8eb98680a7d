"""Qdrant's in-process mode, opened once in a process, however many indexes are open in its folder, and asked by one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qdrant_client import QdrantClient
from retrieval import StoreError


@dataclass
class _Opened:
    client: QdrantClient
    turn: threading.RLock = field(default_factory=threading.RLock)
    users: int = 0


_OPENED: dict[str, _Opened] = {}
_TURN = threading.Lock()


class LocalClient:
    """What `QdrantClient` is, for a folder.

    Args:
        folder: where its collections are; it is made where it is missing.
        address: what sentences call the index.

    Raises:
        StoreError: another process has it open, or it cannot be written.
    """

    def __init__(self, folder: str, address: str) -> None:
        self._folder = str(Path(folder).resolve())
        with _TURN:
            if self._folder not in _OPENED:
                try:
                    _OPENED[self._folder] = _Opened(
                        QdrantClient(path=self._folder, force_disable_check_same_thread=True)
                    )
                except RuntimeError:
                    raise StoreError(
                        f"Another process has {address} open, and Qdrant's in-process mode takes one. Use a server: qdrant://HOST/NAME."
                    ) from None
                except OSError as fault:
                    raise StoreError(f"{address} cannot be opened: {fault.strerror or fault}.") from None
            self._opened: _Opened | None = _OPENED[self._folder]
            self._opened.users += 1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        opened = self.__dict__["_opened"]

        def call(*given: Any, **named: Any) -> Any:
            with opened.turn:
                return getattr(opened.client, name)(*given, **named)

        return call

    def close(self) -> None:
        """Close the folder when nobody else of this process has it open."""
        with _TURN:
            opened, self._opened = self._opened, None
            if opened is not None:
                opened.users -= 1
                if not opened.users:
                    opened.client.close()
                    del _OPENED[self._folder]
