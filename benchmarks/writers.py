"""Eight readers against four processes that write to one index; every answer is compared.

    # writes results/raw/writers.json and results/writers.md
    python benchmarks/writers.py --seconds 600 --seed 0

Each writer owns three groups of twenty items. One write replaces a whole group, or deletes it, or
asks for `compact`; a group's state is a number that grows with each write, and says what every item
of it holds. Before a write the writer notes the number as begun, afterwards as acknowledged, in a
file that all processes map. A reader notes what was acknowledged before it asks and what had begun
when it was answered: what it sees of a group must be, in every item, vector and distance, one state
between these two. Every few seconds SIGKILL ends a writer, and another goes on where it stopped. At
the end all groups are compared once more, and `retrieval index check` reads everything.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

# A search of so few rows needs one thread, and there are twelve processes.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from retrieval.host.files import write_text
from retrieval.serving.bundle import Bundle, Encoded
from retrieval.serving.index.index import Index
from retrieval.serving.store import structure, upkeep
from retrieval.serving.store.contract import Item
from retrieval.serving.store.folder import create_local

from scaled_bundle import make_bundle

RESULTS = Path(__file__).parent / "results"
WRITERS, READERS, GROUPS, SIZE, WIDTH = 4, 8, 3, 20, 8
PAUSE = (5.0, 12.0)
"""Seconds between two kills: from, to."""
BEGUN, ACKNOWLEDGED = range(2)


class Board:
    """What was begun and what was acknowledged, of each group, and whether to stop; all processes
    map it.
    """

    def __init__(self, path: Path) -> None:
        size = WRITERS * GROUPS
        if not path.exists():
            path.write_bytes(bytes(8 * (2 * size + 1)))
        numbers = np.memmap(path, np.int64, "r+", shape=(2 * size + 1,))
        self.states, self.stop = numbers[:-1].reshape(2, WRITERS, GROUPS), numbers[-1:]


def deleted(state: int) -> bool:
    """Whether a group has no items in a state."""
    return state == 0 or state % 5 == 3


def vectors_of(writer: int, group: int, state: int) -> Any:
    """Return the vectors (SIZE, WIDTH) of a group's items: whole numbers, so that distances are
    exact.
    """
    drawn = np.random.default_rng((writer, group, state))
    return drawn.integers(-99, 100, (SIZE, WIDTH)).astype(np.float32)


def write(folder: Path, writer: int, seed: int) -> None:
    """Write until told to stop."""
    drawn, board = random.Random(seed), Board(folder / "board")
    upkeep._MIN_DEAD_ROWS = structure.MIN_ROWS = 100  # so that upkeep has work
    with Index.open(folder / "index", threads=1) as index:
        bundle = index.bundle.sha256
        while not board.stop[0]:
            group = drawn.randrange(GROUPS)
            state = int(board.states[BEGUN, writer, group]) + 1
            board.states[BEGUN, writer, group] = state
            names = [f"{writer}/{group}/{number}" for number in range(SIZE)]
            if deleted(state):
                index.delete(names)
            else:
                rows = zip(names, vectors_of(writer, group, state), strict=True)
                about = {"group": f"{writer}/{group}", "state": state}
                items = [Item(name, metadata=about, arrays={"vector": row}) for name, row in rows]
                index.store.upsert(items, bundle)
            board.states[ACKNOWLEDGED, writer, group] = state
            if drawn.random() < 0.01:
                index.store.compact()


def judged(hits: Any, writer: int, group: int, query: Any, first: int, last: int) -> str | None:
    """Return what is wrong with an answer that should be one state of a group from `first` to
    `last`.
    """
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
    return (
        None
        if expected == [(hit.distance, hit.id) for hit in hits]
        else f"{name}: other distances or order"
    )


def read(folder: Path, seed: int) -> None:
    """Search until told to stop; print how many answers there were, and what was wrong."""
    drawn, board = np.random.default_rng(seed), Board(folder / "board")
    answers, wrong = 0, []
    with Index.open(folder / "index", threads=1) as index:
        while not board.stop[0]:
            writer, group = int(drawn.integers(WRITERS)), int(drawn.integers(GROUPS))
            query = drawn.integers(-99, 100, (1, WIDTH)).astype(np.float32)
            first = int(board.states[ACKNOWLEDGED, writer, group])
            try:
                where = {"group": f"{writer}/{group}"}
                (hits,) = index.search(Encoded(query, query), SIZE + 5, where=where)
            except Exception as fault:
                wrong.append(f"a search failed: {fault!r}")
                continue
            last = int(board.states[BEGUN, writer, group])
            answers += 1
            if fault := judged(hits, writer, group, query[0], first, last):
                wrong.append(fault)
    print(json.dumps({"answers": answers, "wrong": wrong}))


def child(*arguments: object) -> subprocess.Popen[str]:
    """Start another process of this file."""
    line = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)


def measure(folder: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Do all of it in a folder; return the counts and the differences."""
    make_bundle(folder / "bundle", WIDTH, 1.0)
    create_local(folder / "index", Bundle.open(folder / "bundle", threads=1), {"vector": WIDTH})
    board, drawn, wrong, kills = Board(folder / "board"), random.Random(seed), [], 0
    with Index.open(
        folder / "index", threads=1
    ) as index:  # filters know their field from the first answer on
        about = {"group": "none", "state": 0}
        item = Item("first", metadata=about, arrays={"vector": np.zeros(WIDTH, np.float32)})
        index.store.upsert([item], index.bundle.sha256)
    writers = [child("write", folder, number, seed + number) for number in range(WRITERS)]
    readers = [child("read", folder, seed + 100 + number) for number in range(READERS)]
    outputs: dict[int, str] = {}
    collectors = [
        threading.Thread(target=lambda at=at, of=of: outputs.update({at: of.communicate()[0]}))
        for at, of in enumerate(readers)
    ]
    for collector in collectors:
        collector.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(min(drawn.uniform(*PAUSE), max(0.0, end - time.monotonic())))
        at = drawn.randrange(WRITERS)
        if writers[at].poll() is not None:
            wrong.append(f"writer {at} ended by itself with {writers[at].returncode}")
        writers[at].send_signal(signal.SIGKILL)
        writers[at].wait()
        kills += 1
        writers[at] = child("write", folder, at, seed + 1000 * kills + at)
    board.stop[0] = 1
    for writer in writers:
        if writer.wait(120):
            wrong.append(f"a writer ended with {writer.returncode}")
    for collector in collectors:
        collector.join(120)
    told = [
        json.loads(outputs[at] or '{"answers": 0, "wrong": ["a reader died"]}')
        for at in range(READERS)
    ]
    wrong += [fault for reader in told for fault in reader["wrong"]]
    query = np.zeros((1, WIDTH), np.float32)
    with Index.open(folder / "index", threads=1) as index:
        for writer in range(WRITERS):
            for group in range(GROUPS):
                where = {"group": f"{writer}/{group}"}
                (hits,) = index.search(Encoded(query, query), SIZE + 5, where=where)
                first, last = (
                    int(board.states[kind, writer, group]) for kind in (ACKNOWLEDGED, BEGUN)
                )
                if fault := judged(hits, writer, group, query[0], first, last):
                    wrong.append(f"at the end: {fault}")
    line = [sys.executable, "-m", "retrieval.cli", "index", "check", str(folder / "index")]
    checked = subprocess.run(line, capture_output=True, text=True)
    if checked.returncode or "is whole" not in checked.stdout:
        wrong.append(f"check: {checked.stdout}{checked.stderr}")
    return {
        "system": (
            f"{platform.system()}, Python {platform.python_version()}, {os.cpu_count()} cores"
        ),
        "seconds": seconds,
        "seed": seed,
        "writes": int(board.states[ACKNOWLEDGED].sum()),
        "writes of each writer": board.states[ACKNOWLEDGED].sum(1).tolist(),
        "answers": sum(reader["answers"] for reader in told),
        "kills": kills,
        "wrong": len(wrong),
        "kinds of wrong": Counter(fault.split(":", 1)[-1] for fault in wrong).most_common(10),
    }


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    return f"""# Eight readers against four writing processes

`python benchmarks/writers.py --seconds {result["seconds"]:g} --seed {result["seed"]}`; {result["system"]}.

For {result["seconds"] / 60:.3g} minutes {WRITERS} processes wrote to one index ({result["writes"]:,} acknowledged writes of {SIZE} items each:
{", ".join(f"{count:,}" for count in result["writes of each writer"])}) and {READERS} processes searched it ({result["answers"]:,} answers). SIGKILL ended a writer {result["kills"]:,} times.
Every answer had to be one state of a group, between the last one acknowledged before the question and the last one begun before the answer.

**Wrong answers, half transactions, lost writes: {result["wrong"]}.**
"""  # noqa: E501


def main() -> None:
    if sys.argv[1:2] == ["write"]:
        return write(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    if sys.argv[1:2] == ["read"]:
        return read(Path(sys.argv[2]), int(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), given.seconds, given.seed)
    write_text(RESULTS / "raw" / "writers.json", json.dumps(result, indent=1) + "\n")
    write_text(RESULTS / "writers.md", render(result))
    print(json.dumps(result))
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
