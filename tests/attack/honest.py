"""Honest clients that search a server during an attack, in a process of their own.

The attacking process makes images of many megapixels, during which its other threads stand still
for seconds. In that process, clients would measure the attackers' speed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import wire
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
    """A process with clients that search repeatedly, from now until `stop`.

    Args:
        port: port of the server.
        searches: requests to repeat in turn.
        deadline: the server's deadline in seconds.
        certificate: file of the certificate to trust; `None` for connections without TLS.
        count: number of clients.
        pause: seconds between two searches of a client.
    """

    def __init__(
        self,
        port: int,
        searches: list[bytes],
        deadline: float,
        certificate: str | None = None,
        count: int = 2,
        pause: float = 0.02,
    ) -> None:
        task = {
            "port": port,
            "searches": [search.decode("latin-1") for search in searches],
            "deadline": deadline,
            "certificate": certificate,
            "count": count,
            "pause": pause,
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "started\n"

    def stop(self) -> Seen:
        """End the clients; return the answers to them."""
        output, _ = self._process.communicate()
        return Seen(**json.loads(output))


def results(answer: Answer) -> object:
    """Return the results of a search, or the answer itself if the search failed."""
    return json.loads(answer.body)["results"] if answer.status == 200 else answer


class _Clients:
    """The threads of `HonestClients`, in its process."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._port, self._deadline, self._pause = task["port"], task["deadline"], task["pause"]
        self._searches = [search.encode("latin-1") for search in task["searches"]]
        self._lock, self._stop, self.seen = threading.Lock(), threading.Event(), Seen()
        wire.trust(task["certificate"])
        self._threads = [
            threading.Thread(target=self._search, args=(number,)) for number in range(task["count"])
        ]
        try:
            self._expected = [results(ask(self._port, search)) for search in self._searches]
        except OSError:  # the server has ended already
            self._threads = []

    def run(self) -> None:
        """Search until the standard input ends."""
        for thread in self._threads:
            thread.start()
        print("started", flush=True)
        sys.stdin.read()
        self._stop.set()
        for thread in self._threads:
            thread.join()

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
                self.seen.note(answer, self._expected[turn], took, self._deadline)


if __name__ == "__main__":
    clients = _Clients(json.loads(sys.stdin.readline()))
    clients.run()
    print(json.dumps(asdict(clients.seen)))
