"""Kill a process that writes to a living index, again and again, and compare what is left with what
it had been told is written.

    # writes results/raw/kills.json and results/kills.md
    python benchmarks/kills.py --count 1000 --seed 0

A child does random calls of a store and says over a pipe which one it begins and which one has
returned. It is killed by SIGKILL: either by this process, after a time drawn from what such a call
takes, so that it stops within SQLite or the system, or by itself, at a drawn line of Python of the
store. Another child then opens the index and compares everything with a model in memory: all that
was acknowledged, and of the call that ran, all or nothing. The next child goes on with what is
left.

Modelled: a process that dies. The system lives, and loses nothing of what it was given to write.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

from retrieval.serving.bundle import Bundle
from retrieval.serving.store.contract import widths_of
from retrieval.serving.store.folder import create_local

from living_model import WIDTH, Call, State, Writing, check, make_bundles, small

RESULTS = Path(__file__).parent / "results"
LIVES, SLOWEST = 8, 3.0


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """Do work in a child; return its process and the end of a pipe that it writes to."""
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
        with suppress(OSError):  # nobody listens any more
            os.write(writing, json.dumps({"fault": traceback.format_exc()}).encode() + b"\n")
        os._exit(1)


def kill_at_line(count: int) -> None:
    """Have this process kill itself when it has executed so many lines of the store."""
    left = [count]
    here = (f"{os.sep}serving{os.sep}store{os.sep}", f"host{os.sep}files.py")

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


class Life:
    """An index that is written to, killed and looked at, several times.

    Args:
        folder: for it.
        bundles: opened.
        seed: of everything.
        took: seconds of each call so far, by name; is added to.
    """

    def __init__(
        self, folder: Path, bundles: list[Bundle], seed: int, took: dict[str, float]
    ) -> None:
        self.folder = folder / "index"
        self.bundles, self.took = bundles, took
        self.random = random.Random(seed)
        self.state = State()
        self.again: Call | None = None
        create_local(self.folder, bundles[0], widths_of(bundles[0], features=WIDTH))

    def kill(self) -> dict[str, Any]:
        """Kill one writer, and return what is left of its work."""
        seed, lines = self.random.randrange(1 << 40), self.random.random() < 0.5
        after = self.random.randint(1, 12)
        at_line = int(self.random.choice([40, 400, 4000]) * self.random.uniform(1, 10))

        def work(pipe: int) -> None:
            small()

            def tell(what: str, call: Call | None) -> None:
                if what == "begin" and lines and not counter[0]:
                    kill_at_line(at_line)
                counter[0] += what == "begin"
                os.write(pipe, json.dumps([what, call]).encode() + b"\n")

            counter = [0]
            Writing(self.folder, self.bundles, self.state, seed, tell, self.again).run()

        process, pipe = forked(work)
        told = self._listen(process, pipe, None if lines else after)
        _, status = os.waitpid(process, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            return {
                "how": "line" if lines else "time",
                "call": "",
                "outcome": "crash",
                "wrong": [f"the writer ended by itself: {told}"],
                "acknowledged": 0,
            }
        return self._look(told, "line" if lines else "time")

    def _listen(self, process: int, pipe: int, after: int | None) -> list[Any]:
        """Read what a child tells until it is dead; kill it within the call number `after`."""
        told: list[Any] = []
        rest, began, deadline = b"", time.monotonic(), None
        while True:
            wait = 120.0 if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], wait)[0]:
                os.kill(process, signal.SIGKILL)
                deadline = time.monotonic() + 120
                continue
            if not (data := os.read(pipe, 1 << 20)):
                os.close(pipe)
                return told
            *whole, rest = (rest + data).split(b"\n")
            for text in whole:
                told.append(json.loads(text))
                if isinstance(told[-1], dict):
                    continue
                what, call = told[-1]
                if what == "begin":
                    name, began = call["call"], time.monotonic()
                    if after is not None and sum(one[0] == "begin" for one in told) == after:
                        deadline = began + self.random.uniform(0, 1.3) * self.took.get(name, 0.02)
                elif deadline is None:
                    self.took[name] = 0.7 * self.took.get(name, 0.02) + 0.3 * min(
                        SLOWEST, time.monotonic() - began
                    )

    def _look(self, told: list[Any], how: str) -> dict[str, Any]:
        state, running, acknowledged = self.state, None, 0
        copies = {}
        for what, call in told:
            if what == "begin":
                running = call
                if call["call"] == "snapshot":
                    copies[call["name"]] = (state, told[-1][1] is not call)
            else:
                state, running, acknowledged = state.after(running), None, acknowledged + 1
        states = [state] if running is None else [state, state.after(running)]
        seed = self.random.randrange(1 << 40)
        process, pipe = forked(
            lambda out: print(
                json.dumps(check(self.folder, states, copies, self.bundles, seed)),
                file=os.fdopen(out, "w"),
                flush=True,
            )
        )
        with os.fdopen(pipe) as file:
            text = file.read()
        _, status = os.waitpid(process, 0)
        said = (
            json.loads(text or "{}")
            if status == 0
            else {"which": None, "wrong": [f"looking failed: {status} {text}"]}
        )
        row = {
            "how": how,
            "call": running["call"] if running else "between calls",
            "acknowledged": acknowledged,
            "wrong": said["wrong"],
        }
        if said["which"] is None:
            return row | {"outcome": "wrong"}
        self.state = states[said["which"]]
        changed = len(states) == 2 and states[0] != states[1]
        self.again = (
            running if running and said["which"] == 0 and running["call"] != "begin" else None
        )
        return row | {
            "outcome": ("there" if said["which"] else "not there") if changed else "same either way"
        }


def kills(
    count: int, seed: int, folder: Path, shown: Callable[[int, dict[str, Any]], object]
) -> list[dict[str, Any]]:
    """Kill so many writers, on as many indexes as it takes; return what each left."""
    bundles = make_bundles(folder)
    rows: list[dict[str, Any]] = []
    took: dict[str, float] = {}
    while len(rows) < count:
        with tempfile.TemporaryDirectory(dir=folder) as here:
            life = Life(Path(here), bundles, seed * 1_000_003 + len(rows), took)
            for _ in range(min(LIVES, count - len(rows))):
                rows.append(life.kill())
                shown(len(rows), rows[-1])
                if rows[-1]["wrong"]:
                    break
    return rows


def summary(rows: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return what is kept of a run."""
    cells = Counter((row["call"], row["how"], row["outcome"]) for row in rows)
    return {
        "seed": seed,
        "kills": len(rows),
        "acknowledged": sum(row["acknowledged"] for row in rows),
        "wrong": [one for row in rows for one in row["wrong"]],
        "cells": [[*key, count] for key, count in sorted(cells.items())],
        "machine": (
            f"{platform.system()}, Python {platform.python_version()}, apsw {version('apsw')}"
        ),
    }


def render(raw: dict[str, Any]) -> str:
    """Return the page of a run that was kept."""
    lines = [
        "# Writers that are killed\n",
        (
            f"`python benchmarks/kills.py --count {raw['kills']} --seed {raw['seed']}`;"
            f" {raw['machine']}.\n"
        ),
        (
            f"{raw['kills']:,} writers of a living index were killed by SIGKILL after"
            f" {raw['acknowledged']:,} acknowledged calls. After each kill another process opened"
            " the index and compared ids, labels, metadata, arrays, originals, counts,"
            " generations, filters and neighbours with a model in memory, and the files with what"
            " the record names; snapshots that were there were compared too.\n"
        ),
        f"**Differences: {len(raw['wrong'])}.**\n",
        (
            "How: at a drawn time (within SQLite, NumPy or the system), or at a drawn line of"
            " Python of the store. The call that ran was wholly there afterwards, or not at all; or"
            " it changes nothing that can be seen.\n"
        ),
        "| call that ran | how | there | not there | same either way |",
        "|---|---|--:|--:|--:|",
    ]
    cells = {(call, how, outcome): count for call, how, outcome, count in raw["cells"]}
    for call, how in sorted({key[:2] for key in cells}):
        counts = " | ".join(
            str(cells.get((call, how, one), 0)) for one in ("there", "not there", "same either way")
        )
        lines.append(f"| {call} | {how} | {counts} |")
    lines += ["", *(f"- {one}" for one in raw["wrong"][:50])]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()

    def shown(number: int, row: dict[str, Any]) -> None:
        if row["wrong"] or number % 50 == 0:
            print(number, row, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        raw = summary(kills(chosen.count, chosen.seed, Path(folder), shown), chosen.seed)
    (chosen.output / "raw").mkdir(exist_ok=True)
    (chosen.output / "raw" / "kills.json").write_text(
        json.dumps(raw, indent=1) + "\n", encoding="utf-8"
    )
    (chosen.output / "kills.md").write_text(render(raw), encoding="utf-8")
    print(render(raw))
    sys.exit(1 if raw["wrong"] else 0)


if __name__ == "__main__":
    main()
