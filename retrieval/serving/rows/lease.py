"""One process writes at a time: it holds a lease, which another takes over only after it has seen no sign of life for long."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress

from retrieval.errors import StoreError
from retrieval.serving.rows.engine import Engine

IDLE = 2.0
"""Seconds after the last write at which a process gives the lease back."""
_RENEW, _DEAD, _PAUSE = 10.0, 45.0, 0.1
_SETTLE = 2.0  # seconds: between that a process was taken for dead and that its lease is deleted, for which engines need two questions


class Lease:
    """The right to write to the index of an engine.

    Args:
        engine: see above.
        address: what sentences call the index.
        wait: seconds that another process is waited for.
    """

    def __init__(self, engine: Engine, address: str, wait: float) -> None:
        self._engine, self._address, self._wait = engine, address, wait
        self._me = {
            "holder": str(uuid.uuid4()),
            "process": f"process {os.getpid()} on {socket.gethostname()}",
        }
        self._lock = threading.RLock()
        self._renewed: float | None = None
        self._beats = 0
        self._timer: threading.Timer | None = None

    def _text(self) -> str:
        self._beats += 1
        return json.dumps({**self._me, "beat": self._beats})

    def hold(self) -> bool:
        """Get the lease; return whether another process may have written since it was held last.

        Raises:
            StoreError: another process keeps writing.
        """
        with self._lock:
            self._stop_timer()
            if self._renewed is not None and time.monotonic() - self._renewed < _DEAD / 2:
                return False
            self._take()
            self._renewed = time.monotonic()
            return True

    def _take(self) -> None:
        """Wait until there is none, or the one that there is has not changed for so long that whoever held it must be gone."""
        began = since = time.monotonic()
        before, died = None, False
        while True:
            if (other := self._engine.holder()) is None:
                if self._engine.claim(self._text()):
                    if not died:
                        break
                    # another that took the same process for dead may delete this claim in the place of that one's
                    died = False
                    time.sleep(_SETTLE)
                continue
            now = time.monotonic()
            if _said(other, "holder") == self._me["holder"]:  # the answer to an earlier claim was lost
                break
            if other != before:
                before, since = other, now
            if now - since > _DEAD:
                died = True
                self._engine.release()
            elif now - began > self._wait:
                raise StoreError(
                    f"{self._address} is being written to by another process ({_said(other, 'process')}). Try again when it is done."
                )
            else:
                time.sleep(_PAUSE)

    def check(self) -> None:
        """Say that this process lives, if that was long ago.

        Raises:
            StoreError: another process has taken the lease over, since this one was stopped for too long.
        """
        with self._lock:
            if self._renewed is None or time.monotonic() - self._renewed < _RENEW:
                return
            other = self._engine.holder()
            if other is None or _said(other, "holder") != self._me["holder"]:
                self._renewed = None
                raise StoreError(
                    f"Another process writes to {self._address} since this one was stopped for too long. Nothing was written; try again."
                )
            self._engine.renew(self._text())
            self._renewed = time.monotonic()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def rest(self) -> None:
        """Give the lease back soon, unless `hold` comes first."""
        with self._lock:
            self._timer = threading.Timer(IDLE, self._give_back)
            self._timer.daemon = True
            self._timer.start()

    def _give_back(self) -> None:
        timer = threading.current_thread()
        with self._lock:
            if timer is self._timer:
                self.give_back()

    def give_back(self) -> None:
        """Give the lease back, if it is held; what cannot be reached is taken over once it looks dead."""
        with self._lock:
            self._stop_timer()
            if self._renewed is not None:
                self._renewed = None
                with suppress(StoreError):
                    self._engine.release()


def _said(text: str, name: str) -> str:
    try:
        return str(json.loads(text)[name])
    except (ValueError, KeyError, TypeError):
        return "unknown"
