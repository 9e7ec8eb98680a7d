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

import json
import os
import random
import select
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from retrieval.serving.bundle import Bundle
from retrieval.serving.store.contract import widths_of
from retrieval.serving.store.folder import create_local

import living_model as living
from bench import page

LIVES, SLOWEST = 8, 3.0
OUTCOMES = ("there", "not there", "same either way")


class Life:
    """An index that is written to, killed and looked at; `took` has seconds of each call so far."""

    def __init__(
        self, folder: Path, bundles: list[Bundle], seed: int, took: dict[str, float]
    ) -> None:
        self.folder = folder / "index"
        self.bundles, self.took = bundles, took
        self.random = random.Random(seed)
        self.state = living.State()
        self.again: living.Call | None = None
        create_local(self.folder, bundles[0], widths_of(bundles[0], features=living.WIDTH))

    def kill(self) -> living.Row:
        """Kill one writer, and return what is left of its work."""
        seed, lines = self.random.randrange(1 << 40), self.random.random() < 0.5
        after = self.random.randint(1, 12)
        at_line = int(self.random.choice([40, 400, 4000]) * self.random.uniform(1, 10))

        def work(pipe: int) -> None:
            living.small()
            begun = [0]

            def tell(what: str, call: living.Call | None) -> None:
                if what == "begin" and lines and not begun[0]:
                    living.kill_at_line(at_line)
                begun[0] += what == "begin"
                os.write(pipe, json.dumps([what, call]).encode() + b"\n")

            living.Writing(self.folder, self.bundles, self.state, seed, tell, self.again).run()

        process, pipe = living.forked(work)
        told = self._listen(process, pipe, None if lines else after)
        _, status = os.waitpid(process, 0)
        how = "line" if lines else "time"
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            wrong = [f"the writer ended by itself: {told}"]
            row: living.Row = {"call": "", "outcome": "crash", "wrong": wrong, "acknowledged": 0}
        else:
            row = self._look(told)
        return row | {"how": how}

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
                if isinstance(told[-1], dict):  # a fault
                    continue
                what, call = told[-1]
                if what == "begin":
                    name, began = call["call"], time.monotonic()
                    if after is not None and sum(one[0] == "begin" for one in told) == after:
                        deadline = began + self.random.uniform(0, 1.3) * self.took.get(name, 0.02)
                elif deadline is None:
                    seconds = min(SLOWEST, time.monotonic() - began)
                    self.took[name] = 0.7 * self.took.get(name, 0.02) + 0.3 * seconds

    def _look(self, told: list[Any]) -> living.Row:
        """Compare the index with what its writer told before it was killed."""
        model = living.Told(self.state)
        for what, call in told:
            model.take(what, call)
        states, running, copies = model.states, model.running, model.copies
        seed = self.random.randrange(1 << 40)

        def work(pipe: int) -> None:
            found = living.check(self.folder, states, copies, self.bundles, seed)
            os.write(pipe, json.dumps(found).encode())

        lines, status = living.output_of(work)
        found = lines[0] if lines and not status else {}
        which = found.get("which")
        row = {
            "call": running["call"] if running else "between calls",
            "acknowledged": sum(what == "end" for what, _ in told),
            "wrong": found.get("wrong", [f"looking failed: {status} {lines}"]),
        }
        if which is None:
            return row | {"outcome": "wrong"}
        self.state = states[which]
        changed = len(states) == 2 and states[0] != states[1]
        self.again = None if which else model.again
        outcome = ("there" if which else "not there") if changed else "same either way"
        return row | {"outcome": outcome}


def kills(count: int, seed: int, folder: Path) -> list[living.Row]:
    """Kill so many writers, on as many indexes as it takes; return what each left."""
    bundles = living.make_bundles(folder)
    rows: list[living.Row] = []
    took: dict[str, float] = {}
    while len(rows) < count:
        with tempfile.TemporaryDirectory(dir=folder) as here:
            life = Life(Path(here), bundles, seed * 1_000_003 + len(rows), took)
            for _ in range(min(LIVES, count - len(rows))):
                rows.append(life.kill())
                living.show(len(rows), rows[-1])
                if rows[-1]["wrong"]:
                    break
    return rows


def render(raw: living.Row) -> str:
    wrong = "\n".join(f"- {text}" for text in raw["wrong"][:50])
    return page(f"""
        # Writers that are killed

        `python benchmarks/kills.py --count {raw["kills"]} --seed {raw["seed"]}`; {raw["machine"]}.

        {raw["kills"]:,} writers of a living index were killed by SIGKILL after
        {raw["acknowledged"]:,} acknowledged calls. After each kill another process opened the index
        and compared ids, labels, metadata, arrays, originals, counts, generations, filters and
        neighbours with a model in memory, and the files with what the record names; snapshots that
        were there were compared too.

        **Differences: {len(raw["wrong"])}.**

        How: at a drawn time (within SQLite, NumPy or the system), or at a drawn line of Python of
        the store. The call that ran was wholly there afterwards, or not at all; or it changes
        nothing that can be seen.

        {living.counts_table(["call that ran", "how"], OUTCOMES, raw["cells"])}

        {wrong}
    """)


def main() -> None:
    options = living.count_arguments(__doc__, 1000).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = kills(options.count, options.seed, Path(folder))
    raw = living.summary("kills", rows, options.seed, "call", "how", "outcome")
    raw["acknowledged"] = sum(row["acknowledged"] for row in rows)
    living.conclude("kills", raw, render(raw), options.output)


if __name__ == "__main__":
    main()
