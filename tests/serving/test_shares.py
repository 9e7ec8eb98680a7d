"""What each of several processes takes of the server's limits, and lines of a log that several write."""

from __future__ import annotations

import io
import json
import math

import pytest
from retrieval.serving.http.access.gate import Access
from retrieval.serving.http.access.keys import Allowance
from retrieval.serving.http.access.meter import Limits
from retrieval.serving.http.access.roles import Caller
from retrieval.serving.http.log import Log, _blocks
from retrieval.serving.http.processes.group import share
from retrieval.serving.http.settings import Settings

DIVIDED = ("workers", "connections", "connections_per_address", "log_lines")


@pytest.mark.parametrize("of", [1, 2, 3, 7, 128])
def test_shares_together_are_the_whole_and_none_is_nothing(of):
    whole = Settings(processes=of, workers=5)
    part = share(whole)
    for name in DIVIDED:
        assert getattr(part, name) == max(
            8 if name == "connections" else 1, math.ceil(getattr(whole, name) / of)
        )
    assert part.body_memory * of >= whole.body_memory >= part.body_memory
    assert part.body_memory >= 2 * whole.batch_bytes  # a request of the largest size finds room
    assert (part.waiting, part.writes, part.deadline) == (whole.waiting, whole.writes, whole.deadline)


def test_limits_of_a_key_and_of_all_are_shared_and_no_limit_stays_none():
    assert Limits().share(3) == Limits() and Limits(1.0, 2, 3, 4).share(1) == Limits(1.0, 2, 3, 4)
    assert Limits(10.0, 5, 1, 1000).share(4) == Limits(2.5, 2, 1, 250)
    access = Access(Settings(processes=2, requests_per_second=9.0, concurrent=3))
    key = Caller("shop", "read", "", None, Allowance(concurrent=8, bytes_per_minute=7))
    assert access._limits(Caller("", "read", "")) == Limits(4.5, 0, 2, 0)
    assert access._limits(key) == Limits(4.5, 0, 4, 4)


def test_lines_are_written_in_blocks_of_whole_ones_that_a_pipe_takes_at_once():
    lines = [f"{number} " + "é" * (number * 37 % 1500) for number in range(200)] + ["x" * 9000, "end"]
    blocks = list(_blocks(lines))
    assert b"".join(blocks).decode().splitlines() == lines
    assert all(block.endswith(b"\n") and (len(block) <= 4096 or block.count(b"\n") == 1) for block in blocks)
    assert len(blocks) < len(lines)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_line_has_the_number_of_its_process(form):
    for number in (None, 0, 3):
        stream = io.StringIO()
        log = Log(form, stream=stream, process=number)
        log.request({"method": "GET", "route": "/", "status": 200}, good=True)
        log.close()
        (line,) = stream.getvalue().splitlines()
        if form == "json":
            assert json.loads(line).get("process") == number
        else:
            assert line.endswith("" if number is None else f" process={number}") and ("process" in line) == (
                number is not None
            )
