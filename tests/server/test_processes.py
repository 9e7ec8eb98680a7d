"""`retrieval serve --processes N`: several processes serve, and a killed one is replaced."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import wire

SEARCH = wire.post(
    json.dumps({"vector": [0.5] * 16, "k": 1}).encode(), "application/json", "Connection: close"
)


@contextmanager
def two_processes(folder: Path) -> Iterator[SimpleNamespace]:
    words = ["serve", str(folder / "i"), "--processes", "2", "--workers", "1", "--port", "0"]
    command = [sys.executable, "-m", "retrieval.cli", *words, "--log-format", "json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        pipes = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
        process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)
    try:
        line = process.stdout.readline()
        assert line.startswith("Serving 200 items"), line + (folder / "log").read_text()
        port = int(line.split("/ ")[0].rpartition(":")[2])
        yield SimpleNamespace(process=process, port=port, log=folder / "log", searches=0)
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.stdout.close()


def answering(server: SimpleNamespace, count: int) -> set[int]:
    """Search until `count` processes have answered; return their ids."""
    before = len(server.log.read_text().splitlines())

    def pids():
        assert wire.ask(server.port, SEARCH).status == 200
        server.searches += 1
        whole, _, _ = server.log.read_text().rpartition("\n")
        lines = map(json.loads, whole.splitlines()[before:])
        pids = {line["process"] for line in lines if line.get("route") == "/v1/search"}
        return pids if len(pids) >= count else set()

    return wire.until(pids, 60)


@pytest.fixture
def folder(living):
    return living.parent


def counted_requests(server: SimpleNamespace) -> float:
    name = b'retrieval_requests_total{method="POST",route="/v1/search",status="200"}'
    lines = wire.ask(server.port, wire.get("/metrics")).body.splitlines()
    return sum(float(line.rpartition(b" ")[2]) for line in lines if line.startswith(name))


def test_both_processes_answer_and_a_killed_one_is_replaced(folder):
    with two_processes(folder) as server:
        pids = answering(server, 2)
        assert len(pids) == 2 and server.process.pid not in pids
        # Each process adds up both. A request is counted after its answer, so the last may lag.
        searches = server.searches
        wire.until(lambda: counted_requests(server) == searches)
        assert {counted_requests(server) for _ in range(8)} == {searches}
        os.kill(min(pids), signal.SIGKILL)
        wire.until(
            lambda: answering(server, 2) - {min(pids)} and min(pids) not in answering(server, 2), 60
        )
        wire.until(lambda: counted_requests(server) > searches)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_failed_start_is_one_sentence(folder, cli, index_path):
    (folder / "i" / "items.sqlite").write_bytes(b"nonsense")
    outcome = cli("serve", folder / "i", "--port", "0", "--processes", "2")
    assert outcome.code == 2 and "Traceback" not in outcome.err and not outcome.out
    (folder / "keys").write_text("nonsense")
    outcome = cli("serve", index_path, "--port", "0", "--processes", "2", "--keys", folder / "keys")
    assert outcome.code == 2 and "line 1 is not a JSON object" in outcome.err


def test_a_process_that_cannot_start_ends_the_server_with_exit_code_2(folder):
    words = ["serve", str(folder / "i"), "--processes", "2", "--port", "0"]
    words += ["--audit", str(folder / "none" / "audit.log")]
    command = [sys.executable, "-m", "retrieval.cli", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert "audit.log" in ended.stderr
    assert ended.stderr.endswith("could not start; the log above says why.\n"), ended.stderr
