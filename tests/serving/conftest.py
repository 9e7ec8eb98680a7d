import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import makers
import pytest
from forking import Forked, Forker
from retrieval.serving.index.index import create_index

PROGRAM = ("-m", "retrieval.cli")


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """200 handwritten digits as PNG files, one folder per class. Not to be changed."""
    folder = tmp_path_factory.mktemp("photos") / "digits"
    makers.write_digits(folder, 200)
    return folder


@pytest.fixture(scope="session")
def bundle_path(tmp_path_factory):
    """A bundle of images without a rescorer. Not to be changed."""
    return makers.make_bundle(tmp_path_factory.mktemp("bundle") / "bundle", variant=True)


@pytest.fixture(scope="session")
def index_path(tmp_path_factory, photos, bundle_path):
    """An index of `photos`. Not to be changed."""
    path = tmp_path_factory.mktemp("index") / "digits.index"
    create_index(path, bundle_path, [photos], progress=False)
    return path


@pytest.fixture
def living(index_path, tmp_path):
    """A copy of that index, to be changed."""
    return Path(shutil.copytree(index_path, tmp_path / "i"))


@pytest.fixture
def empty(bundle_path, tmp_path):
    """An index without items, to be changed."""
    create_index(tmp_path / "i", bundle_path, progress=False)
    return tmp_path / "i"


@pytest.fixture(scope="session")
def forker():
    """What servers are forked from."""
    started = Forker()
    yield started
    started.close()


@pytest.fixture
def served(forker):
    """Start `retrieval serve` in a process of its own on a free port, and wait until it is ready;
    gives its url and process. One that is to start as a user starts it is given its `program`.
    """
    yield from _servers(forker)


@pytest.fixture(scope="module")
def shared(forker):
    """As `served`, but the tests of a module share one server for each index and its options. Not
    to be stopped.
    """
    for start in _servers(forker):
        yield functools.cache(start)


def _servers(forker: Forker) -> Iterator[Callable[..., SimpleNamespace]]:
    started, clients = [], []

    def start(index, *options, python=sys.executable, verify=True, wait=True, program=()):
        words = ["serve", str(index), "--port", "0", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if program or python != sys.executable:
            process = subprocess.Popen(
                [python, *(program or PROGRAM), *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=index.parent,  # `-m` looks here first: not the source tree
                env=environment,
            )
        else:
            process = Forked(forker, words, index.parent, environment)
        started.append(process)
        line = process.stdout.readline()
        assert "Serving" in line, line + process.stderr.read()
        url = line.split(" at ")[1].split("/ ")[0]
        server = SimpleNamespace(
            url=url, process=process, client=httpx.Client(base_url=url, timeout=30, verify=verify)
        )
        server.port = int(url.rpartition(":")[2])
        clients.append(server.client)
        if wait:
            _until_ready(server.client)
        return server

    yield start
    for client in clients:
        client.close()
    for process in started:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        process.stderr.close()


def _until_ready(client: httpx.Client) -> None:
    end = time.monotonic() + 20
    while (answer := client.get("/readyz")).status_code != 200:
        assert time.monotonic() < end, f"never ready: {answer.text}"
        time.sleep(0.02)
