"""Honest clients, in a process of their own."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from wire import Answer, ask, trust


@dataclass
class Seen:
    """What honest clients saw.

    Attributes:
        answered: seconds of each search that was answered.
        refused: their 503, by its sentence.
        late: answers beyond the deadline, or none at all.
        wrong: answers that were not what they were before.
    """

    answered: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    late: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def note(self, answer: Answer, expected: object, took: float, deadline: float) -> None:
        """Judge one answer."""
        if answer.status == 429:
            self.refused["Too Many Requests"] += 1
        elif answer.status == 503 and "retry-after" in answer.headers:
            self.refused[answer.error] += 1
        elif answer.status != 200:
            self.wrong.append(f"{answer.status} {answer.body[:200]!r}")
        elif results(answer) != expected:
            self.wrong.append("other results")
        else:
            self.answered.append(took)
        if took > deadline + 1 or answer.status == 0:
            self.late.append(f"{took:.1f} s, status {answer.status}")


class HonestClients:
    """Some clients that search again and again, from now until `stop`.

    Args:
        port: of the server.
        searches: the requests that they take turns with.
        deadline: the server's.
        count: of clients.
        pause: seconds between the searches of one.
        certificate: file of the certificate that they trust, where the server is behind TLS.
    """

    def __init__(
        self,
        port: int,
        searches: list[bytes],
        deadline: float,
        count: int = 2,
        pause: float = 0.02,
        certificate: str | None = None,
    ) -> None:
        context = get_context("spawn")
        self._stop = context.Event()
        self._queue: Any = context.Queue()
        arguments = (port, searches, deadline, count, pause, certificate, self._stop, self._queue)
        self._process = context.Process(target=_search, args=arguments, daemon=True)
        self._process.start()

    def stop(self) -> Seen:
        """Let them end; return what they saw."""
        self._stop.set()
        seen: Seen = self._queue.get(timeout=120)
        self._process.join(30)
        return seen


def results(answer: Answer) -> object:
    """Return what a search found, or the answer itself when it failed."""
    return json.loads(answer.body)["results"] if answer.status == 200 else answer


def _search(
    port: int,
    searches: list[bytes],
    deadline: float,
    count: int,
    pause: float,
    certificate: str | None,
    stop: Any,
    queue: Any,
) -> None:
    trust(certificate)
    seen, lock = Seen(), threading.Lock()
    try:
        expected = [results(ask(port, search)) for search in searches]
    except OSError:  # the server has been ended already
        queue.put(seen)
        return

    def client(turn: int) -> None:
        while not stop.is_set():
            turn = (turn + 1) % len(searches)
            began = time.monotonic()
            try:
                answer = ask(port, searches[turn], 3 * deadline)
            except OSError as fault:
                answer = Answer(0, {}, str(fault).encode())
            with lock:
                seen.note(answer, expected[turn], time.monotonic() - began, deadline)
            time.sleep(pause)

    threads = [threading.Thread(target=client, args=(turn,)) for turn in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.put(seen)
