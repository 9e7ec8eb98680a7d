"""Helpers of the scripts that interrupt a writer of a living index: random calls, a model of the
index, comparison, killed processes, and pages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from retrieval.bundle.bundle import Bundle
from retrieval.store import record, search_structure, upkeep, words
from retrieval.store.contract import Generation, Item, widths_of
from retrieval.store.filters import as_filter
from retrieval.store.local import LocalStore

from bench import RESULTS, arguments, finish, markdown
from scaled_bundle import make_bundle

WIDTH, BUNDLES, FLUSH, LEAST, IDS = 8, 3, 32, 48, 400
WEIGHTS = {"upsert": 8, "large": 3, "delete": 3, "where": 1, "tend": 3, "compact": 1.5}
WEIGHTS |= {"snapshot": 1.5, "begin": 2, "embed": 5, "switch": 3, "drop": 1, "restructure": 1}
WEIGHTS |= {"reopen": 1, "words": 1}
"""How often each call is drawn."""
Call = dict[str, Any]
Row = dict[str, Any]


@dataclass
class State:
    """The expected content of an index.

    Attributes:
        items: the version of each item by id. Id and version determine everything else of an item.
        generations: by number: the bundle, the ids left out with their versions, and the state.
        words: whether the index keeps the words of its items.
    """

    items: dict[str, int] = field(default_factory=dict)
    generations: dict[int, tuple[int, dict[str, int], str]] = field(
        default_factory=lambda: {1: (0, {}, "served")}
    )
    words: bool = False

    def after(self, call: Call) -> State:
        """Return the state after a call."""
        items, name = dict(self.items), call["call"]
        all_ = {n: (b, dict(out), s) for n, (b, out, s) in self.generations.items()}
        if name in ("upsert", "large"):
            items |= dict(call["items"])
        elif name == "delete":
            items = {id: version for id, version in items.items() if id not in call["ids"]}
        elif name == "where":
            items = {id: v for id, v in items.items() if _price(id, v) != call["price"]}
        elif name == "begin":
            if all(bundle != call["bundle"] for bundle, _, _ in all_.values()):
                all_[call["number"]] = (call["bundle"], {}, "building")
        elif name == "embed":
            all_[call["number"]][1].update({id: items[id] for id in call["left_out"]})
        elif name == "switch" and call["ready"]:
            all_ = {n: (b, out, "kept" if s == "served" else s) for n, (b, out, s) in all_.items()}
            all_[call["number"]] = (*all_[call["number"]][:2], "served")
        elif name == "drop":
            del all_[call["number"]]
        return State(items, all_, self.words or name == "words")

    @property
    def served(self) -> int:
        """The number of the searched generation."""
        return next(number for number, (*_, state) in self.generations.items() if state == "served")


def _price(id: str, version: int) -> int:
    return (int(id[2:]) * 7 + version) % 11


def _features(id: str, version: int) -> np.ndarray:
    return np.random.default_rng((int(id[2:]), version)).normal(size=WIDTH).astype(np.float32)


def item_of(id: str, version: int, bundle: int) -> Item:
    """Return the item of an id and a version, as a bundle embeds it."""
    features = _features(id, version)
    original = f"{id} {version}".encode() * (version % 40)
    return Item(
        id,
        str(version % 5),
        {"price": _price(id, version), "version": version},
        keep="copy",
        original=original or None,
        bytes=len(original),
        arrays={"vector": features * np.float32(bundle + 1), "features": features},
    )


def frequent_upkeep() -> None:
    """Let a few rows and pages start the upkeep, so that all its work happens often."""
    upkeep._MIN_DEAD_ROWS = FLUSH
    search_structure.MIN_ROWS = LEAST
    record._CHECKPOINT_PAGES = 40
    words._READ_AT_ONCE = 20


class Writer:
    """Makes random calls of an index that holds `state`.

    Attributes:
        tell: called with "begin" and the call before each call, with "end" after it.
        first: a call that was interrupted, to be made again.
        background: whether upkeep has a thread (None: random).
    """

    def __init__(
        self,
        folder: Path,
        bundles: list[Bundle],
        state: State,
        seed: int,
        tell: Callable[[str, Any], None] = lambda what, call: None,
        first: Call | None = None,
        background: bool | None = None,
    ) -> None:
        self.folder, self.bundles, self.state = folder, bundles, state
        self.tell, self.first = tell, first
        self.random = random.Random(seed)
        drawn = self.random.random() < 0.5
        self.background = drawn if background is None else background
        self.store = LocalStore(folder, upkeep=self.background)

    def run(self) -> None:
        """Make calls until this process is killed."""
        while True:
            call = self.first or self.draw()
            self.first = None
            if call is not None:
                self.tell("begin", call)
                self.do(call)
                self.tell("end", None)
                self.state = self.state.after(call)

    def draw(self) -> Call | None:
        """Return a random call, or None if it cannot be made now."""
        (name,) = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        call: Call = {"call": name}
        others = [number for number in self.state.generations if number != self.state.served]
        if name in ("upsert", "large"):
            span = (1, 12) if name == "upsert" else (FLUSH, 3 * FLUSH)
            ids = self.random.sample(range(IDS), self.random.randint(*span))
            return call | {"items": [[f"id{n}", self.random.randrange(1 << 30)] for n in ids]}
        if name == "delete":
            ids = sorted(self.state.items)
            count = min(len(ids), self.random.randint(1, 30))
            return call | {"ids": self.random.sample(ids, count)}
        if name == "where":
            return call | {"price": self.random.randrange(11)} if self.state.items else None
        if name == "snapshot":
            return call | {"name": f"copy{self.random.randrange(1 << 40)}"}
        if name == "begin":
            sql = "select seq from sqlite_sequence where name = 'generations'"
            with self.store.record.reading() as connection:
                known = int(record.value(connection, sql) or 0)
            return call | {"bundle": self.random.randrange(BUNDLES), "number": known + 1}
        if name == "restructure":
            return call | {"backend": self.random.choice(["auto", "ivf"])}
        if name in ("embed", "switch", "drop"):
            if not others or (name == "drop" and self.random.random() < 0.5):
                return None
            number = self.random.choice(others)
            call["number"] = number
            generation = self.generation(number)
            if name == "embed":
                call["left_out"] = []
                pending = self.store.pending(generation, self.random.choice([10, 100, 1000]))
                call["pending"] = [item.id for item in pending]
                if pending and self.random.random() < 0.2:
                    call["left_out"] = [self.random.choice(pending).id]
            elif name == "switch":
                call["ready"] = not self.store.pending(generation, 1)
        return call

    def generation(self, number: int) -> Generation:
        """Return a generation by its number."""
        return next(entry for entry in self.store.generations() if entry.number == number)

    def do(self, call: Call) -> None:
        """Make a call."""
        store, name = self.store, call["call"]
        served = self.state.generations[self.state.served][0]
        if name in ("upsert", "large"):
            items = [item_of(id, version, served) for id, version in call["items"]]
            assert store.upsert(items, self.bundles[served].sha256) == sum(
                item.id in self.state.items for item in items
            )
        elif name == "delete":
            assert store.delete(call["ids"]) == len(call["ids"])
        elif name == "where":
            prices = [_price(id, version) for id, version in self.state.items.items()]
            count = prices.count(call["price"])
            assert store.delete(filter=as_filter(f"price = {call['price']}")) == count
        elif name == "tend":
            store.upkeep.step()
        elif name == "compact":
            store.compact()
        elif name == "words":
            store.keep_words()
        elif name == "snapshot":
            store.snapshot(self.folder.parent / call["name"])
        elif name == "begin":
            opened = self.bundles[call["bundle"]]
            store.begin(opened, widths_of(opened, features=WIDTH))
        elif name == "embed":
            generation = self.generation(call["number"])
            bundle = self.state.generations[call["number"]][0]
            pending = store.pending(generation, max(1, len(call["pending"])))
            ids = [item.id for item in pending if item.id not in call["left_out"]]
            done = [item_of(id, self.state.items[id], bundle) for id in ids]
            store.embed(generation, done, call["left_out"])
        elif name == "switch":
            assert store.switch(self.generation(call["number"])) == call["ready"]
        elif name == "drop":
            store.drop(self.generation(call["number"]))
        elif name == "restructure":
            settings = {"lists": 4, "probes": 4} if call["backend"] == "ivf" else {}
            store.take_structure(call["backend"], settings)
        elif name == "reopen":
            store.close()
            self.store = LocalStore(self.folder, upkeep=self.background)


# Checking


Copies = dict[str, tuple[State, bool]]
"""State of each snapshot, and whether the snapshot must exist."""


class Expected:
    """What an index should hold according to its writer's messages: right states and snapshots.

    Attributes:
        moments: for each message its time, the states that are right from then on, the snapshots
            (with whether each must exist), and the running call.
    """

    def __init__(self, state: State, running: Call | None = None) -> None:
        self.states, self.running, self.copies = [state], running, Copies()
        self.moments = [(0, self.states, self.copies, running)]

    @property
    def again(self) -> Call | None:
        """The running call, if it may be made again after it had no effect."""
        return self.running if self.running and self.running["call"] != "begin" else None

    def take(self, what: str, call: Any, when: int = 0) -> None:
        """Take in a message: "begin" of a call, "end" of it, or "is" with the state's position."""
        state = self.states[0]
        if what == "begin":
            self.states, self.running = [state, state.after(call)], call
            if call["call"] == "snapshot":
                self.copies = self.copies | {call["name"]: (state, False)}
        else:
            if self.running is not None and self.running["call"] == "snapshot" and what == "end":
                self.copies = self.copies | {self.running["name"]: (state, True)}
            self.states = [self.states[-1] if what == "end" else self.states[call]]
            self.running = None
        self.moments.append((when, self.states, self.copies, self.running))


def differences(store: LocalStore, state: State, bundles: list[Bundle], seed: int) -> list[str]:
    """Return the differences of an open index from its expected state."""
    wrong = []
    number = state.served
    bundle, left_out, _ = state.generations[number]
    generations = [(entry.number, entry.bundle, entry.state) for entry in store.generations()]
    right = [(n, bundles[b].sha256, s) for n, (b, _, s) in sorted(state.generations.items())]
    if generations != right:
        return [f"generations {generations}"]
    expected = {id: item_of(id, version, bundle) for id, version in state.items.items()}
    scanned, after = [], None
    while page := store.scan(after=after, limit=100):
        scanned += page
        after = page[-1].id
    ids = [item.id for item in scanned]
    if ids != sorted(expected):
        lost, extra = len(set(expected) - set(ids)), len(set(ids) - set(expected))
        return [f"scan: {lost} lost, {extra} too many"]
    got = store.get(expected, arrays=True)
    for id, want in expected.items():
        item = got[id]
        if (item.label, dict(item.metadata), item.bytes) != (want.label, want.metadata, want.bytes):
            wrong.append(f"{id}: its label or metadata")
        missing = left_out.get(id) == state.items[id]
        if set(item.arrays) != (set() if missing else {"vector", "features"}):
            wrong.append(f"{id}: has arrays {sorted(item.arrays)}, left out: {missing}")
        elif not all(
            np.array_equal(array, want.arrays[name]) for name, array in item.arrays.items()
        ):
            wrong.append(f"{id}: its arrays")
        if store.original(id) != want.original:
            wrong.append(f"{id}: its original")
    if store.count() != len(expected):
        wrong.append("count")
    if store.keeps_words() != state.words:
        wrong.append("whether it keeps words")
    elif state.words:
        wrong += _words(store, expected)
    ids = [id for id in sorted(expected) if left_out.get(id) != state.items[id]]
    embedded = [expected[id] for id in ids]
    return wrong + _searches(store, embedded, expected, bundles[bundle].sha256, seed)


def _searches(
    store: LocalStore, items: list[Item], all_: dict[str, Item], sha256: str, seed: int
) -> list[str]:
    """Compare neighbours with brute force, with and without a filter."""
    wrong = []
    queries = np.random.default_rng(seed).normal(size=(4, WIDTH)).astype(np.float32)
    for price in (None, 3, 7):
        filter = None if price is None else as_filter(f"price = {price}")
        if price is not None and not all_:
            continue
        matching, chosen = (
            [item for item in some if price in (None, item.metadata["price"])]
            for some in (all_.values(), items)
        )
        if store.count(filter) != len(matching):
            wrong.append(f"count of price {price}")
        vectors = np.array([item.vector for item in chosen], float).reshape(-1, WIDTH)
        answers = store.search(queries, 10, sha256, filter=filter)
        for query, answer in zip(queries, answers, strict=True):
            order = np.argsort(((vectors - query) ** 2).sum(1))[:10]
            if differ := {item.id for item in answer} ^ {chosen[row].id for row in order}:
                wrong.append(f"neighbours with price {price}: {len(differ)} differ")
    return wrong


def _words(store: LocalStore, all_: dict[str, Item]) -> list[str]:
    """Compare the items that have a word, with and without a filter."""
    with store.record.reading() as connection:
        faults = words.count_faults(connection)
    wrong = [f"words of {faults} items"] if faults else []
    for word in ("0", "3", "7") if all_ else ():
        having = {
            id: item
            for id, item in all_.items()
            if word in (item.label, *map(str, item.metadata.values()))
        }
        cheap = {id for id, item in having.items() if item.metadata["price"] < 4}
        for filter, right in ((None, set(having)), (as_filter("price < 4"), cheap)):
            ids = {id for id, _ in store.search_words(word, len(all_), filter=filter)}
            if ids != right:
                wrong.append(f"items with the word {word}: {len(ids ^ right)} differ")
    return wrong


def leftovers(folder: Path, store: LocalStore) -> list[str]:
    """Return files of an index that its record does not name."""
    with store.record.reading() as connection:
        rows = record.ask(connection, "select stem, widths, structure from generations")
    named = {f"arrays/{stem}.{name}" for stem, widths, _ in rows for name in json.loads(widths)}
    for *_, text in rows:
        named |= {f"arrays/{name}" for name in search_structure.Structure.names(text)}
    named |= {f"bundles/{generation.bundle[:16]}/" for generation in store.generations()}
    named |= {"index.json", "acknowledged"}
    named |= {record.RECORD_FILE + end for end in ("", "-wal", "-shm")}
    folders = tuple(name for name in named if name.endswith("/"))
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return [file for file in files if file not in named and not file.startswith(folders)]


def check(
    folder: Path, states: list[State], copies: Copies, bundles: list[Bundle], seed: int
) -> dict[str, Any]:
    """Return which of some states an index has, and what is wrong with it and its snapshots."""
    with LocalStore(folder, upkeep=False) as store:
        faults = [differences(store, state, bundles, seed) for state in states]
        which = next((number for number, fault in enumerate(faults) if not fault), None)
        wrong = [] if which is not None else faults[-1] or faults[0]
        store._begin_to_write()
        wrong += [f"left over: {text}" for text in leftovers(folder, store)]
    for name, (state, must) in copies.items():
        if (copy := folder.parent / name).exists():
            with LocalStore(copy, upkeep=False) as store:
                wrong += [f"snapshot: {text}" for text in differences(store, state, bundles, seed)]
                wrong += [f"snapshot: left over: {text}" for text in leftovers(copy, store)]
            shutil.rmtree(copy)
        elif must:
            wrong.append("snapshot: lost")
    for part in folder.parent.glob(".copy*.part"):
        shutil.rmtree(part)
    return {"which": which, "wrong": wrong}


def make_bundles(folder: Path) -> list[Bundle]:
    """Write and open bundles."""
    for number in range(BUNDLES):
        make_bundle(folder / f"bundle{number}", WIDTH, number + 1.0)
    return [Bundle.open(folder / f"bundle{number}", threads=1) for number in range(BUNDLES)]


# Processes


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Run `work` in a child; return its process id and the reading end of its pipe."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    try:
        os.close(reading)
        work(writing)
        os._exit(0)
    except BaseException:
        with suppress(OSError):  # the reader has gone
            os.write(writing, json.dumps({"fault": traceback.format_exc()}).encode() + b"\n")
        os._exit(1)


def output_of(work: Callable[[int], None]) -> tuple[list[Any], int]:
    """Return the JSON objects that `work` writes in a child, and the child's wait status."""
    process, pipe = forked(work)
    lines = []
    with os.fdopen(pipe) as file:
        for line in file:
            with suppress(ValueError):  # the child was killed while it wrote the line
                lines.append(json.loads(line))
    return lines, os.waitpid(process, 0)[1]


def kill_at_line(count: int) -> None:
    """Make this process kill itself after executing so many lines of the store."""
    left = [count]
    here = (f"{os.sep}retrieval{os.sep}store{os.sep}", f"base{os.sep}files.py")

    def line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            left[0] -= 1
            if left[0] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return line

    def called(frame: FrameType, event: str, _: object) -> Any:
        return line if any(part in frame.f_code.co_filename for part in here) else None

    threading.settrace(called)
    sys.settrace(called)


def board_of(path: Path, size: int) -> Any:
    """Return an array of whole numbers that processes share, in a mapped file."""
    if not path.exists():
        path.write_bytes(bytes(8 * size))
    return np.memmap(path, np.int64, "r+", shape=(size,))


def unsound(index: Path) -> list[str]:
    """Return the findings of `retrieval index check`, or nothing."""
    line = [sys.executable, "-m", "retrieval.cli", "index", "check", str(index)]
    done = subprocess.run(line, capture_output=True, text=True)
    whole = not done.returncode and "is whole" in done.stdout
    return [] if whole else [f"check: {done.stdout}{done.stderr}"]


# Results


def system() -> str:
    """Return the system's name, Python's version and the number of cores."""
    return f"{platform.system()}, Python {platform.python_version()}, {os.cpu_count()} cores"


def run_arguments(doc: str | None, **most: float) -> argparse.ArgumentParser:
    """Return a parser for the count or duration, the seed, and the folder of results."""
    parser = arguments(doc)
    for name, default in most.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser


def summary(what: str, rows: Sequence[Row], seed: int, *keys: str) -> Row:
    """Return the results of a run: counts of rows with the same values of some keys."""
    python = f"Python {platform.python_version()}, apsw {version('apsw')}"
    return {
        "seed": seed,
        what: len(rows),
        "wrong": [text for row in rows for text in row["wrong"]],
        "cells": cells_of(rows, *keys),
        "machine": f"{platform.system()}, {python}",
    }


def cells_of(rows: Sequence[Row], *keys: str) -> list[list[Any]]:
    """Return the combinations of values of some keys, with their counts."""
    counts = Counter(tuple(row[key] for key in keys) for row in rows)
    return [[*values, count] for values, count in sorted(counts.items())]


def counts_table(
    head: Sequence[str], outcomes: Sequence[str], cells: Sequence[Sequence[Any]], prefix: str = ""
) -> str:
    """Return a table of the last key of cells against the keys before it."""
    counts = {tuple(values): count for *values, count in cells}
    names = [f"{prefix}{outcome}" for outcome in outcomes]
    lines = [
        [*row, *(str(counts.get((*row, outcome), 0)) for outcome in outcomes)]
        for row in dict.fromkeys(values[:-1] for values in counts)
    ]
    return markdown([*head, *names], lines)


def report(number: int, row: Row) -> None:
    """Print a wrong row, and every fiftieth row."""
    if row["wrong"] or number % 50 == 0:
        print(number, row, flush=True)


def conclude(name: str, raw: Row, text: str, folder: Path = RESULTS) -> None:
    """Keep the results and the page; exit with code 1 if anything was wrong."""
    finish(name, raw, text, folder=folder)
    sys.exit(bool(raw["wrong"]))
