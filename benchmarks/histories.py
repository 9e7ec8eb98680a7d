"""Threads and processes read a living index while another thread writes to it; every answer is
compared.

    python benchmarks/histories.py --seconds 60 --seeds 3        # writes results/histories.md

One writer adds, changes and deletes items, compacts, and sometimes serves another bundle. So few
dead rows are allowed that compaction runs all the time. The writer's operations are numbered. A
reader notes the last operation that was acknowledged before its question, and the last operation
that had begun when its answer came. The answer must equal, in every digit, that of one state
between these two: the history is linearizable (M. Herlihy and J. Wing, Linearizability, ACM TOPLAS
12(3), 1990). With a single writer, nothing else needs to be compared.

Vectors consist of whole numbers, so that every distance is exact and the expected answer has no
rounding.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from retrieval.bundle.bundle import Bundle
from retrieval.index.index import Index, open_index
from retrieval.store import masks, upkeep
from retrieval.store.contract import FEATURES, VECTOR, Item, widths_of
from retrieval.store.folder import create_local

from bench import finish, markdown, page
from living_model import board_of, run_arguments
from retrieval_engines.testing import make_bundle

IDS, NUMBERS, K = 400, 8, 10
CHEAP = "price < 3"
QUERIES = np.random.default_rng(77).integers(-9, 10, (12, NUMBERS)).astype(np.float32)
SMALL = 24  # number of dead rows at which compaction begins
Change = tuple[str, Any]


class Answer(NamedTuple):
    """An answer to a reader.

    Attributes:
        about: a query's number, or ids.
        after: the last operation acknowledged before the question.
        until: the last operation begun before the answer.
    """

    after: int
    until: int
    kind: str
    about: Any
    answer: Any


BEGUN, ACKNOWLEDGED, STOP, READY = range(4)
"""Places on the board: operations, whether to stop, and from READY on which processes read."""


@dataclass
class State:
    """The items of the index after a number of operations."""

    bundle: int = 0
    items: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)  # features, price

    def apply(self, change: Change) -> None:
        """Apply an operation."""
        kind, what = change
        if kind == "upsert":
            self.items.update(what)
        elif kind == "delete":
            for id in what:
                self.items.pop(id, None)
        elif kind == "cheap":
            self.items = {id: entry for id, entry in self.items.items() if entry[1] >= what}
        elif kind == "migrate":
            self.bundle = what

    def answer(self, kind: str, about: Any, maps: list[Any]) -> Any:
        """Return the right answer to a reader."""
        if kind == "get":
            return {id: self.items[id][1] for id in about if id in self.items}
        cheap = {id: entry for id, entry in self.items.items() if entry[1] < 3}
        if kind == "count":
            return len(self.items)
        if kind == "count cheap":
            return len(cheap)
        chosen = cheap if kind == "search cheap" else self.items
        if not chosen:
            return []
        ids = sorted(chosen)
        vectors = np.array([chosen[id][0] for id in ids], float) @ maps[self.bundle]
        distances = np.sqrt(np.square(vectors - QUERIES[about] @ maps[self.bundle]).sum(1))
        order = np.argsort(distances, kind="stable")[:K]
        return [(ids[row], float(distances[row]), chosen[ids[row]][1]) for row in order]


def read(index: Index, board: Any, seed: int) -> list[Answer]:
    """Ask until told to stop; return the answers."""
    random = np.random.default_rng(seed)
    kinds = ["search", "search", "search cheap", "count", "count cheap", "get"]
    answers = []
    while not board[STOP]:
        kind = kinds[random.integers(len(kinds))]
        about: Any = None
        after = int(board[ACKNOWLEDGED])
        if kind == "get":
            about = [f"id {number}" for number in random.integers(0, IDS, 5)]
            result: Any = {id: item.metadata["price"] for id, item in index.get(about).items()}
        elif kind.startswith("count"):
            result = index.count(CHEAP if "cheap" in kind else None)
        else:
            about = int(random.integers(len(QUERIES)))
            hits = index.search(QUERIES[about], K, filter=CHEAP if "cheap" in kind else None)
            result = [(hit.id, hit.distance, hit.metadata["price"]) for hit in hits]
        answers.append(Answer(after, int(board[BEGUN]), kind, about, result))
    return answers


def read_apart(folder: Path, number: int, processes: int, seed: int) -> list[Answer]:
    """Do `read` in another process."""
    board = board_of(folder / "board", READY + processes)
    with busy_upkeep(), open_index(folder / "index", threads=1) as index:
        board[READY + number] = 1
        return read(index, board, seed)


def changes(seconds: float, seed: int) -> Iterator[Change]:
    """Yield operations until the time is over."""
    random = np.random.default_rng(seed)
    end, served = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        draw = random.random()
        numbers = random.integers(0, IDS, int(random.integers(1, 60)) if draw < 0.9 else 1)
        ids = sorted({f"id {number}" for number in numbers})
        if draw < 0.6:
            features = random.integers(-9, 10, (len(ids), NUMBERS)).tolist()
            prices = random.integers(20, size=len(ids)).tolist()
            rows = zip(ids, map(tuple, features), prices, strict=True)
            yield "upsert", {id: (numbers, price) for id, numbers, price in rows}
        elif draw < 0.85:
            yield "delete", ids[:10]
        elif draw < 0.93:
            yield "cheap", 1
        elif draw < 0.97:
            yield "compact", None
        else:
            served = 1 - served
            yield "migrate", served


def _do(index: Index, change: Change, bundles: list[Path]) -> None:
    kind, what = change
    if kind == "upsert":
        features = np.array([vector for vector, _ in what.values()], np.float32)
        arrays = zip(index.bundle.encode(features).vector, features, strict=True)
        index.upsert(
            [
                Item(id, metadata={"price": price}, arrays={VECTOR: vector, FEATURES: row})
                for (id, (_, price)), (vector, row) in zip(what.items(), arrays, strict=True)
            ]
        )
    elif kind == "delete":
        index.delete(what)
    elif kind == "cheap":
        if index.count():
            index.delete(filter=f"price < {what}")
    elif kind == "compact":
        index.store.compact()  # type: ignore[attr-defined]
    else:
        index.migrate(Bundle.open(bundles[what], threads=1), progress=False)
        index.drop_old()


def wrong(history: list[Change], answers: list[Answer], maps: list[Any]) -> list[Answer]:
    """Return the answers that match no state between question and answer."""
    state, applied, bad = State(), 0, []
    for answer in sorted(answers, key=lambda answer: answer.after):
        while applied < answer.after:
            state.apply(history[applied])
            applied += 1
        then = State(state.bundle, dict(state.items))
        for number in range(applied, answer.until + 1):
            if number > applied:
                then.apply(history[number - 1])
            if then.answer(answer.kind, answer.about, maps) == answer.answer:
                break
        else:
            bad.append(answer)
    return bad


@contextmanager
def busy_upkeep() -> Iterator[None]:
    """Make compaction run all the time, and filters read columns in memory instead of SQL."""
    with patch.object(upkeep, "_MIN_DEAD_ROWS", SMALL), patch.object(masks, "_SMALL", 0):
        yield


def run(
    folder: Path, seconds: float, seed: int, threads: int = 8, processes: int = 2
) -> dict[str, Any]:
    """Record and compare one history; return counts and all wrong answers."""
    bundles = [make_bundle(folder / f"bundle {number}", seed=number) for number in range(2)]
    opened = [Bundle.open(bundle, threads=1) for bundle in bundles]
    units = np.eye(NUMBERS, dtype=np.float32)
    maps = [bundle.encode(units).vector.astype(float) for bundle in opened]
    create_local(folder / "index", opened[0], widths_of(opened[0], features=NUMBERS))
    board, history = board_of(folder / "board", READY + processes), list[Change]()
    spawn = multiprocessing.get_context("spawn")
    with (
        busy_upkeep(),
        open_index(folder / "index", threads=1) as index,
        ThreadPoolExecutor(threads) as own,
        ProcessPoolExecutor(max(processes, 1), spawn) as pool,
    ):

        def write(change: Change) -> None:
            board[BEGUN] = len(history) + 1
            _do(index, change, bundles)
            history.append(change)
            board[ACKNOWLEDGED] = len(history)

        try:
            write(("upsert", {"id 0": ((0,) * NUMBERS, 19)}))  # makes the field `price` known
            apart = [
                pool.submit(read_apart, folder, number, processes, seed * 1000 + 500 + number)
                for number in range(processes)
            ]
            while not board[READY:].all() and not any(reader.done() for reader in apart):
                time.sleep(0.05)
            seeds = range(seed * 1000, seed * 1000 + threads)
            reading = [own.submit(read, index, board, number) for number in seeds]
            for change in changes(seconds, seed):
                write(change)
        finally:
            board[STOP] = 1
        answers, foreign = (
            [answer for reader in readers for answer in reader.result(timeout=120)]
            for readers in (reading, apart)
        )
        upkeep_ = index.stats().details["transactions"] - len(history)
    every = answers + foreign
    return {
        "seed": seed,
        "seconds": seconds,
        "operations": dict(Counter(kind for kind, _ in history)),
        "upkeep": upkeep_,
        "threads": threads,
        "processes": processes,
        "from threads": len(answers),
        "from processes": len(foreign),
        "kinds": dict(Counter(answer.kind for answer in every)),
        "several": sum(answer.until > answer.after for answer in every),
        "wrong": [repr(answer) for answer in wrong(history, every, maps)],
    }


def render(kept: list[dict[str, Any]]) -> str:
    total = sum(row["from threads"] + row["from processes"] for row in kept)
    head = ["seed", "seconds", "operations", "transactions of upkeep and of generations"]
    head += ["answers to threads", "to processes", "with an operation under way", "wrong"]
    lines = []
    for row in kept:
        counts = [row["upkeep"], row["from threads"], row["from processes"], row["several"]]
        cells = [f"{count:,}" for count in [*counts, len(row["wrong"])]]
        done = ", ".join(f"{count} {kind}" for kind, count in sorted(row["operations"].items()))
        lines.append([str(row["seed"]), f"{row['seconds']:g}", done, *cells])
    return page(f"""
        # Answers while an index changes

        `python benchmarks/histories.py`. One thread writes, {kept[0]["threads"]} threads and
        {kept[0]["processes"]} processes read. Each answer (the ids, distances and metadata of the
        ten nearest, with a filter or without; counts; items by id) is compared with the exact
        answer in every state of the index between question and answer. Compaction begins at
        {SMALL} dead rows, so it runs all the time.

        **{total:,} answers, {sum(len(row["wrong"]) for row in kept)} of them wrong.**

        {markdown(head, lines)}
    """)


def main() -> None:
    options = run_arguments(__doc__, seconds=60.0, seeds=3).parse_args()
    kept = []
    for seed in range(options.seed, options.seed + options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            kept.append(run(Path(folder), options.seconds, seed))
        print(json.dumps(kept[-1])[:2000], flush=True)
    finish("histories", kept, render(kept), folder=options.output)
    if any(row["wrong"] for row in kept):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
