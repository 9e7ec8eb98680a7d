"""A short attack on a real server; `attack.py` is the long one, run by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("attack", Path(__file__).with_name("attack.py"))
attack = importlib.util.module_from_spec(_spec)
sys.modules["attack"] = attack
_spec.loader.exec_module(attack)
import hostile_writes as writes  # noqa: E402  attack.py has put its folder on the path

REQUESTS = 600


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacked")
    index, sound = attack.prepare(folder)
    worst = (case for case in attack.worst(0) if len(case[1]) < 2_000_000)
    images = [*worst, *attack.damaged(0, 2)]
    return index, folder / "log", attack.Generator(images, sound, 16)


def test_requests_are_the_same_for_a_number(prepared):
    _, _, generator = prepared
    requests = [generator.make(number) for number in range(100)]
    assert requests == [generator.make(number) for number in range(100)]
    assert len({request.kind.partition(",")[0] for request in requests}) == 10
    assert len({request.manner for request in requests}) >= 5


def test_an_attack_costs_others_nothing(prepared):
    """No 5xx that a client caused, no honest search late, wrong or refused, memory back, an end in
    time.
    """
    index, log, generator = prepared
    sound = generator.sound
    server = attack.Server.start(index, log)
    try:
        attack.Attack(server, generator, sound, 10**6).run(150, 32)
        result = attack.Attack(server, generator, sound).run(REQUESTS, 32)
    finally:
        took, code = server.end()
    text = attack.report(result, [took], 0, REQUESTS)
    assert not result.faults, text
    assert not result.honest.wrong, text
    assert not result.honest.late, text
    assert len(result.honest.answered) > 50, text
    before, after = result.memory
    assert after.total - before.total < 60_000_000, text
    assert (took < attack.GRACE, code) == (True, 0)
    assert len(log.read_text().splitlines()) < 200


def test_requests_that_write_are_the_same_for_a_number():
    """They go to one index by all routes, with the keys that there are."""
    keys = {"admin": "Bearer a", "read": "Bearer r", "none": None}
    images = [("a", b"x" * 100)]
    requests = [
        writes.WritingGenerator(images, b"y" * 50, 16, keys, "open").make(number)
        for number in range(400)
    ]
    again = writes.WritingGenerator(images, b"y" * 50, 16, keys, "open")
    assert requests == [again.make(number) for number in range(400)]
    kinds = {request.kind.partition(",")[0] for request in requests}
    assert {
        "put image",
        "put json",
        "several",
        "batch",
        "delete",
        "repeated",
        "list",
        "other index",
    } <= kinds
    text = b"".join(request.content for request in requests)
    for reply in (b"/v1/indexes/open/items", b"/v1/indexes/still/", b"Authorization: Bearer a"):
        assert reply in text
