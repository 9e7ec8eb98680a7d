"""Honest clients that search a server during an attack."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from wire import Answer, ask


@dataclass
class Seen:
    """Answers to honest clients.

    Attributes:
        answered: seconds of each successful search.
        refused: number of answers 503, by sentence, and of answers 429.
        late: missing answers and answers after the deadline.
        wrong: other answers, such as results that differ from those before the attack.
    """

    answered: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    late: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def note(self, answer: Answer, expected: object, took: float, deadline: float) -> None:
        """Count one answer."""
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
            said = f"status {answer.status}"
            if answer.status == 200:
                # The server counts from a request's header to its answer. The rest of the time, the
                # connection waited to be accepted, or this client to run.
                said += f", {json.loads(answer.body)['took_ms'] / 1000:.1f} s by the server"
            self.late.append(f"{took:.1f} s, {said}")


class HonestClients:
    """Clients that search repeatedly, from now until `stop`.

    Args:
        port: port of the server.
        searches: requests to repeat in turn.
        deadline: the server's deadline in seconds.
        count: number of clients.
        pause: seconds between two searches of a client.
    """

    def __init__(
        self, port: int, searches: list[bytes], deadline: float, count: int = 2, pause: float = 0.02
    ) -> None:
        self._port, self._searches, self._deadline, self._pause = port, searches, deadline, pause
        self._seen, self._lock, self._stop = Seen(), threading.Lock(), threading.Event()
        self._threads = [
            threading.Thread(target=self._search, args=(number,)) for number in range(count)
        ]
        try:
            self._expected = [results(ask(port, search)) for search in searches]
        except OSError:  # the server has ended already
            self._threads = []
        for thread in self._threads:
            thread.start()

    def _search(self, turn: int) -> None:
        while not self._stop.wait(self._pause):
            turn = (turn + 1) % len(self._searches)
            began = time.monotonic()
            try:
                answer = ask(self._port, self._searches[turn], 3 * self._deadline)
            except OSError as fault:
                answer = Answer(0, {}, str(fault).encode())
            took = time.monotonic() - began
            with self._lock:
                self._seen.note(answer, self._expected[turn], took, self._deadline)

    def stop(self) -> Seen:
        """End the clients; return the answers to them."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return self._seen


def results(answer: Answer) -> object:
    """Return the results of a search, or the answer itself if the search failed."""
    return json.loads(answer.body)["results"] if answer.status == 200 else answer
