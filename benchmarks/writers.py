"""Eight readers and four writing processes share one index; every answer is compared.

    # writes results/raw/writers.json and results/writers.md
    python benchmarks/writers.py --seconds 600 --seed 0

Each writer owns three groups of twenty items. One write replaces or deletes a whole group, or calls
`compact`. A group's state is a number that grows with each write and determines all its items. The
writer notes the number as begun before a write, and as acknowledged afterwards, in a file that all
processes map. A reader notes the acknowledged number before its question, and the begun number when
the answer comes. All items, vectors and distances in the answer must be of one state between these
two. Every few seconds SIGKILL ends a writer, and another process continues. At the end all groups
are compared once more, and `retrieval index check` reads everything.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

# A search of so few rows needs one thread, and there are twelve processes.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.index.index import Index
from retrieval.store import search_structure, upkeep
from retrieval.store.contract import Item
from retrieval.store.folder import create_local

from bench import page
from living_model import board_of, conclude, run_arguments, system, unsound
from scaled_bundle import make_bundle

WRITERS, READERS, GROUPS, SIZE, WIDTH = 4, 8, 3, 20, 8
PAUSE = (5.0, 12.0)
"""Shortest and longest pause between two kills, in seconds."""
BEGUN, ACKNOWLEDGED = range(2)
SPAWN = multiprocessing.get_context("spawn")


def board(folder: Path) -> tuple[Any, Any]:
    """Return the begun and the acknowledged number of each group, and whether to stop."""
    numbers = board_of(folder / "board", 2 * WRITERS * GROUPS + 1)
    return numbers[:-1].reshape(2, WRITERS, GROUPS), numbers[-1:]


def deleted(state: int) -> bool:
    """Return whether a group has no items in a state."""
    return state == 0 or state % 5 == 3


def vectors_of(writer: int, group: int, state: int) -> Any:
    """Return a group's vectors (SIZE, WIDTH): whole numbers, so that distances are exact."""
    drawn = np.random.default_rng((writer, group, state))
    return drawn.integers(-99, 100, (SIZE, WIDTH)).astype(np.float32)


def write(folder: Path, writer: int, seed: int) -> None:
    """Write until told to stop."""
    drawn, (states, stop) = random.Random(seed), board(folder)
    upkeep._MIN_DEAD_ROWS = search_structure.MIN_ROWS = 100  # so that upkeep has work
    with Index.open(folder / "index", threads=1) as index:
        bundle = index.bundle.sha256
        while not stop[0]:
            group = drawn.randrange(GROUPS)
            state = int(states[BEGUN, writer, group]) + 1
            states[BEGUN, writer, group] = state
            names = [f"{writer}/{group}/{number}" for number in range(SIZE)]
            if deleted(state):
                index.delete(names)
            else:
                rows = zip(names, vectors_of(writer, group, state), strict=True)
                about = {"group": f"{writer}/{group}", "state": state}
                items = [Item(name, metadata=about, arrays={"vector": row}) for name, row in rows]
                index.store.upsert(items, bundle)
            states[ACKNOWLEDGED, writer, group] = state
            if drawn.random() < 0.01:
                index.store.compact()


def fault_of(hits: Any, writer: int, group: int, query: Any, first: int, last: int) -> str | None:
    """Return what is wrong with an answer that should show a state from `first` to `last`."""
    name = f"{writer}/{group}, states {first} to {last}"
    if not hits:
        none = any(deleted(state) for state in range(first, last + 1))
        return None if none else f"{name}: nothing was found"
    states = {hit.metadata["state"] for hit in hits}
    if len(states) > 1 or len(hits) != SIZE:
        return f"{name}: {len(hits)} items of the states {sorted(states)}"
    (state,) = states
    if not first <= state <= last or deleted(state):
        return f"{name}: state {state}"
    distances = np.sqrt(np.square(vectors_of(writer, group, state).astype(float) - query).sum(1))
    expected = sorted((float(away), f"{writer}/{group}/{at}") for at, away in enumerate(distances))
    same = expected == [(hit.distance, hit.id) for hit in hits]
    return None if same else f"{name}: other distances or order"


def question(index: Index, states: Any, writer: int, group: int, query: Any) -> str | None:
    """Search for a group; return what is wrong with the answer."""
    first = int(states[ACKNOWLEDGED, writer, group])
    filter = {"group": f"{writer}/{group}"}
    (hits,) = index.search(Encoded(query, query), SIZE + 5, filter=filter)
    return fault_of(hits, writer, group, query[0], first, int(states[BEGUN, writer, group]))


def read(folder: Path, seed: int) -> tuple[int, list[str]]:
    """Search until told to stop; return the number of answers, and what was wrong."""
    drawn, (states, stop) = np.random.default_rng(seed), board(folder)
    answers, wrong = 0, []
    with Index.open(folder / "index", threads=1) as index:
        while not stop[0]:
            writer, group = int(drawn.integers(WRITERS)), int(drawn.integers(GROUPS))
            query = drawn.integers(-99, 100, (1, WIDTH)).astype(np.float32)
            try:
                fault = question(index, states, writer, group, query)
                answers += 1
            except Exception as error:
                fault = f"a search failed: {error!r}"
            wrong += [fault] if fault else []
    return answers, wrong


def started(folder: Path, writer: int, seed: int) -> Any:
    """Start a writer in a new process."""
    process = SPAWN.Process(target=write, args=(folder, writer, seed))
    process.start()
    return process


def kill_for(folder: Path, seconds: float, seed: int) -> tuple[int, list[str]]:
    """Run writers, and kill one repeatedly; return the number of kills, and what was wrong."""
    drawn, wrong, kills = random.Random(seed), [], 0
    writers = [started(folder, number, seed + number) for number in range(WRITERS)]
    states, stop = board(folder)
    while not states[ACKNOWLEDGED].any(axis=1).all() and all(one.is_alive() for one in writers):
        time.sleep(0.1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(drawn.uniform(*PAUSE), max(0.0, end - time.monotonic())))
        at = drawn.randrange(WRITERS)
        if writers[at].exitcode is not None:
            wrong.append(f"writer {at} ended by itself with {writers[at].exitcode}")
        writers[at].kill()
        writers[at].join()
        kills += 1
        writers[at] = started(folder, at, seed + 1000 * kills + at)
    stop[0] = 1
    for writer in writers:
        writer.join(120)
        if writer.exitcode != 0:  # None: it hangs
            wrong.append(f"a writer ended with {writer.exitcode}")
            writer.kill()
    return kills, wrong


def measure(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Run everything in a folder; return the counts and the differences."""
    make_bundle(folder / "bundle", WIDTH, 1.0)
    create_local(folder / "index", Bundle.open(folder / "bundle", threads=1), {"vector": WIDTH})
    states, stop = board(folder)
    with Index.open(folder / "index", threads=1) as index:  # makes the filters' fields known
        about = {"group": "none", "state": 0}
        item = Item("first", metadata=about, arrays={"vector": np.zeros(WIDTH, np.float32)})
        index.store.upsert([item], index.bundle.sha256)
    with ProcessPoolExecutor(READERS, SPAWN) as pool:
        readers = [pool.submit(read, folder, seed + 100 + number) for number in range(READERS)]
        try:
            kills, wrong = kill_for(folder, seconds, seed)
        finally:
            stop[0] = 1
        answers = [reader.result(timeout=120) for reader in readers]
    wrong += [fault for _, faults in answers for fault in faults]
    query = np.zeros((1, WIDTH), np.float32)
    with Index.open(folder / "index", threads=1) as index:
        for writer, group in itertools.product(range(WRITERS), range(GROUPS)):
            if fault := question(index, states, writer, group, query):
                wrong.append(f"at the end: {fault}")
    wrong += unsound(folder / "index")
    return {
        "system": system(),
        "seconds": seconds,
        "seed": seed,
        "writes": int(states[ACKNOWLEDGED].sum()),
        "writes of each writer": states[ACKNOWLEDGED].sum(1).tolist(),
        "answers": sum(count for count, _ in answers),
        "kills": kills,
        "wrong": len(wrong),
        "kinds of wrong": Counter(fault.split(":", 1)[-1] for fault in wrong).most_common(10),
    }


def render(raw: dict[str, Any]) -> str:
    of_each = ", ".join(f"{count:,}" for count in raw["writes of each writer"])
    return page(f"""
        # Eight readers against four writing processes

        `python benchmarks/writers.py --seconds {raw["seconds"]:g} --seed {raw["seed"]}`;
        {raw["system"]}.

        For {raw["seconds"] / 60:.3g} minutes {WRITERS} processes wrote to one index
        ({raw["writes"]:,} acknowledged writes of {SIZE} items each: {of_each}) and {READERS}
        processes searched it ({raw["answers"]:,} answers). SIGKILL ended a writer {raw["kills"]:,}
        times. Every answer had to show one state of a group, between the last state acknowledged
        before the question and the last state begun before the answer.

        **Wrong answers, half transactions, lost writes: {raw["wrong"]}.**
    """)


def main() -> None:
    options = run_arguments(__doc__, seconds=600.0).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        raw = measure(Path(folder), options.seconds, options.seed)
    conclude("writers", raw, render(raw), options.output)


if __name__ == "__main__":
    main()
