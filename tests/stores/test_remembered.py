"""What a search remembers of earlier ones: never more than it may, and never what is not so any more, whoever has written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retrieval.serving.bundle import Bundle
from retrieval.serving.index.base import Index
from retrieval.serving.index.living import LivingIndex
from retrieval.serving.index.open import open_index
from retrieval.serving.local.remembered import Remembered
from retrieval.serving.store.contract import Item, widths_of
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.record import Record
from retrieval.serving.store.writing import create_local

VECTORS = np.random.default_rng(0).normal(size=(60, 16)).astype(np.float32)


def item(number: int, turn: int = 0) -> Item:
    return Item(
        f"id{number:02}", str(turn), {"turn": turn, "tags": ["a"]}, arrays={"vector": VECTORS[number]}
    )


@pytest.fixture
def living(tmp_path: Path, plain_bundle: Path) -> Iterator[LivingIndex]:
    bundle = Bundle.open(plain_bundle, threads=1)
    create_local(tmp_path / "index", bundle, widths_of(bundle))
    with open_index(tmp_path / "index", threads=1) as index:
        assert isinstance(index, LivingIndex)
        index.upsert([item(number) for number in range(40)])
        yield index


def seen(index: Index, number: int = 3, k: int = 5, where: str | None = None) -> list[tuple[str, Any]]:
    return [(hit.key, hit.metadata) for hit in index.search(VECTORS[number], k, where=where)]


@contextmanager
def without_record(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, whoever reads the record fails."""

    @contextmanager
    def refuse(self: Record, **options: Any) -> Iterator[Any]:
        raise AssertionError("the record was read")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(Record, "reading", refuse)
        yield


def test_what_was_found_is_found_again_without_the_record(
    living: LivingIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = seen(living), seen(living, where="turn = 0")
    with without_record(monkeypatch):
        assert (seen(living), seen(living, where="turn = 0")) == wanted
    living.upsert([item(50)])
    with without_record(monkeypatch), pytest.raises(AssertionError, match="record was read"):
        seen(living)
    assert seen(living) == wanted[0]


@pytest.mark.parametrize("compacted", [False, True])
def test_a_change_of_this_process_is_seen_at_once(living: LivingIndex, compacted: bool) -> None:
    for turn in range(1, 6):
        assert seen(living)[0] == ("id03", {"turn": turn - 1, "tags": ["a"]})
        living.upsert([item(3, turn)])
        if compacted:
            living.store.compact()
    assert living.search(VECTORS[3], 1)[0].label == "5"
    living.delete("id03")
    assert "id03" not in dict(seen(living, k=60))
    living.upsert([item(3, 9)])
    assert seen(living)[0] == ("id03", {"turn": 9, "tags": ["a"]})


WRITER = """
import sys
from pathlib import Path
import numpy as np
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.contract import Item

vector = np.random.default_rng(0).normal(size=(60, 16)).astype(np.float32)[3]
with LocalStore(Path(sys.argv[1])) as store:
    bundle = store.generations()[0].bundle
    for line in sys.stdin:
        said = line.split()
        if said[0] == "delete":
            store.delete(["id03"])
        elif said[0] == "compact":
            store.compact()
        else:
            store.upsert([Item("id03", said[1], {"turn": int(said[1])}, arrays={"vector": vector})], bundle)
        print("done", flush=True)
"""


def test_a_change_of_another_process_is_seen_once_it_is_acknowledged(
    tmp_path: Path, living: LivingIndex
) -> None:
    living.close()  # another may write now
    line = [sys.executable, "-c", WRITER, str(tmp_path / "index")]
    with (
        subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer,
        open_index(tmp_path / "index", threads=1) as reader,
    ):
        assert writer.stdin is not None and writer.stdout is not None
        for turn in range(1, 30):
            told = "delete" if turn % 5 == 4 else "compact" if turn % 7 == 6 else f"upsert {turn}"
            writer.stdin.write(f"{told}\n")
            writer.stdin.flush()
            before = dict(seen(reader)).get("id03")
            assert writer.stdout.readline() == "done\n"
            now = dict(seen(reader)).get("id03")
            if told == "delete":
                assert now is None
            elif told != "compact":
                assert now == {"turn": turn}
            else:
                assert now == before
            assert seen(reader, k=1, where="turn >= 0")[0][1] == (now or {"turn": 0, "tags": ["a"]})
        writer.stdin.close()


def test_what_is_done_to_an_answer_reaches_no_other(living: LivingIndex) -> None:
    first = living.search(VECTORS[3], 1)[0]
    first.metadata["tags"].append("b")
    first.metadata["turn"] = 7  # type: ignore[index]
    proposed = living.store.search(VECTORS[3:4], 1, living.bundle.sha256)[0][0]
    proposed.metadata["tags"].append("c")
    assert seen(living, k=1) == [("id03", {"turn": 0, "tags": ["a"]})]


def test_answers_are_the_same_where_little_or_nothing_is_remembered(
    living: LivingIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(living.store, LocalStore)
    wanted = [seen(living, number) for number in range(40)]
    for most in (0, 5000):
        living.store._searches._remembered = Remembered(most)
        assert [seen(living, number) for number in range(40)] == wanted


def rows(numbers: range, text: str = "") -> list[tuple[Any, ...]]:
    return [
        (n, f"id{n}", text or None, "{}", None, None, "reference", None, None, None, None) for n in numbers
    ]


def test_it_takes_no_more_than_it_may_and_keeps_what_was_asked_for_last() -> None:
    memory = Remembered(50_000)
    for start in range(0, 1000, 10):
        memory.keep(rows(range(start, start + 10)))
        memory.find([0])
        assert len(memory) <= 50 and memory.bytes <= 50_000
    kept = sorted(memory._young.keys() | memory._old.keys())
    assert kept == [0, *range(1001 - len(kept), 1000)] and len(kept) > 15
    found = memory.keep(rows(range(2000, 2003), "x" * 8000))
    assert set(found) == {2000, 2001, 2002} and found[2000].label == "x" * 8000
    assert memory.find([2000, 2001, 2002]) == [None] * 3  # larger than half of it: given, not kept
    assert memory.bytes <= 50_000
    for _ in range(3):
        memory.keep(rows(range(3000, 3010)))
        assert [one.id for one in memory.find(range(3000, 3010)) if one] == [
            f"id{n}" for n in range(3000, 3010)
        ]
    assert memory.bytes == sum(memory._sizes.values()) + sum(memory._old_sizes.values()) <= 50_000
    assert memory._sizes.keys() == memory._young.keys() and memory._old_sizes.keys() == memory._old.keys()
    assert not memory._young.keys() & memory._old.keys()


def test_it_is_the_same_for_many_threads() -> None:
    """None finds another's item, or none that it has just kept; and the halves stay what they are."""
    memory = Remembered(200_000)

    def work(seed: int) -> None:
        for start in np.random.default_rng(seed).integers(0, 300, 300).tolist():
            wanted = range(start, start + 8)
            known = memory.find(wanted)
            if missing := [n for n, one in zip(wanted, known, strict=True) if one is None]:
                memory.keep(rows(range(missing[0], missing[-1] + 1)))
            for n, one in zip(wanted, memory.find(wanted), strict=True):
                assert one is None or one.id == f"id{n}"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))
    assert memory.bytes == sum(memory._sizes.values()) + sum(memory._old_sizes.values()) <= 200_000
    assert not memory._young.keys() & memory._old.keys()
