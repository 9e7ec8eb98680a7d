"""Several processes write to one index in turn, and nothing is lost."""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError, StoreError
from retrieval.store import record, upkeep
from retrieval.store.contract import Item, Store, StoreUnavailable, TooSlow, patience, widths_of
from retrieval.store.filters import parse_filter
from retrieval.store.folder import check_record, create_local
from retrieval.store.local import LocalStore
from retrieval.store.search_structure import StructureChoice
from retrieval.store.snapshot_view import ArrayFile
from retrieval.store.upkeep import WorkClaim
from stored import VECTORS, items, write


def run(*jobs: tuple[Path, str, int, bool]) -> set[str]:
    """Run writers, each in a process; return the ids that the index acknowledged to have."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(jobs), mp_context=spawn) as pool:
        return set().union(*pool.map(write, *zip(*jobs, strict=True), timeout=300))


def holds(index: Path, bundle: Bundle, ids: set[str]) -> None:
    assert check_record(index, lambda count: None) == ([], [])
    with LocalStore(index, upkeep=False) as store:
        assert {entry.id for entry in store.scan(limit=10**6)} == ids
        read = store.get(ids, arrays=True)
        assert all(entry.arrays for entry in read.values())
        hits = store.search(np.zeros((1, 16), np.float32), len(ids), bundle.sha256)[0]
        assert {entry.id for entry in hits} == ids


def test_processes_write_in_turn_and_nothing_is_lost(index, bundle):
    once = ((index, "big", 500, False), (index, "a", 1, False))
    holds(index, bundle, run(*once, (index, "bb", 3, True)))


def test_two_names_of_one_folder(index, bundle, tmp_path, mount):
    """As `docker run -v photos.index:/index` and a command on the host see it."""
    mounted = mount(tmp_path / "mounted", "--bind", index)
    holds(index, bundle, run((mounted, "big", 2000, False), (index, "small", 1, True)))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_two_users_one_of_whom_may_not_write_beside_the_folder(bundle):
    parent = Path(tempfile.mkdtemp())  # other users cannot enter pytest's folders
    parent.chmod(0o755)
    index = parent / "index"
    create_local(index, bundle, widths_of(bundle))
    for path in [index, *index.rglob("*")]:
        os.chown(path, 12345, 12345)
    vectors = np.eye(16, dtype=np.float32)

    def written(id, at):
        with LocalStore(index, upkeep=False) as store:
            store.upsert([Item(id, arrays={"vector": vectors[at]})], bundle.sha256)
            store.compact()

    for turn in range(3):
        child = os.fork()
        if not child:
            try:
                os.setgid(12345)
                os.setuid(12345)
                assert not os.access(index.parent, os.W_OK)
                written(f"user {turn}", turn)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        written(f"root {turn}", 8 + turn)
    holds(index, bundle, {f"{who} {turn}" for who in ("user", "root") for turn in range(3)})
    shutil.rmtree(parent)


def test_a_search_outlives_a_compaction_before_it_has_mapped_new_rows(index, bundle, monkeypatch):
    with LocalStore(index, upkeep=False) as reader, LocalStore(index, upkeep=False) as writer:
        writer.upsert(items(range(10)), bundle.sha256)
        assert reader.propose(VECTORS[:1], 1, bundle.sha256)[0].items[0].id == "id0"
        # More rows than the reader has mapped; the first ten are dead.
        writer.upsert(items(range(3000)), bundle.sha256)
        rows = ArrayFile.rows
        compacted = []

        def rows_of(array, count):
            if (
                count > len(array._mapped)
                and not compacted
                and array in reader.views.view.arrays.values()
            ):
                compacted.append(array.path)
                writer.compact()
                assert not array.path.exists()
            return rows(array, count)

        monkeypatch.setattr(ArrayFile, "rows", rows_of)
        assert reader.propose(VECTORS[2999:3000], 1, bundle.sha256)[0].items[0].id == "id2999"
        assert compacted


def test_who_waits_too_long_is_told(index, bundle, monkeypatch):
    monkeypatch.setattr(record, "_BUSY_SECONDS", 0.2)
    says = r"others have been writing to it for .* seconds\. Try again\."
    with LocalStore(index, upkeep=False) as store, LocalStore(index, upkeep=False) as other:
        store.upsert(items([1]), bundle.sha256)
        with other.record.writing(), pytest.raises(StoreUnavailable, match=says):
            store.upsert(items([1]), bundle.sha256)
        assert store.upsert(items([1]), bundle.sha256) == 1


def test_an_update_keeps_what_others_change_meanwhile(index, bundle):
    """Each store has its own connections, as each process has. One changes labels, one metadata."""
    with LocalStore(index, upkeep=False) as first, LocalStore(index, upkeep=False) as second:
        first.upsert(items([1]), bundle.sha256)

        def lost(store: LocalStore, name: str) -> list[object]:
            missing = []
            for n in range(100):
                entry = str(n) if name == "label" else {"n": n}
                assert store.update(["id1"], {name: entry}, bundle.sha256)
                time.sleep(0.002)
                item = store.get(["id1"])["id1"]
                if (item.label if name == "label" else {"n": item.metadata["n"]}) != entry:
                    missing.append(entry)
            return missing

        with ThreadPoolExecutor() as pool:
            assert list(pool.map(lost, (first, second), ("label", "metadata"))) == [[], []]
    holds(index, bundle, {"id1"})


def test_an_update_of_many_items_is_whole_or_nothing(index, bundle):
    everything = parse_filter("price >= 0")
    with LocalStore(index, upkeep=False) as store, LocalStore(index, upkeep=False) as other:
        store.upsert(items(range(600)), bundle.sha256)
        store.update(["id599"], {"metadata": {"text": "x" * 500_000}}, bundle.sha256)
        large = {"metadata": {"more": "x" * 600_000}}  # too large with that text, in the last block
        with pytest.raises(DataError, match="id599"):
            store.update((), large, bundle.sha256, filter=everything)
        with pytest.raises(TooSlow, match="600 items takes too long"), patience(-1):
            store.update((), {"label": "x"}, bundle.sha256, filter=everything)
        for n, item in enumerate(items(range(600))):
            kept = other.get([item.id], arrays=True)[item.id]
            text = kept.metadata.pop("text", None)
            assert (kept.label, kept.metadata) == (item.label, item.metadata), text
            assert (kept.vector == VECTORS[n]).all()
        assert store.update((), {"label": "x"}, bundle.sha256, filter=everything) == 600
        assert other.count(parse_filter("label = 'x'")) == 600
        queries = VECTORS[:600:50]
        nearest = other.propose(queries, 1, bundle.sha256)
        assert [found.items[0].id for found in nearest] == [f"id{n}" for n in range(0, 600, 50)]
    holds(index, bundle, {f"id{n}" for n in range(600)})


def test_an_engine_updates_a_few_items_at_a_time(index, bundle):
    """As the contract does it for a store that has no way of its own."""
    below = parse_filter("price < 45")
    changes = {"label": "x", "metadata": {"price": None, "n": {"a": 1}}}
    with LocalStore(index, upkeep=False) as store:
        kept = [replace(item, keep="copy", original=item.id.encode()) for item in items(range(50))]
        store.upsert(kept, bundle.sha256)
        assert Store.update(store, ["id49", "no"], changes, bundle.sha256, filter=below) == 46
        for n, item in enumerate(items(range(50))):
            changed = n < 45 or n == 49
            read = store.get([item.id], arrays=True)[item.id]
            expected = ("x", {"n": {"a": 1}}) if changed else (item.label, {"price": n})
            assert (read.label, read.metadata) == expected and (read.vector == VECTORS[n]).all()
            assert store.original(item.id) == item.id.encode()
        with pytest.raises(TooSlow, match="0 items were changed"), patience(-1):
            Store.update(store, ["id1"], changes, bundle.sha256)


def test_an_update_keeps_items_that_could_not_be_embedded(index, bundle, other):
    with LocalStore(index, upkeep=False) as store:
        store.upsert(items(range(3)), bundle.sha256)
        generation = store.begin(other, widths_of(other))
        first, second, _ = store.pending(generation, 10)
        embedded = [Item(item.id, arrays={"vector": VECTORS[9]}) for item in (first, second)]
        store.embed(generation, embedded, ["id2"])
        assert store.switch(generation)
        assert store.update(["id1", "id2"], {"label": "new"}, other.sha256) == 2
        read = store.get(["id0", "id1", "id2"], arrays=True).values()
        assert [entry.label for entry in read] == ["0", "new", "new"]
        assert [bool(entry.arrays) for entry in read] == [True, True, False]
        store.compact()
    assert check_record(index, lambda count: None) == ([], [])


def test_work_is_claimed_by_one_process(index, bundle, monkeypatch):
    monkeypatch.setattr(upkeep, "_WAIT", 0.2)
    with LocalStore(index, upkeep=False) as store, LocalStore(index, upkeep=False) as other:
        store.upsert(items([1]), bundle.sha256)
        with (
            WorkClaim(other.record, 0),
            pytest.raises(StoreUnavailable, match="Another process is compacting the index"),
        ):
            store.compact()
        store.compact()


def test_what_comes_and_goes_while_an_index_is_compacted(index, bundle, monkeypatch):
    with LocalStore(index, upkeep=False) as store, LocalStore(index, upkeep=False) as other:
        store.upsert(items(range(40)), bundle.sha256)
        store.delete(["id3"])
        append = upkeep.append

        def meanwhile(*given):
            monkeypatch.undo()
            other.upsert(items(range(40, 50)), bundle.sha256)
            other.delete(["id4", "id41"])
            other.upsert(items(range(5, 7)), bundle.sha256)
            other.upsert(items(range(50, 60)), bundle.sha256)
            return append(*given)

        monkeypatch.setattr(upkeep, "append", meanwhile)
        store.compact()
        details = store.stats().details
        # Dead rows: id4, and the former id5 and id6.
        assert (details["rows"], details["deleted"]) == (39 + 19 + 2, 3)
        present = {f"id{n}" for n in range(60)} - {"id3", "id4", "id41"}
        for opened in (store, other):
            read = opened.get(present, arrays=True)
            assert all((read[id].vector == VECTORS[int(id[2:])]).all() for id in present)
    holds(index, bundle, present)


# A read-only folder, beside a process that may write to it.


@pytest.fixture
def frozen(index, tmp_path, mount):
    """The index below a read-only mount of its parent; root may write to read-only files."""
    (tmp_path / "outer").mkdir()
    index.rename(tmp_path / "outer" / "index")
    view = mount(tmp_path / "view", "--bind", tmp_path / "outer")
    subprocess.run(["mount", "-o", "remount,ro,bind", view], check=True)
    return view / "index"


def test_a_folder_that_may_only_be_read_is_searched_and_refuses_writes(frozen, bundle, tmp_path):
    writable, widths = tmp_path / "outer" / "index", widths_of(bundle)
    with LocalStore(writable, upkeep=False) as store:
        store.upsert(items(range(20)), bundle.sha256)
        store.keep_words()
    before = sorted(path.name for path in writable.iterdir())
    only_read = r"index is read-only here, and cannot be written to\.$"
    no_writes = "cannot be written: Read-only file system"
    with LocalStore(frozen) as reader:

        def sees(count: int) -> None:
            ((item,),) = reader.search(VECTORS[count - 1 : count], 1, bundle.sha256)
            assert (reader.count(), item.id) == (count, f"id{count - 1}")
            found = reader.search_words(str(count - 1), 1)
            assert [id for id, _ in found] == [item.id]

        sees(20)
        for refused, says in (
            (lambda: reader.upsert(items(range(30)), bundle.sha256), only_read),
            (lambda: reader.delete(["id0"]), only_read),
            (reader.compact, only_read),
            (lambda: reader.set_note(reader.generations()[0], "note", b""), only_read),
            (lambda: reader.drop(reader.generations()[0]), only_read),
            (lambda: reader.snapshot(frozen.parent / "copy"), f"view/copy {no_writes}"),
            (lambda: create_local(frozen.parent / "new", bundle, widths), f"view/new {no_writes}"),
        ):
            with pytest.raises(StoreError, match=says):
                refused()
        reader.snapshot(tmp_path / "copy")
        assert sorted(path.name for path in writable.iterdir()) == before
        for count in (25, 30):
            with LocalStore(writable, upkeep=False) as writer:  # its log holds the new rows
                writer.upsert(items(range(count)), bundle.sha256)
                sees(count)
            sees(count)
    with LocalStore(tmp_path / "copy") as copy:
        assert copy.count() == 20


# A process that forks after a search with several threads: the child searches and writes.


FORKED = """
import os, signal, sys, traceback
import numpy as np
from pathlib import Path
from retrieval.store import search_structure
from retrieval.store.contract import Item
from retrieval.store.local import LocalStore

search_structure.MIN_ROWS = 1000
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
    signal.alarm(60)  # ends a child that hangs
    try:
        assert found(1)[0] == before[0] and found(64)[0] == before[0]
        store.upsert([Item("of the child", arrays={"vector": vectors[0]})], bundle)
        assert store.count() == 25_001 and "of the child" in found(1)[0]
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert "of the child" in found(1)[0] and store.count() == 25_001
store.delete(["of the child"])
assert found(1)[0] == before[0]
store.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("backend", "queries"), [("flat", 1), ("hnsw", 64)])
def test_a_child_searches_and_writes(backend, queries, tmp_path, bundle):
    choice = StructureChoice(backend)
    create_local(tmp_path / "i", bundle, widths_of(bundle), structure=choice)
    line = [sys.executable, "-W", "ignore", "-c", FORKED, tmp_path / "i", str(queries)]
    environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


BUSY = """
import os, sys, threading
from pathlib import Path
from retrieval.errors import StoreError
from retrieval.store.local import LocalStore

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
def test_a_child_of_a_store_in_use_is_told(index, process):
    done = process("-W", "ignore", "-c", BUSY, index, seconds=60)
    assert done.code == 0, done.err
    assert "was in use when this process was forked. Open it in the child" in done.out
