"""A process that forks after a search: the child searches, whatever threads the parent had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from retrieval.serving.bundle import Bundle
from retrieval.serving.store.contract import widths_of
from retrieval.serving.store.folder import create_local
from retrieval.serving.store.structure import StructureChoice

FORKED = """
import os, sys, time
import numpy as np
from pathlib import Path
from retrieval.serving.store import structure
from retrieval.serving.store.contract import Item
from retrieval.serving.store.local import LocalStore

structure.MIN_ROWS = 1000
vectors = np.random.default_rng(0).normal(size=(25_000, 16)).astype(np.float32)
store = LocalStore(Path(sys.argv[1]), upkeep=False)
bundle = store.generations()[0].bundle
store.upsert([Item(f"id{n}", arrays={"vector": v}) for n, v in enumerate(vectors)], bundle)
store.compact()

def found(count):
    return [{item.id for item in one} for one in store.search(vectors[:count], 5, bundle)]

before = found(int(sys.argv[2]))
child = os.fork()
if not child:
    try:
        assert found(1)[0] == before[0] and found(64)[0] == before[0]
        store.upsert([Item("of the child", arrays={"vector": vectors[0]})], bundle)
        assert store.count() == 25_001 and "of the child" in found(1)[0]
        os._exit(0)
    except BaseException as fault:
        print(repr(fault), flush=True)
        os._exit(1)
end = time.monotonic() + 60
while time.monotonic() < end:
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        break
    time.sleep(0.02)
else:
    os.kill(child, 9)
    sys.exit("the child hangs")
assert status == 0, status
assert "of the child" in found(1)[0] and store.count() == 25_001
store.delete(["of the child"])
assert found(1)[0] == before[0]
store.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("backend", "queries"), [("flat", 1), ("hnsw", 64)])
def test_a_child_searches_and_writes(
    backend: str, queries: int, tmp_path: Path, plain_bundle: Path
) -> None:
    bundle = Bundle.open(plain_bundle, threads=1)
    create_local(tmp_path / "i", bundle, widths_of(bundle), structure=StructureChoice(backend))
    line = [sys.executable, "-W", "ignore", "-c", FORKED, tmp_path / "i", str(queries)]
    environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


BUSY = """
import os, sys, threading
from pathlib import Path
from retrieval.errors import StoreError
from retrieval.serving.store.local import LocalStore

store = LocalStore(Path(sys.argv[1]), upkeep=False)
inside, go = threading.Event(), threading.Event()

def read():
    with store.record.reading():
        inside.set()
        go.wait()

threading.Thread(target=read).start()
inside.wait()
child = os.fork()
if not child:
    try:
        store.count()
    except StoreError as fault:
        print(fault, flush=True)
    os._exit(0)
os.waitpid(child, 0)
go.set()
assert store.count() == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_of_a_store_in_use_is_told(tmp_path: Path, plain_bundle: Path) -> None:
    bundle = Bundle.open(plain_bundle, threads=1)
    create_local(tmp_path / "i", bundle, widths_of(bundle))
    line = [sys.executable, "-W", "ignore", "-c", BUSY, tmp_path / "i"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "was in use when this process was forked. Open it in the child" in done.stdout
