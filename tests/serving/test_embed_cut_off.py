"""`retrieval embed --ray` where the network fails: a node in a network namespace of its own is cut
off in the middle.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from retrieval.serving.embedding.embedding import embed_sources

pytest.importorskip("ray", reason="the extra ray is not installed")
pytest.importorskip("pyarrow", reason="the extra parquet is not installed")

_HEALTH = '{"health_check_initial_delay_ms":0,"health_check_period_ms":1000,"health_check_failure_threshold":3,"health_check_timeout_ms":1000}'


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip())


@pytest.fixture
def spaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them."""
    one, other = (f"r{os.getpid()}{letter}" for letter in "ab")
    if shutil.which("ip") is None:
        pytest.skip("no iproute2 on this machine")
    try:
        ip("netns", "add", one)
    except OSError as fault:
        pytest.skip(f"no network namespaces here: {fault}")
    try:
        ip("netns", "add", other)
        ip("link", "add", one, "netns", one, "type", "veth", "peer", "name", other, "netns", other)
        for space, host in ((one, 1), (other, 2)):
            ip("-n", space, "addr", "add", f"10.77.0.{host}/24", "dev", space)
            ip("-n", space, "link", "set", space, "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield one, other
    finally:
        for space in (one, other):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


@pytest.fixture
def start(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a command of Ray in a namespace; ended with all that it started."""
    started: list[subprocess.Popen[bytes]] = []

    def run(space: str, *words: str) -> subprocess.Popen[bytes]:
        command = [
            "ip",
            "netns",
            "exec",
            space,
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            "--num-cpus=2",
            "--object-store-memory=100000000",
            *words,
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=None, start_new_session=True
        )
        started.append(process)
        return process

    yield run
    for process in reversed(started):
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            end = time.monotonic() + 10
            while process.poll() is None and time.monotonic() < end:
                time.sleep(0.1)


def test_a_node_that_is_cut_off_costs_no_item(spaces, start, photos, bundle_path, tmp_path):
    head, node = spaces
    folder = tmp_path / "many"
    folder.mkdir()
    with Image.open(next(photos.rglob("*.png"))) as opened:
        opened.resize((1500, 1500)).save(folder / "000.jpg")
    for number in range(1, 400):
        (folder / f"{number:03}.jpg").write_bytes((folder / "000.jpg").read_bytes())
    embed_sources(bundle_path, folder, tmp_path / "wanted", batch=4, part=5, progress=False)

    temporary = Path("/tmp") / f"r{os.getpid()}"  # sockets have short names
    common = "--disable-usage-stats"
    start(
        head,
        "--head",
        "--port=6379",
        "--node-ip-address=10.77.0.1",
        "--include-dashboard=false",
        common,
        f"--temp-dir={temporary}",
        f"--system-config={_HEALTH}",
    )
    try:
        seen = SimpleNamespace(end=time.monotonic() + 120)
        ask = [
            "ip",
            "netns",
            "exec",
            head,
            sys.executable,
            "-c",
            "import socket; socket.create_connection(('10.77.0.1', 6379), 1)",
        ]
        while subprocess.run(ask, capture_output=True).returncode:
            assert time.monotonic() < seen.end
        start(node, "--address=10.77.0.1:6379", "--node-ip-address=10.77.0.2", common)
        log = (tmp_path / "log").open("wb+")
        command = [
            sys.executable,
            "-m",
            "retrieval.cli",
            "embed",
            str(bundle_path),
            str(folder),
            "--batch",
            "4",
            "--part",
            "5",
        ]
        command += ["--output", str(tmp_path / "v"), "--ray", "10.77.0.1:6379", "--json"]
        driver = subprocess.Popen(
            ["ip", "netns", "exec", head, *command], stdout=log, stderr=log, cwd=tmp_path
        )
        try:
            while len(list((tmp_path / "v").glob("part-*.parquet"))) < 8:
                assert driver.poll() is None and time.monotonic() < seen.end + 60, (
                    tmp_path / "log"
                ).read_text()
                time.sleep(0.02)
            ip("-n", node, "link", "set", node, "down")
            assert driver.wait(240) == 0, (tmp_path / "log").read_text()
        finally:
            driver.kill()
            driver.wait()
            log.close()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for path in sorted((tmp_path / "wanted").glob("part-*.parquet")):
        assert path.read_bytes() == (tmp_path / "v" / path.name).read_bytes()
