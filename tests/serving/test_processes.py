"""`retrieval serve --processes N`: real processes behind one port, some of which are killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import wire
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from retrieval.cli.serving import serve_command
from retrieval.serving.http.access.key_file import add_key
from retrieval.serving.http.access.keys import new_key
from retrieval.serving.index.creating import create_index
from retrieval.serving.index.living import LivingIndex

WIDTH = 16
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc for whose a connection is")


def until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)
    return found


def children(server: SimpleNamespace) -> dict[int, int]:
    """The pid of each process that serves, by its number."""
    found = {}
    for path in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for pid in path.read_text().split():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it ends just now, or begins
                found[int(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-2])] = int(pid)
    return found


def all_ready(server: SimpleNamespace, of: int) -> dict[int, int]:
    def ready() -> bool:
        answer = wire.ask(server.port, wire.get("/readyz", "Connection: close"))  # by whoever is there
        return answer.status == 200 and json.loads(answer.body)["processes"] == {"ready": of, "of": of}

    until(ready)
    return children(server)


class Line:
    """A connection that stays open, whose process is known."""

    opened: ClassVar[list[Line]] = []

    def __init__(self, port: int) -> None:
        self.opened.append(self)
        self.http = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self.ask("GET", "/livez")
        ours = self.http.sock.getsockname()[1]
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        (self.socket,) = [
            f"socket:[{row[9]}]"
            for row in rows
            if row[1].endswith(f":{port:04X}") and row[2].endswith(f":{ours:04X}")
        ]

    def ask(self, method: str, path: str, said: Any = None, **headers: str) -> tuple[int, Any]:
        body = None if said is None else json.dumps(said)
        kind = {} if said is None else {"Content-Type": "application/json"}
        self.http.request(method, path, body, {**kind, **headers})
        answer = self.http.getresponse()
        content = answer.read()
        return answer.status, json.loads(content) if content[:1] == b"{" else content

    def owner(self, pids: dict[int, int]) -> int:
        for number, pid in pids.items():
            with contextlib.suppress(OSError):
                if self.socket in {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()}:
                    return number
        raise AssertionError("nobody has it")


def to_each(server: SimpleNamespace, pids: dict[int, int]) -> dict[int, Line]:
    """A connection to each process."""
    lines: dict[int, Line] = {}
    spare = []

    def found() -> bool:
        line = Line(server.port)
        spare.append(line)
        lines.setdefault(line.owner(pids), line)
        return len(lines) == len(pids)

    until(found)
    for line in spare:
        if line not in lines.values():
            line.http.close()
    return lines


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while Line.opened:
        Line.opened.pop().http.close()


@contextlib.contextmanager
def two_processes(folder: Path, bundle: Path, photos: Path) -> Iterator[SimpleNamespace]:
    """Two processes over an index of some photos, that are changed and recorded."""
    create_index(folder / "i", bundle, [photos / "1"], progress=False)
    words = [
        "--open",
        "admin",
        "--processes",
        "2",
        "--port",
        "0",
        "--health-port",
        "0",
        "--log-format",
        "json",
    ]
    words += ["--audit", str(folder / "audit"), "--snapshots", str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "retrieval.cli", "serve", str(folder / "i"), *words],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    with process:
        try:
            line = process.stdout.readline()
            assert "Serving" in line, (folder / "log").read_text()
            port = int(line.split(" at ")[1].split("/ ")[0].rpartition(":")[2])
            server = SimpleNamespace(process=process, port=port, folder=folder)
            server.pids = all_ready(server, 2)
            yield server
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture(scope="module")
def shared(bundle_path, photos, tmp_path_factory) -> Iterator[SimpleNamespace]:
    with two_processes(tmp_path_factory.mktemp("shared"), bundle_path, photos) as server:
        yield server


@pytest.fixture
def two(shared) -> SimpleNamespace:
    """The server of all tests that leave it as it was; one whose process was killed is whole again."""
    shared.pids = all_ready(shared, 2)
    return shared


@pytest.fixture
def own(bundle_path, photos, tmp_path) -> Iterator[SimpleNamespace]:
    """A server of one's own, to be ended."""
    with two_processes(tmp_path, bundle_path, photos) as server:
        yield server


def vector(number: float) -> list[float]:
    return [float(number), *[1.0] * (WIDTH - 1)]


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


def logged(server: SimpleNamespace) -> list[dict[str, Any]]:
    """The events in the log; each line is whole."""
    lines = map(json.loads, (server.folder / "log").read_text().splitlines())
    return [said for said in lines if "message" in said]


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


def test_sigterm_finishes_what_was_accepted_and_leaves_nothing_behind(own):
    told: list[str] = []
    others: list[int] = []
    folder = next(Path(each) for each in _folders(own.pids[1]))

    def write(number: int, line: Line) -> None:
        for turn in range(100_000):
            id = f"{number}-{turn}"
            try:
                status, _ = line.ask("PUT", f"/v1/items/{id}", {"vector": vector(turn)})
            except (OSError, http.client.HTTPException):
                return
            if status != 200:
                others.append(status)
                return
            told.append(id)

    lines = [line for _ in range(2) for line in to_each(own, own.pids).values()]
    threads = [threading.Thread(target=write, args=each) for each in enumerate(lines)]
    for thread in threads:
        thread.start()
    until(lambda: len(told) >= 40)
    own.process.send_signal(signal.SIGTERM)
    assert own.process.wait(15) == 0
    for thread in threads:
        thread.join(15)
    assert set(others) <= {503}
    with LivingIndex.open(own.folder / "i", threads=1) as index:
        there = {item.id for item in index.scan(limit=100_000)}
    assert set(told) <= there
    new = {id for id in there if re.fullmatch(r"\d-\d+", id)}
    assert len(new - set(told)) <= len(threads)  # written, and the answer was cut off
    assert not any(Path(f"/proc/{pid}").exists() for pid in own.pids.values()) and not folder.exists()
    assert [said for said in logged(own) if said["level"] == "ERROR" or not said["process"]] == []


def _folders(pid: int) -> list[str]:
    """The folder of a process's group: of a file there that it has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return [str(Path(path).parents[1]) for path in re.findall(r"/\S+/figures/\S+\.db", maps)]


def test_without_the_supervisor_the_others_end(own):
    pids, folder = own.pids, _folders(own.pids[1])[0]
    os.kill(own.process.pid, signal.SIGKILL)
    until(lambda: not any(_runs(pid) for pid in pids.values()))
    until(lambda: not Path(folder).exists())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", own.port))


@pytest.fixture
def temporary() -> Iterator[Path]:
    """An empty folder whose path leaves room for a socket's name; `tmp_path` is too long for that in a worker of xdist."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_what_killed_processes_left_is_cleared_by_the_next_server(
    bundle_path, photos, tmp_path, temporary, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(temporary))
    for name in ("killed", "next"):
        (tmp_path / name).mkdir()
    with two_processes(tmp_path / "killed", bundle_path, photos) as killed:
        folder = Path(_folders(killed.pids[1])[0])
        killed.process.send_signal(signal.SIGSTOP)  # it starts none again
        for pid in killed.pids.values():
            os.kill(pid, signal.SIGKILL)
        killed.process.kill()
        killed.process.wait()
    assert folder.parent == temporary and (folder / "figures").is_dir()
    with two_processes(tmp_path / "next", bundle_path, photos) as server:
        own = Path(_folders(server.pids[1])[0])
        assert not folder.exists() and own.is_dir()
    assert not list(temporary.glob("retrieval-*"))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_keys_are_read_again_by_all_and_sighup_ends_none(served, index_path, tmp_path):
    keys = tmp_path / "keys"

    def made(name: str) -> str:
        sent, kept = new_key(name, "admin")
        add_key(keys, kept)
        return sent

    made("first")
    server = served(index_path, "--keys", str(keys), "--processes", "2")
    pids = all_ready(server, 2)
    lines = to_each(server, pids)
    later = made("later")
    server.process.send_signal(signal.SIGHUP)
    for line in lines.values():
        until(lambda line=line: line.ask("GET", "/v1/index", Authorization=f"Bearer {later}")[0] == 200)
    assert children(server) == pids


def refused(*words: str, cwd: Path) -> str:
    """What `retrieval serve` says that refuses to start."""
    ended = subprocess.run(
        [sys.executable, "-m", "retrieval.cli", "serve", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=60,
    )
    assert ended.returncode == 2 and ended.stdout == "", ended.stderr
    return ended.stderr


def test_what_cannot_start_says_why_once(index_path, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = refused(str(index_path), "--processes", "2", "--port", port, cwd=tmp_path)
    assert said.startswith("Error: Cannot listen on 127.0.0.1, port") and said.count("\n") == 1
    said = refused("none.index", "--processes", "3", "--port", "0", cwd=tmp_path)
    assert said.startswith("Error: ") and "none.index" in said and said.count("\n") == 1
    said = refused(str(index_path), "--host", "0.0.0.0", "--processes", "2", "--port", "0", cwd=tmp_path)
    assert "This server has no keys" in said and said.count("\n") == 1
    for number in ("0", "1000", "-1", "two"):
        ended = CliRunner().invoke(serve_command, [str(index_path), "--processes", number])
        assert ended.exit_code == 2 and "Error: Invalid value for '--processes': " in ended.output
