"""Who may write, where two processes take a third for dead at the same time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from retrieval.serving.rows import lease
from retrieval.serving.rows.lease import Lease


class Desk:
    """What engines keep of a lease: one text. `release` can be made to come late, as over a network."""

    def __init__(self, text: str) -> None:
        self.text: str | None = text
        self.turn = threading.Lock()
        self.late: dict[int, threading.Event] = {}

    def holder(self) -> str | None:
        with self.turn:
            return self.text

    def claim(self, text: str) -> bool:
        with self.turn:
            if self.text is not None:
                return False
            self.text = text
            return True

    def renew(self, text: str) -> None:
        with self.turn:
            self.text = text

    def release(self) -> None:
        if (gate := self.late.get(threading.get_ident())) is not None:
            gate.wait(10)
        with self.turn:
            self.text = None


def test_of_two_that_take_a_third_for_dead_one_holds_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_DEAD", 1.0), ("_PAUSE", 0.01), ("_SETTLE", 0.3)):
        monkeypatch.setattr(lease, name, seconds)
    desk: Any = Desk('{"holder": "gone", "process": "process 1"}')
    claimed, held = threading.Event(), []
    claim = desk.claim

    def noted(text: str) -> bool:
        done = bool(claim(text))
        if done:
            claimed.set()
        return done

    desk.claim = noted

    def write(name: str, late: bool) -> None:
        if late:
            desk.late[threading.get_ident()] = claimed  # its deletion arrives after the other's claim
        mine = Lease(desk, "the index", 5.0)
        try:
            mine.hold()
        except Exception as refused:
            held.append((name, str(refused)))
            return
        held.append((name, "holds"))
        desk.late.clear()
        time.sleep(0.6)
        mine.check()
        mine.give_back()

    threads = [
        threading.Thread(target=write, args=(name, late)) for name, late in (("a", False), ("b", True))
    ]
    for thread in threads:
        thread.start()
    time.sleep(1.6)
    within = [name for name, said in held if said == "holds"]
    for thread in threads:
        thread.join()
    assert len(within) == 1  # and the other waits until that one gives it back
    assert {name for name, said in held if said == "holds"} == {"a", "b"}
