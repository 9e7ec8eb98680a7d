"""Kill a process that writes to a living index, again and again, and compare the index with what
was acknowledged.

    # writes results/raw/kills.json and results/kills.md
    python benchmarks/kills.py --count 1000 --seed 0

A child makes random calls of a store and reports over a pipe which call begins and which has
returned. SIGKILL ends it: this process sends it after a random time, so that it hits SQLite or the
system, or the child kills itself at a random line of the store's Python. Another child then opens
the index and compares everything with a model in memory. Everything acknowledged must be there, and
the running call must have had its whole effect or none. The next child continues with that index.

Only the process dies. The system lives, and keeps everything that it was given to write.
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

from retrieval.bundle.bundle import Bundle
from retrieval.store.contract import widths_of
from retrieval.store.folder import create_local

import living_model as living
from bench import page

LIVES = 8
OUTCOMES = ("there", "not there", "same either way")


class Life:
    """An index that is written to, killed and compared."""

    def __init__(self, folder: Path, bundles: list[Bundle], seed: int) -> None:
        self.folder, self.bundles = folder / "index", bundles
        self.random = random.Random(seed)
        self.state = living.State()
        self.again: living.Call | None = None
        create_local(self.folder, bundles[0], widths_of(bundles[0], features=living.WIDTH))

    def kill(self) -> living.Row:
        """Kill one writer; return the row of its outcome."""
        seed, lines = self.random.randrange(1 << 40), self.random.random() < 0.5
        at_line = int(self.random.choice([40, 400, 4000]) * self.random.uniform(1, 10))

        def work(pipe: int) -> None:
            living.frequent_upkeep()
            begun = [0]

            def tell(what: str, call: living.Call | None) -> None:
                if what == "begin" and lines and not begun[0]:
                    living.kill_at_line(at_line)
                begun[0] += what == "begin"
                os.write(pipe, json.dumps([what, call]).encode() + b"\n")

            living.Writer(self.folder, self.bundles, self.state, seed, tell, self.again).run()

        process, pipe = living.forked(work)
        reports = self._listen(process, pipe, not lines)
        _, status = os.waitpid(process, 0)
        how = "line" if lines else "time"
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            wrong = [f"the writer ended by itself: {reports}"]
            row: living.Row = {"call": "", "outcome": "crash", "wrong": wrong, "acknowledged": 0}
        else:
            row = self._look(reports)
        return row | {"how": how}

    def _listen(self, process: int, pipe: int, kill: bool) -> list[Any]:
        """Read a child's reports until it is dead; kill it some time after its first call."""
        reports: list[Any] = []
        rest, deadline = b"", None
        while True:
            wait = 120.0 if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], wait)[0]:
                os.kill(process, signal.SIGKILL)
                deadline = time.monotonic() + 120
                continue
            if not (data := os.read(pipe, 1 << 20)):
                os.close(pipe)
                return reports
            *whole, rest = (rest + data).split(b"\n")
            reports += map(json.loads, whole)
            if kill and deadline is None:
                deadline = time.monotonic() + self.random.expovariate(4)

    def _look(self, reports: list[Any]) -> living.Row:
        """Compare the index with its writer's reports."""
        model = living.Expected(self.state)
        for event, call in reports:
            model.take(event, call)
        states, running, copies = model.states, model.running, model.copies
        seed = self.random.randrange(1 << 40)

        def work(pipe: int) -> None:
            result = living.check(self.folder, states, copies, self.bundles, seed)
            os.write(pipe, json.dumps(result).encode())

        lines, status = living.output_of(work)
        result = lines[0] if lines and not status else {}
        which = result.get("which")
        row = {
            "call": running["call"] if running else "between calls",
            "acknowledged": sum(event == "end" for event, _ in reports),
            "wrong": result.get("wrong", [f"looking failed: {status} {lines}"]),
        }
        if which is None:
            return row | {"outcome": "wrong"}
        self.state = states[which]
        changed = len(states) == 2 and states[0] != states[1]
        self.again = None if which else model.again
        outcome = ("there" if which else "not there") if changed else "same either way"
        return row | {"outcome": outcome}


def kills(count: int, seed: int, folder: Path) -> list[living.Row]:
    """Kill `count` writers, on as many indexes as that needs; return their rows."""
    bundles = living.make_bundles(folder)
    rows: list[living.Row] = []
    while len(rows) < count:
        with tempfile.TemporaryDirectory(dir=folder) as here:
            life = Life(Path(here), bundles, seed * 1_000_003 + len(rows))
            for _ in range(min(LIVES, count - len(rows))):
                rows.append(life.kill())
                living.report(len(rows), rows[-1])
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
        and compared ids, labels, metadata, arrays, originals, counts, generations, filters,
        neighbours and snapshots with a model in memory, and the files with the index's record.

        **Differences: {len(raw["wrong"])}.**

        How: at a random time (within SQLite, NumPy or the system), or at a random line of the
        store's Python. Afterwards the running call had had its whole effect ("there") or none ("not
        there"); some calls change nothing visible.

        {living.counts_table(["call that ran", "how"], OUTCOMES, raw["cells"])}

        {wrong}
    """)


def main() -> None:
    options = living.run_arguments(__doc__, count=1000).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = kills(options.count, options.seed, Path(folder))
    raw = living.summary("kills", rows, options.seed, "call", "how", "outcome")
    raw["acknowledged"] = sum(row["acknowledged"] for row in rows)
    living.conclude("kills", raw, render(raw), options.output)


if __name__ == "__main__":
    main()
