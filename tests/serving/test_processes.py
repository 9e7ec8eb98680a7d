"""`retrieval serve --processes N`: real processes behind one port, some of which are killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import wire
from prometheus_client.parser import text_string_to_metric_families
from several_processes import Line, all_ready, logged, to_each, two_processes, until, vector

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc for whose a connection is"),
    pytest.mark.usefixtures("lines_closed"),
]


@pytest.fixture(scope="module")
def shared(bundle_path, photos, tmp_path_factory) -> Iterator[SimpleNamespace]:
    with two_processes(tmp_path_factory.mktemp("shared"), bundle_path, photos) as server:
        yield server


@pytest.fixture
def two(shared) -> SimpleNamespace:
    """The server of all tests that leave it as it was; one whose process was killed is whole again."""
    shared.pids = all_ready(shared, 2)
    return shared


def test_a_write_by_one_process_is_seen_by_the_other_at_once(two):
    lines = to_each(two, two.pids)
    for turn in range(10):
        by, other = lines[1 + turn % 2], lines[2 - turn % 2]
        assert by.ask("PUT", f"/v1/items/a{turn}", {"vector": vector(turn), "label": "new"})[0] == 200
        assert other.ask("GET", f"/v1/items/a{turn}")[1]["label"] == "new"
        found = other.ask("POST", "/v1/search", {"vector": vector(turn), "k": 1})[1]["results"]
        assert [(hit["id"], hit["distance"]) for hit in found] == [(f"a{turn}", 0.0)]
        assert by.ask("PUT", f"/v1/items/a{turn}", {"label": "changed"})[1]["replaced"] is True
        assert other.ask("GET", f"/v1/items/a{turn}")[1]["label"] == "changed"
    # Under one key, whichever process gets it, it is done once
    many = {"items": [{"id": f"b{number}", "vector": vector(100 + number)} for number in range(5)]}
    answers = [
        lines[number].ask("POST", "/v1/items", many, **{"Idempotency-Key": "k"}) for number in (2, 1, 2)
    ]
    assert answers == [(200, {"added": 5, "replaced": 0})] * 3
    assert lines[2].ask("POST", "/v1/items", {"items": []}, **{"Idempotency-Key": "k"})[0] == 400
    # What is refused is refused in the same words
    refused = [lines[number].ask("PUT", "/v1/items/none", {"label": "x"}) for number in (1, 2)]
    assert [(status, said["detail"]) for status, said in refused] == [(422, refused[0][1]["detail"])] * 2
    assert lines[2].ask("POST", "/v1/snapshots")[0] == 201
    assert lines[2].ask("DELETE", "/v1/items/a0")[1] == {"deleted": 1}
    assert lines[1].ask("GET", "/v1/items/a0")[0] == 404
    deleted = lines[2].ask("POST", "/v1/delete", {"filter": "label = 'changed'"})
    assert deleted == (200, {"deleted": 9})
    assert lines[1].ask("GET", "/v1/items?filter=label%3D'changed'")[1]["items"] == []
    # The record has each change once, whole, with the id of the request that the client saw
    audit = [json.loads(line) for line in (two.folder / "audit").read_text().splitlines()]
    assert [line["outcome"] for line in audit] == ["begun", "done"] * 21 + ["begun", "failed"] * 2 + ["begun", "done"] * 3  # fmt: skip
    assert {line["address"] for line in audit} == {"127.0.0.1"}


def scrape(line: Line) -> dict[str, dict[tuple[str, ...], float]]:
    status, text = line.ask("GET", "/metrics")
    assert status == 200
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation and "ultiprocess" not in family.documentation, family.name
        for sample in family.samples:
            values = found.setdefault(sample.name, {})
            assert tuple(sample.labels.values()) not in values, sample
            values[tuple(sample.labels.values())] = sample.value
    return found


def test_whichever_process_is_asked_the_figures_are_of_all_and_survive_a_kill(two):
    lines = to_each(two, two.pids)
    body = {"vector": vector(0), "k": 1}
    before = scrape(lines[1])
    for number, times in ((1, 3), (2, 5)):
        for turn in range(times):
            assert lines[number].ask("POST", "/v1/search", body)[0] == 200
            assert lines[number].ask("PUT", f"/v1/items/{number}-{turn}", {"vector": vector(turn)})[0] == 200
        wire.ask(two.port, b"nonsense\r\n\r\n")
    pages = [scrape(lines[number]) for number in (1, 2)]
    put, search = ("PUT", "/v1/items/{id}", "200"), ("POST", "/v1/search", "200")
    for page in pages:
        for what in (put, search):
            assert (
                page["retrieval_requests_total"][what] - before["retrieval_requests_total"].get(what, 0) == 8
            )
        assert page["retrieval_stage_seconds_count"]["search",] >= 8
        refused = "retrieval_connections_refused_total"
        assert page[refused]["main", "400"] - before.get(refused, {}).get(("main", "400"), 0) == 2
        assert page["retrieval_processes"] == {("wanted",): 2, ("answering",): 2}
        assert (
            page["retrieval_connections"]["main", "idle"] + page["retrieval_connections"]["main", "busy"] >= 2
        )
        assert page["retrieval_index_items"].keys() == {()}
    assert set(pages[0]) == set(pages[1]) >= set(before)
    both = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in two.pids.values())
    assert pages[0]["retrieval_memory_bytes"]["server",] > 0.7 * both * os.sysconf("SC_PAGE_SIZE")
    os.kill(two.pids[2], signal.SIGKILL)
    during = scrape(lines[1])  # those that it had counted are still counted
    two.pids = until(lambda: (now := all_ready(two, 2))[2] != two.pids[2] and now)
    after = scrape(lines[1])
    for now in (during, after):
        for name in (
            "retrieval_requests_total",
            "retrieval_stage_seconds_count",
            "retrieval_cpu_seconds_total",
        ):
            assert all(now[name][what] >= count for what, count in pages[1][name].items()), name


def test_a_killed_process_costs_its_own_connections_and_nothing_else(two):
    """Searches all the time on connections of both, and on new ones; the other's do not fail, and the killed one comes back."""
    pids, stop, seen = two.pids, threading.Event(), len(logged(two))
    lost: dict[int, int] = {}
    asked, wrong = [], []
    body = {"vector": vector(0), "k": 3}

    def steady(name: int, line: Line) -> None:
        while not stop.is_set():
            try:
                status, said = line.ask("POST", "/v1/search", body)
            except (OSError, http.client.HTTPException):
                lost[name] = lost.get(name, 0) + 1
                line = Line(two.port)  # nobody refuses it
                continue
            asked.append(status)
            if status != 200 or len(said["results"]) != 3:
                wrong.append(said)

    def fresh() -> None:
        request = wire.post(json.dumps(body).encode(), "application/json", "Connection: close")
        while not stop.is_set():
            answer = wire.ask(two.port, request)
            if answer.status == 0:
                lost[0] = lost.get(0, 0) + 1
            elif answer.status != 200:
                wrong.append(answer)

    held = [(number, line) for _ in range(2) for number, line in to_each(two, pids).items()]
    threads = [threading.Thread(target=steady, args=each) for each in held] + [threading.Thread(target=fresh)]
    for thread in threads:
        thread.start()
    try:
        for victim in (2, 1):
            before, pid = len(asked), pids[victim]
            until(lambda before=before: len(asked) > before + 50)
            lost.clear()
            os.kill(pid, signal.SIGKILL)
            pids = until(lambda pid=pid: pid not in (now := all_ready(two, 2)).values() and now)
            before = len(asked)
            until(lambda before=before: len(asked) > before + 50)
            if victim == 2:  # by then nobody's connection but its own had broken
                assert set(lost) <= {0, 2} and 1 <= lost[2] <= 2 and lost.get(0, 0) <= 1
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not wrong
    events = until(lambda: (found := logged(two)[seen:]) and len(found) >= 2 and found)
    assert [said["process"] for said in events] == [0, 0]
    assert all(re.fullmatch(r"Process [12] \(\d+\) ended: killed by SIGKILL. It is started again.", said["message"]) for said in events)  # fmt: skip


def test_a_write_waits_for_the_process_that_writes_and_is_never_lost(two):
    line = to_each(two, two.pids)[2]
    os.kill(two.pids[1], signal.SIGKILL)
    status, said = line.ask("PUT", "/v1/items/late", {"vector": vector(1)})
    while status == 503:  # on a machine that is so busy that it takes longer than the deadline to start
        assert "Try again" in said["detail"] or "Send it again" in said["detail"]
        status, said = line.ask("PUT", "/v1/items/late", {"vector": vector(1)})
    assert status == 200 and line.ask("GET", "/v1/items/late")[0] == 200


def test_a_client_that_leaves_and_one_that_is_slow_hold_up_nothing(two):
    line = to_each(two, two.pids)[2]
    head = "PUT /v1/items/slow HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 60\r\n\r\n"
    slow = []
    for _ in range(20):
        slow.append(wire.connect(two.port))
        slow[-1].sendall(head.encode() + b'{"vector": [1')
    for connection in slow[:10]:
        connection.close()
    assert line.ask("PUT", "/v1/items/quick", {"vector": vector(1)})[0] == 200
    for connection in slow[10:]:
        connection.sendall(b"," * 100)
        assert wire.read_answer(connection).status == 400
        connection.close()
    assert line.ask("GET", "/v1/items/slow")[0] == 404
    for number in (1, 2):  # what is too large is refused by whoever reads it
        with wire.connect(two.port) as connection:
            connection.sendall(head.replace("60", "3000000").encode())
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"x" * 3_000_000)
            assert wire.read_answer(connection).status == 413, number


def test_what_is_refused_before_it_has_arrived_is_refused_in_the_same_words(two):
    """Whoever makes changes has answered, and reads no more, while the other still hands the body on."""
    lines = to_each(two, two.pids)
    body = {"vector": vector(1), "metadata": {"long": "x" * 1_900_000}}
    for path in ("/v1/items/x?unknown=1", "/v1/items/%00"):
        answers = []
        for number in (1, 2, 2, 2):
            status, said = lines[number].ask("PUT", path, body)
            answers.append((status, said["detail"]))
        assert answers == [answers[0]] * 4 and answers[0][0] == 400
    assert all_ready(two, 2) == two.pids
