"""The record of feedback: what is acknowledged is kept, what is forgotten is gone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from limits import files_of_at_most
from retrieval.errors import DataError, StoreError
from retrieval.feedback import feedback_record as record_module
from retrieval.feedback.feedback_record import (
    CLICKED,
    DISLIKED,
    FEEDBACK_FILE,
    LIKED,
    FeedbackRecord,
    NoRoom,
    Search,
    Trial,
    UnknownSearch,
)

HITS = tuple(f"item{n}" for n in range(10))
QUERY = np.arange(8, dtype=np.float32)
DAY = 86_400.0


def search(id: str, voter: str = "shop", **changes) -> Search:
    plain = Search(id, time.time(), voter, "base", "served", QUERY, None, HITS)
    return plain._replace(**changes)


def trial(**changes) -> Trial:
    fields = {"kind": "challenge", "base": "base", "challenger": "sha", "head": b"graph" * 100}
    fields |= {"incumbent": "served", "learner": "diagonal", "alpha": 0.025, "cutoff": 10}
    return Trial(**(fields | changes))


@pytest.fixture
def path(tmp_path):
    return tmp_path / FEEDBACK_FILE


@pytest.fixture
def record(path):
    with FeedbackRecord.open(path, create=True) as opened:
        yield opened


def marks(record: FeedbackRecord) -> dict:
    return {entry.search.id: entry.marks for entry in record.judged()}


def test_a_mark_that_is_sent_twice_counts_once_and_a_later_one_replaces_it(record):
    record.note_searches([search("a"), search("b")])
    assert record.add("a", "shop", {"item1": LIKED, "item2": CLICKED}) == 2
    assert record.add("a", "shop", {"item1": LIKED, "item2": CLICKED}) == 0
    assert record.add("a", "shop", {"item1": DISLIKED, "item2": LIKED}) == 2
    assert record.add("a", "shop", {"item1": CLICKED}) == 0, "a click replaces no dislike"
    assert record.add("a", "other", {"item1": LIKED}) == 1, "another voter's mark is another"
    shop = {"item1": DISLIKED, "item2": LIKED}
    assert marks(record) == {"a": {"shop": shop, "other": {"item1": LIKED}}}
    assert record.counts() == {"searches": 2, "judged": 1, "marks": 3, "voters": 2, "trials": 0}


def test_a_search_is_kept_as_it_was_answered(record):
    credits = (0.25, -0.5, *[0.0] * 8)
    explored = search("a", challenger="sha", credits=credits)
    by_item = search("b", "shop/ann", query=None, item="item3", hits=HITS[:4], base="newer")
    record.note_searches([explored, by_item, explored])
    for id in "ab":
        record.add(id, "shop", {"item1": LIKED})
    first, second = record.judged()
    assert (first.search.query == QUERY).all() and first.search.query.dtype == np.float32
    assert first.search._replace(query=None) == explored._replace(query=None)
    assert second.search == by_item
    assert [entry.n for entry in record.judged("newer")] == [second.n] and first.n < second.n
    assert [entry.n for entry in record.judged(after=first.n)] == [second.n]
    assert [entry.n for entry in record.judged(limit=1)] == [first.n]


def test_unknown_searches_and_items_that_were_not_shown_are_refused(record):
    record.note_searches([search("a")])
    with pytest.raises(UnknownSearch, match="There is no search b"):
        record.add("b", "shop", {"item1": LIKED})
    for stranger in ("item99", ""):
        with pytest.raises(DataError, match="Not among the hits that search a returned"):
            record.add("a", "shop", {"item1": LIKED, stranger: LIKED})
    with pytest.raises(DataError, match="1,001 items are marked at once; at most 1,000"):
        record.add("a", "shop", {f"item{n}": LIKED for n in range(1001)})
    assert record.judged() == []


def test_the_oldest_searches_without_marks_go_when_there_are_too_many(record, monkeypatch):
    monkeypatch.setattr(record_module, "MAX_UNJUDGED", 20)
    record.note_searches(search(f"s{n}") for n in range(10))
    record.add("s0", "shop", {"item1": LIKED})
    for start in range(10, 60, 10):
        record.note_searches(search(f"s{n}") for n in range(start, start + 10))
    assert record.counts()["searches"] == 21
    assert record.add("s0", "shop", {"item2": LIKED}) == 1
    assert record.add("s40", "shop", {"item2": LIKED}) == 1
    with pytest.raises(UnknownSearch):
        record.add("s39", "shop", {"item2": LIKED})


def test_marks_beyond_the_bound_are_refused_in_a_sentence(record, monkeypatch):
    monkeypatch.setattr(record_module, "MAX_MARKS", 3)
    record.note_searches([search("a")])
    record.add("a", "shop", {"item1": LIKED, "item2": LIKED})
    with pytest.raises(NoRoom, match=r"has 3 marks, which is the most.*feedback forget"):
        record.add("a", "shop", {"item3": LIKED, "item4": LIKED})
    assert record.counts()["marks"] == 2
    record.forget(voter="shop")
    record.note_searches([search("b")])
    assert record.add("b", "shop", {"item3": LIKED, "item4": LIKED}) == 2


def test_expired_searches_go_and_what_was_learned_stays(record, monkeypatch):
    monkeypatch.setattr(record_module, "_CHUNK", 3)
    now = time.time()
    ages = {"new": 0.5, "old": 2, "older": 100}
    record.note_searches(
        search(f"{name}{n}", answered=now - days * DAY)
        for name, days in ages.items()
        for n in range(8)
    )
    for name in ages:
        for n in range(4):
            record.add(f"{name}{n}", "shop", {"item1": LIKED})
    opened = record.begin_trial(trial(cutoff=100, voters=frozenset({"shop"})))
    assert record.expire() == 4 + 8  # "old" without marks, and all "older"
    assert set(marks(record)) == {f"{name}{n}" for name in ("new", "old") for n in range(4)}
    assert record.counts() == {"searches": 12, "judged": 8, "marks": 8, "voters": 1, "trials": 1}
    assert record.open_trials() == [opened] and not opened.tainted


def content(path: Path) -> bytes:
    files = [entry.read_bytes() for entry in path.parent.iterdir() if entry.is_file()]
    return b"".join(files)


def test_no_byte_of_a_forgotten_voter_stays_in_the_file(record, path):
    secret = np.frombuffer(b"a-private-query-of-32-bytes-long" * 4, np.float32)
    record.note_searches(
        search(f"{voter}-{n}", voter, query=query, hits=hits)
        for voter, query, hits in (
            ("ann-the-voter", secret, ("ann-saw-this", *HITS)),
            ("ann-the-voter/phone", secret, HITS),
            ("ann-the-voter-2", QUERY, HITS),
            ("shop", QUERY, HITS),
        )
        for n in range(50)
    )
    for n in range(50):
        record.add(f"ann-the-voter-{n}", "ann-the-voter", {"ann-saw-this": LIKED})
        record.add(f"ann-the-voter/phone-{n}", "shop", {"item1": LIKED})
        record.add(f"ann-the-voter-2-{n}", "ann-the-voter/phone", {"item2": LIKED})
        record.add(f"ann-the-voter-2-{n}", "shop", {"item3": LIKED})
    record.begin_trial(trial(cutoff=10_000, voters=frozenset({"ann-the-voter/phone", "shop"})))
    private = (b"ann-the-voter/", b"ann-the-voter-1", b"ann-saw-this", secret.tobytes())
    assert all(text in content(path) for text in private)
    with FeedbackRecord.open(path) as server:
        server.counts()  # an open connection of another process keeps nothing back
        counts = record.forget(voter="ann-the-voter")
    assert counts == {"tainted": 1, "marks": 150, "searches": 100}
    kept = content(path).replace(b"ann-the-voter-2", b"")
    assert b"ann" not in kept and secret.tobytes() not in kept
    assert record.counts() == {
        "searches": 100,
        "judged": 50,
        "marks": 50,
        "voters": 1,
        "trials": 1,
    }
    assert record.open_trials()[0].voters == {"shop"}


@pytest.mark.parametrize(
    ("what", "tainted"),
    [
        ({"voter": "judge"}, False),
        ({"voter": "teacher"}, True),
        ({"item": "item5"}, True),
        ({"item": "item50"}, False),
        ({"before": 2000.0}, True),
        ({"before": 500.0}, False),
    ],
)
def test_a_trial_is_tainted_by_the_loss_of_what_it_learned_from(record, what, tainted):
    record.note_searches([search("a", "x", answered=1000), search("b", "x"), search("c", "x")])
    first = record.add("a", "teacher", {"item5": LIKED, "item6": CLICKED})
    assert first == 2
    record.add("b", "judge", {"item5": LIKED})
    opened = record.begin_trial(trial(cutoff=1, voters=frozenset({"teacher"})))
    record.add("c", "teacher", {"item7": LIKED})  # later than the challenger
    record.close_trial(opened.n, "switched", {"wealth": 50.0})
    record.forget(**what)
    (closed,) = record.trials()
    assert closed.tainted == tainted and closed.verdict == "switched"
    assert closed.head == (b"" if tainted else b"graph" * 100)


def test_a_forgotten_item_leaves_its_place_among_the_hits_empty(record, path):
    record.note_searches([search("a"), search("b", query=None, item="item4")])
    record.add("a", "shop", {"item4": LIKED, "item7": DISLIKED})
    record.add("b", "shop", {"item1": LIKED})
    assert record.forget(item="item4") == {"tainted": 0, "marks": 2, "searches": 1}
    (entry,) = record.judged()
    assert entry.search.hits == tuple("" if id == "item4" else id for id in HITS)
    assert entry.marks == {"shop": {"item7": DISLIKED}} and b"item4" not in content(path)


def test_one_thing_is_forgotten_at_a_time(record):
    for what in ({}, {"voter": "a", "item": "b"}):
        with pytest.raises(DataError, match="one of them"):
            record.forget(**what)


def test_one_trial_of_a_kind_is_open_and_its_verdict_is_final(record):
    assert record.open_trials() == []
    voters = frozenset({"ann", "bob"})
    opened = record.begin_trial(trial(explore=True, voters=voters))
    expected = trial(explore=True, voters=voters, n=opened.n, opened=opened.opened)
    assert record.open_trials() == [opened] == [expected]
    with pytest.raises(StoreError, match="Another challenge is open"):
        record.begin_trial(trial())
    record.note_evidence(opened.n, {"wealth": 3.5})
    assert record.open_trials()[0].evidence == {"wealth": 3.5}
    record.close_trial(opened.n, "refused", {"wealth": 0.1})
    record.close_trial(opened.n, "switched", {"wealth": 99})
    second = record.begin_trial(trial(kind="watch", head=None, base="newer"))
    assert second.n > opened.n and record.open_trials()[0].head is None
    assert [closed.verdict for closed in record.trials()] == ["refused", None]
    assert [closed.n for closed in record.trials("newer")] == [second.n]


def test_the_file_is_readable_by_its_owner_only(record, path):
    record.note_searches([search("a")])
    assert {entry.stat().st_mode & 0o777 for entry in path.parent.iterdir()} == {0o600}


def test_a_missing_file_is_created_only_on_demand(path):
    with pytest.raises(StoreError, match=r"There is no feedback at .*retrieval serve"):
        FeedbackRecord.open(path)
    assert not path.exists()


def damaged(record: FeedbackRecord, path: Path, kind: str) -> None:
    record.note_searches(search(f"s{n}") for n in range(500))
    for n in range(20):
        record.add(f"s{n}", "shop", {"item1": LIKED})
    record.forget(voter="nobody")  # moves the log into the file
    record.close()
    whole = path.read_bytes()
    if kind == "text":
        path.write_bytes(b"a letter to a friend\n" * 1000)
    elif kind == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "flipped":
        altered = bytearray(whole)
        for place in range(5000, len(altered), 4096):
            altered[place] ^= 1
        path.write_bytes(altered)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "pipe":
        path.unlink()
        os.mkfifo(path)
    elif kind == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("kind", ["text", "cut", "flipped", "empty", "pipe", "link"])
def test_a_damaged_file_is_named_in_a_sentence(record, path, kind):
    damaged(record, path, kind)
    with pytest.raises(StoreError) as fault, FeedbackRecord.open(path, create=True) as opened:
        opened.judged()
    assert str(path) in str(fault.value) and "\n" not in str(fault.value)
    assert str(fault.value).endswith(".")


def test_the_file_of_an_index_is_not_one_of_feedback(index_file):
    with pytest.raises(StoreError, match="is not a file of feedback"):
        FeedbackRecord.open(index_file)


def test_a_file_of_a_later_version_is_refused(record, path):
    with record._writing() as connection:
        connection.execute("pragma user_version = 2")
    record.close()
    with pytest.raises(StoreError, match="has format 2; this version of retrieval reads format 1"):
        FeedbackRecord.open(path)


def test_a_removed_file_is_begun_anew_and_the_old_log_is_not_taken_for_its_own(record, path):
    record.note_searches([search("a")])
    record.add("a", "shop", {"item1": LIKED})
    with FeedbackRecord.open(path) as worker:
        worker.counts()
        path.unlink()  # its log stays
        with pytest.raises(StoreError, match="There is no feedback"):
            worker.counts()
        record.note_searches([search("b")])
        assert record.add("b", "shop", {"item1": LIKED}) == 1
        assert list(marks(worker)) == ["b"]


def test_a_full_disk_refuses_marks_in_a_sentence_and_loses_none(record, path):
    record.note_searches(search(f"s{n}") for n in range(200))
    record.add("s0", "shop", {"item1": LIKED})
    size = max(entry.stat().st_size for entry in path.parent.iterdir())
    acknowledged = {"s0"}
    sentences = []
    with files_of_at_most(size + 20_000):
        for n in range(1, 200):
            try:
                record.add(f"s{n}", "shop", {"item1": LIKED})
            except NoRoom as fault:
                sentences.append(str(fault))
            else:
                acknowledged.add(f"s{n}")
        with pytest.raises(NoRoom):
            record.note_searches(search(f"more{n}") for n in range(1000))
    assert sentences and all("the disk is full" in text for text in sentences)
    assert set(marks(record)) == acknowledged
    assert record.add("s199", "shop", {"item2": LIKED}) == 1


def test_a_full_disk_leaves_the_file_whole(tmp_path, mount):
    disk = mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=2m", "tmpfs")
    acknowledged = set()

    def fill(record: FeedbackRecord) -> None:
        for n in range(10_000):
            record.note_searches([search(f"s{n}")])
            record.add(f"s{n}", "shop", {"item1": LIKED})
            acknowledged.add(f"s{n}")

    with (
        FeedbackRecord.open(disk / FEEDBACK_FILE, create=True) as opened,
        pytest.raises(NoRoom, match="disk is full"),
    ):
        fill(opened)
    with FeedbackRecord.open(disk / FEEDBACK_FILE) as again:
        assert set(marks(again)) == acknowledged and len(acknowledged) > 50


WRITER = """
import sys
from pathlib import Path
import numpy as np
from retrieval.feedback.feedback_record import FeedbackRecord, LIKED, Search
name = sys.argv[2]
with FeedbackRecord.open(Path(sys.argv[1]), create=True) as record:
    for n in range(int(sys.argv[3])):
        id = f"{name}-{n}"
        query = np.ones(8, np.float32)
        record.note_searches([Search(id, 1e9, name, "base", "served", query, None, ("x", "y"))])
        record.add(id, name, {"x": LIKED})
        print(id, flush=True)
"""


def writer(path: Path, name: str, count: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, path, name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes_write_at_once(path):
    processes = [writer(path, name, 150) for name in ("one", "two")]
    lines = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    with FeedbackRecord.open(path) as record:
        assert {id for ids in lines for id in ids} == set(marks(record))
        assert record.counts()["marks"] == 300


def test_what_is_acknowledged_survives_sigkill(path):
    rng = np.random.default_rng(0)
    acknowledged: set[str] = set()
    for turn in range(12):
        with writer(path, f"turn{turn}", 100_000) as process:
            first = process.stdout.readline().strip()
            time.sleep(rng.uniform(0, 0.3))
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read()
        whole = rest[: rest.rfind("\n") + 1].split()
        acknowledged |= {first, *whole}
    with FeedbackRecord.open(path) as record:
        kept = marks(record)
        assert acknowledged <= set(kept) and len(acknowledged) >= 12
        assert len(kept) - len(acknowledged) <= 12, "more than was in flight"
        assert all(entry == {id.split("-")[0]: {"x": LIKED}} for id, entry in kept.items())
        assert record.counts()["marks"] == len(kept)


def test_two_workers_at_once_and_one_works(path, record):
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from retrieval.feedback.feedback_record import FeedbackRecord\n"
        "with FeedbackRecord.open(Path(sys.argv[1])).worker_lock():\n print('works')\n"
    )
    with record.worker_lock():
        run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
        assert run.returncode and "Another process is learning from this feedback" in run.stderr
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert run.stdout == "works\n"
    assert {entry.name.removeprefix(FEEDBACK_FILE) for entry in path.parent.iterdir()} <= {
        "",
        "-wal",
        "-shm",
    }
