import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import httpx
import makers
import pytest
from forking import Forked, Forker
from retrieval.index.index import create_index


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
    """A process that has loaded the package; most servers are forked from it, which is faster."""
    process = Forker()
    yield process
    process.close()


@pytest.fixture
def served(forker):
    """A function that starts `retrieval serve` on a free port and waits until it is ready.

    It returns the server's `url`, `port`, `process` and a `client`. A server with another `python`
    or a `program` is started as a user starts it.
    """
    with ExitStack() as stack:
        yield _starter(stack, forker)


@pytest.fixture(scope="module")
def shared(forker):
    """`served` for a whole module: one server for each index and its options. Not to be stopped."""
    with ExitStack() as stack:
        yield functools.cache(_starter(stack, forker))


def _starter(stack: ExitStack, forker: Forker) -> Callable[..., SimpleNamespace]:
    def start(index, *options, python=sys.executable, program=(), wait=True):
        words = ["serve", str(index), "--port", "0", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if program or python != sys.executable:
            pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
            process = subprocess.Popen(
                [python, *(program or ("-m", "retrieval.cli")), *words],
                text=True,
                cwd=index.parent,  # `-m` looks there first, and must not find the source tree
                env=environment,
                **pipes,
            )
        else:
            process = Forked(forker, words, index.parent, environment)
        stack.callback(_end, process)
        line = process.stdout.readline()
        assert "Serving" in line, line + process.stderr.read()
        url = line.split(" at ")[1].split("/ ")[0]
        client = stack.enter_context(httpx.Client(base_url=url, timeout=30))
        if wait:
            _wait_until_ready(client)
        port = int(url.rpartition(":")[2])
        return SimpleNamespace(url=url, port=port, process=process, client=client)

    return start


def _end(process: subprocess.Popen | Forked) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
    process.stderr.close()


def _wait_until_ready(client: httpx.Client) -> None:
    end = time.monotonic() + 20
    while (answer := client.get("/readyz")).status_code != 200:
        assert time.monotonic() < end, f"never ready: {answer.text}"
        time.sleep(0.02)
