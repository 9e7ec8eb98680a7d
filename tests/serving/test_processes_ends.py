"""`retrieval serve --processes N`: how they end, what they leave behind, and why they do not start."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from retrieval.cli.serving import serve_command
from retrieval.serving.http.access.key_file import add_key
from retrieval.serving.http.access.keys import new_key
from retrieval.serving.index.index import Index
from several_processes import Line, all_ready, children, logged, to_each, two_processes, until, vector

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc for whose a connection is"),
    pytest.mark.usefixtures("lines_closed"),
]


@pytest.fixture
def own(bundle_path, photos, tmp_path) -> Iterator[SimpleNamespace]:
    """A server of one's own, to be ended."""
    with two_processes(tmp_path, bundle_path, photos) as server:
        yield server


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
    with Index.open(own.folder / "i", threads=1) as index:
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
