"""Files that are cut short while a process has mapped them: an error, never a dead process."""

import os
import shutil

import numpy as np
import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.errors import StoreError
from retrieval.store.contract import Item, widths_of
from retrieval.store.folder import create_local
from retrieval.store.local import LocalStore
from retrieval.store.search_structure import COMPANION_MIN_ROWS, StructureChoice

WIDTH = 16
COUNT = COMPANION_MIN_ROWS + 1


@pytest.fixture(scope="module")
def vectors():
    """Few directions, as features of images have, so that exact search has a companion."""
    rng = np.random.default_rng(0)
    low = rng.normal(size=(COUNT, 4)) @ rng.normal(size=(4, WIDTH))
    return (low + 0.05 * rng.normal(size=(COUNT, WIDTH))).astype(np.float32)


@pytest.fixture(scope="module")
def indexes(tmp_path_factory, plain_bundle, vectors):
    """The folder of an index for each structure; `flat` has too few rows for any."""
    bundle = Bundle.open(plain_bundle, threads=1)
    root = tmp_path_factory.mktemp("indexes")
    for name, backend, count in (
        ("flat", "flat", 5_000),
        ("companion", "flat", COUNT),
        ("hnsw", "hnsw", 20_000),
    ):
        create_local(root / name, bundle, widths_of(bundle), structure=StructureChoice(backend))
        with LocalStore(root / name, upkeep=False) as store:
            items = [Item(str(n), arrays={"vector": v}) for n, v in enumerate(vectors[:count])]
            store.upsert(items, bundle.sha256)
            store.compact()
    return root


SEARCHES = """
import os, shutil, sys, threading, time
from pathlib import Path
import numpy as np
from retrieval.errors import StoreError
from retrieval.store.local import LocalStore

folder, pattern, bundle, trials = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
(path,) = (folder / "arrays").glob(pattern)
whole, (file,) = path.read_bytes(), (folder / "arrays").glob("*.vector")
queries = np.fromfile(file, "<f4", 16 * 400).reshape(-1, 16)
outcomes, stop = [], False

def search(store, start):
    while not stop:
        for row in range(start, 400, 8):
            try:
                for n, answer in enumerate(store.propose(queries[row:row + 8], 2, bundle)):
                    outcomes.append(answer.items[0].id == str(row + n) or f"{row + n} is wrong")
            except StoreError as error:
                outcomes.append(str(error))
                time.sleep(.01)

with LocalStore(folder, upkeep=False) as store:
    threads = [threading.Thread(target=search, args=(store, start)) for start in range(4)]
    for thread in threads:
        thread.start()
    for trial in range(trials):
        time.sleep(.05 + .003 * trial)
        os.truncate(path, 4096)
        time.sleep(.05)
        path.write_bytes(whole)  # as cp does: the same file, empty for a moment
    time.sleep(.3)
    stop = True
    for thread in threads:
        thread.join()
    for answer in store.propose(queries, 2, bundle)[:1]:
        print(answer.items[0].id)
for outcome in sorted(set(outcomes), key=str):
    print(outcome)
"""


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("flat", "*.vector"),
        ("hnsw", "*.vector"),
        ("hnsw", "*.hnsw"),
        ("companion", "*.vector"),
        ("companion", "*.companion"),
    ],
)
def test_searches_survive_that_a_file_is_cut_and_restored(
    tmp_path, bundle, indexes, process, name, pattern
):
    """Four threads search meanwhile. Each answer is right or an error; later ones are right."""
    folder = tmp_path / "index"
    shutil.copytree(indexes / name, folder)
    done = process("-c", SEARCHES, folder, pattern, bundle.sha256, 8)
    assert done.code == 0, done.err
    first, *outcomes = done.out.splitlines()
    assert first == "0"
    assert "True" in outcomes
    others = [text for text in outcomes if text != "True"]
    if pattern == "*.vector":
        assert others
    for text in others:
        assert f"{folder} is damaged" in text
        assert "was cut short" in text or "was altered" in text


def test_a_compaction_of_a_file_that_is_cut_changes_nothing(tmp_path, bundle, indexes):
    folder = tmp_path / "index"
    shutil.copytree(indexes / "flat", folder)
    (path,) = (folder / "arrays").glob("*.vector")
    whole = path.read_bytes()
    with LocalStore(folder, upkeep=False) as store:
        store.delete(["1"])
        with pytest.raises(StoreError, match=r"arrays/.*\.vector was cut short"):
            store.compact(lambda done, total: os.truncate(path, 4096))
        path.write_bytes(whole)
        assert store.get(["7"], arrays=True)["7"].arrays["vector"].any()
        store.compact()
        queries = np.frombuffer(whole, "<f4", WIDTH * 10).reshape(-1, WIDTH)
        answers = store.propose(queries, 1, bundle.sha256)
        assert [answer.items[0].id for answer in answers][2:] == list("23456789")
