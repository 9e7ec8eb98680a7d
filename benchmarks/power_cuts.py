"""Cut the power of a machine that writes to a living index, at a thousand moments, and compare what
a disk may then hold with what was acknowledged.

    # writes results/raw/power_cuts.json and results/power_cuts.md; needs strace
    python benchmarks/power_cuts.py --count 1000 --seed 0

A process makes an index and does random calls of a store, or is killed in their midst and another
goes on; `strace` records every system call that changes a file or a name. Of drawn moments of that
record a disk is built as a power cut may leave it (`power_disk.py`): of what was not synced any
part is missing. An opened index is then compared with a model in memory: all that was acknowledged
is there, the call that ran is there or not, no open is refused, and the index goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import stat
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from retrieval.errors import RetrievalError
from retrieval.serving.bundle import Bundle
from retrieval.serving.store import view
from retrieval.serving.store.contract import widths_of
from retrieval.serving.store.folder import create_local
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.record import Record

from kills import kill_at_line
from living_model import (
    BUNDLES,
    WIDTH,
    Call,
    State,
    Writing,
    check,
    differences,
    item_of,
    make_bundles,
    small,
)
from power_disk import MODES, Disk, strace

RESULTS = Path(__file__).parent / "results"
LIVES, CALLS, CUTS = 3, 12, 40
"""Processes of one record, calls of each, and cuts of one record."""
FAULTS = ("commits", "folders", "files")
"""What a store can be made not to sync, to see that it would be found out."""


# The process that is recorded


class _Enough(Exception):
    """So many calls were done."""


def forget(fault: str) -> None:
    """Have this process leave out syncs."""
    sync, opened = os.fsync, Record._open
    if fault == "commits":

        def careless(record: Record) -> Any:
            connection = opened(record)
            connection.execute("pragma synchronous = off")
            return connection

        Record._open = careless  # type: ignore[method-assign]
    else:
        os.fsync = view.sync_data = lambda file: (
            None if stat.S_ISDIR(os.fstat(file).st_mode) == (fault == "folders") else sync(file)
        )


def live(folder: Path, seed: int, life: int, fault: str | None) -> None:
    """Make an index, or go on with one, and tell what begins and what has returned."""
    small()
    if fault is not None:
        forget(fault)
    draw = random.Random(seed)
    bundles = [Bundle.open(folder / f"bundle{number}", threads=1) for number in range(BUNDLES)]
    marks = os.open(folder / "marks", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    count, killed = [0], draw.random() < 0.5

    def tell(what: str, call: Any) -> None:
        os.write(marks, json.dumps([what, call]).encode())
        count[0] += what == "end"
        if count[0] > CALLS:
            raise _Enough
        if what == "begin" and killed and count[0] == CALLS // 2:
            kill_at_line(draw.randint(40, 8000))

    created = not (folder / "disk" / "index").exists()
    if created:
        tell("begin", {"call": "create"})
        create_local(folder / "disk" / "index", bundles[0], widths_of(bundles[0], features=WIDTH))
        tell("end", None)
    known = json.loads((folder / "states.json").read_text())
    states = [State(**one) for one in known["states"]]
    for state in states:
        state.generations = {int(number): tuple(one) for number, one in state.generations.items()}  # type: ignore[misc]
    writing = Writing(
        folder / "disk" / "index", bundles, states[0], draw.randrange(1 << 40), tell, None
    )
    if not created:
        which = next(
            at
            for at, state in enumerate(states)
            if not differences(writing.store, state, bundles, 0)
        )
        writing.state = states[which]
        writing.first = known["running"] if which == 0 and known["again"] else None
        writing.store._begin_to_write()
        tell("is", which)
    try:
        writing.run()
    except _Enough:
        if draw.random() < 0.5:
            writing.store.close()
        os._exit(0)


# What it leaves


class Told:
    """What an index should hold at moments of a record.

    Attributes:
        moments: of each thing that was told: when, the states that are right from then on, what
            each snapshot holds and whether it must be there, and the call that runs.
    """

    def __init__(self) -> None:
        self.states = [State()]
        self.running: Call | None = {"call": "create"}
        self.copies: dict[str, tuple[State, bool]] = {}
        self.moments: list[tuple[int, list[State], dict[str, tuple[State, bool]], Call | None]] = [
            (0, self.states, {}, self.running)
        ]

    def take(self, when: int, what: str, call: Any) -> None:
        """Take in what a process told."""
        if what == "begin":
            self.running = call
            self.states = (
                [self.states[0]]
                if call["call"] == "create"
                else [self.states[0], self.states[0].after(call)]
            )
            if call["call"] == "snapshot":
                self.copies = self.copies | {call["name"]: (self.states[0], False)}
        else:
            if self.running is not None and self.running["call"] == "snapshot" and what == "end":
                self.copies = self.copies | {self.running["name"]: (self.states[0], True)}
            self.states = [self.states[-1] if what == "end" else self.states[call]]
            self.running = None
        self.moments.append((when, self.states, self.copies, self.running))


def record(
    folder: Path, seed: int, fault: str | None = None, lives: int = LIVES
) -> tuple[Disk, Told]:
    """Have processes make an index and work on it; return the record of it, and what they told."""
    root = folder / "disk"
    root.mkdir()
    disk, told, draw = Disk(root), Told(), random.Random(seed)
    for life in range(lives):
        running = told.running
        known = {
            "states": [vars(state) for state in told.states],
            "running": running,
            "again": running and running["call"] != "begin",
        }
        (folder / "states.json").write_text(json.dumps(known))
        me = [
            sys.executable,
            __file__,
            "--live",
            str(folder),
            str(seed + life),
            str(life),
            *([fault] if fault else []),
        ]
        kill = (
            draw.randint(*((10, 120) if life == 0 else (1, 40)))
            if life < lives - 1 and draw.random() < 0.7
            else None
        )
        done = subprocess.run(
            [*strace(folder / "trace", kill), *me], capture_output=True, text=True, timeout=300
        )
        if done.returncode not in (0, -9, 137):
            raise RuntimeError(done.stderr)
        seen = len(disk.marks)
        disk.replay(folder / "trace", folder / "marks")
        for when, text in disk.marks[seen:]:
            told.take(when, *json.loads(text))
    return disk, told


def same(disk: Disk, folder: Path) -> list[str]:
    """Return the files of a record's end that are not what the system shows: a record that is whole
    has none.
    """
    disk.write(folder, disk.time, "all", "all", random.Random(0))
    there, made = (
        {
            path.relative_to(top): path.read_bytes()
            for path in Path(top).rglob("*")
            if path.is_file() and not path.name.endswith(("-shm", ".lock"))
        }
        for top in (disk.root, folder)
    )
    return sorted(
        str(name) for name in there.keys() | made.keys() if there.get(name) != made.get(name)
    )


def cut(
    disk: Disk, told: Told, bundles: list[Bundle], folder: Path, draw: random.Random
) -> dict[str, Any]:
    """Cut the power at a drawn moment of a drawn call; return what an index is like afterwards."""
    begins = [when for when, *_ in told.moments] + [disk.time]
    within = [
        (at, [when for when in disk.moments if begins[at] < when <= begins[at + 1]])
        for at in range(len(begins) - 1)
    ]
    at, moments = draw.choice([one for one in within if one[1]])
    when = draw.choice(moments) - draw.randrange(2)
    _, states, copies, running = told.moments[at]
    modes = draw.choice(MODES), draw.choice(MODES)
    disk.write(folder, when, *modes, draw)
    row = {
        "call": running["call"] if running else "between calls",
        "names": modes[0],
        "data": modes[1],
    }
    try:
        said = look(folder, states, copies, running, bundles, draw)
    except RetrievalError as fault:
        said = ("refused", [str(fault)])
    except Exception as fault:
        said = ("crash", [f"{type(fault).__name__}: {fault}"])
    shutil.rmtree(folder)
    return row | {
        "outcome": said[0],
        "wrong": [
            f"{row['call']}, names {modes[0]}, data {modes[1]}, moment {when}: {one}"[:300]
            for one in said[1]
        ],
    }


def look(
    folder: Path,
    states: list[State],
    copies: dict[str, tuple[State, bool]],
    running: Call | None,
    bundles: list[Bundle],
    draw: random.Random,
) -> tuple[str, list[str]]:
    """Return what became of the call that ran, and all that is wrong."""
    index = folder / "index"
    if running == {"call": "create"} and not index.exists():
        return "not there", []
    said = check(index, states, copies, bundles, 0)
    if said["wrong"]:
        return "wrong", said["wrong"]
    state = states[said["which"]]
    more = {
        "call": "upsert",
        "items": [[f"id{number}", draw.randrange(1 << 30)] for number in range(3)],
    }
    served = state.generations[state.served][0]
    with LocalStore(index, upkeep=False) as store:
        store.upsert(
            [item_of(id, one, served) for id, one in more["items"]], bundles[served].sha256
        )
    with LocalStore(index, upkeep=False) as store:
        if wrong := differences(store, state.after(more), bundles, 1):
            return "wrong", [f"goes on: {one}" for one in wrong]
    if len(states) < 2 or states[0] == states[1]:
        return ("there" if running == {"call": "create"} else "same either way"), []
    return ("there" if said["which"] else "not there"), []


def cuts(
    count: int,
    seed: int,
    folder: Path,
    shown: Callable[[int, dict[str, Any]], object],
    *,
    fault: str | None = None,
    lives: int = LIVES,
    each: int = CUTS,
) -> list[dict[str, Any]]:
    """Cut the power so many times; return what each left."""
    bundles = make_bundles(folder)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        draw = random.Random(seed * 1_000_003 + len(rows))
        with tempfile.TemporaryDirectory(dir=folder) as here:
            for number in range(BUNDLES):
                shutil.copytree(folder / f"bundle{number}", Path(here) / f"bundle{number}")
            disk, told = record(Path(here), draw.randrange(1 << 40), fault, lives)
            if differ := same(disk, Path(here) / "whole"):
                raise RuntimeError(f"The record is not whole: {', '.join(differ)}")
            for number in range(min(each, count - len(rows))):
                rows.append(cut(disk, told, bundles, Path(here) / f"cut{number}", draw))
                shown(len(rows), rows[-1])
    return rows


def summary(rows: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return what is kept of a run."""
    return {
        "seed": seed,
        "cuts": len(rows),
        "wrong": [one for row in rows for one in row["wrong"]],
        "cells": [
            [*key, count]
            for key, count in sorted(Counter((row["call"], row["outcome"]) for row in rows).items())
        ],
        "modes": [
            [*key, count]
            for key, count in sorted(Counter((row["names"], row["data"]) for row in rows).items())
        ],
        "machine": (
            f"{platform.system()}, Python {platform.python_version()}, apsw {version('apsw')}"
        ),
    }


def render(raw: dict[str, Any]) -> str:
    """Return the page of a run that was kept."""
    outcomes = ("there", "not there", "same either way", "wrong", "refused", "crash")
    cells = {(call, outcome): count for call, outcome, count in raw["cells"]}
    modes = {(names, data): count for names, data, count in raw["modes"]}
    lines = [
        "# Power cuts\n",
        (
            f"`python benchmarks/power_cuts.py --count {raw['cuts']} --seed {raw['seed']}`;"
            f" {raw['machine']}.\n"
        ),
        (
            "Processes made a living index and did random calls; some were killed, at a drawn line"
            " of Python or as they entered a sync, and others went on. `strace` recorded each"
            f" system call that changed a file or a name. {raw['cuts']:,} times a disk was built"
            " from the record as a power cut at a drawn moment may leave it: of what was not"
            " synced by then, any part is missing. An index was then opened and compared with a"
            " model in memory: ids, labels, metadata, arrays, originals, counts, generations,"
            " filters, neighbours, snapshots, and the files with what the record names. Then it"
            " was written to and opened again.\n"
        ),
        (
            f"**Differences: {len(raw['wrong'])}.** Everything that was acknowledged was there; the"
            " call that ran was wholly there, or not at all; no index was refused.\n"
            if not raw["wrong"]
            else f"**Differences: {len(raw['wrong'])}.**\n"
        ),
        "| call that ran | " + " | ".join(outcomes) + " |",
        "|---" + "|--:" * len(outcomes) + "|",
    ]
    for call in sorted({call for call, _ in cells}):
        lines.append(
            f"| {call} | " + " | ".join(str(cells.get((call, one), 0)) for one in outcomes) + " |"
        )
    lines += [
        (
            "\nWhat had become of changes that were not synced, and how often it was drawn. Prefix:"
            " those before a drawn moment are there, the next one in part. Any: each change of a"
            " name, and each sector of 512 or 4,096 bytes, is there or not.\n"
        ),
        "| names | " + " | ".join(f"bytes: {one}" for one in MODES) + " |",
        "|---" + "|--:" * len(MODES) + "|",
        *(
            f"| {names} | " + " | ".join(str(modes.get((names, data), 0)) for data in MODES) + " |"
            for names in MODES
        ),
        "",
        *(f"- {one}" for one in raw["wrong"][:50]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    if sys.argv[1:2] == ["--live"]:
        folder, seed, life, *fault = sys.argv[2:]
        live(Path(folder), int(seed), int(life), fault[0] if fault else None)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lives", type=int, default=LIVES, help="processes of one record")
    parser.add_argument("--each", type=int, default=CUTS, help="cuts of one record")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--without",
        choices=FAULTS,
        help="have the store leave out these syncs; losses are then expected",
    )
    chosen = parser.parse_args()

    def shown(number: int, row: dict[str, Any]) -> None:
        if row["wrong"] or number % 50 == 0:
            print(number, row, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        rows = cuts(
            chosen.count,
            chosen.seed,
            Path(folder),
            shown,
            fault=chosen.without,
            lives=chosen.lives,
            each=chosen.each,
        )
        raw = summary(rows, chosen.seed)
    (chosen.output / "raw").mkdir(exist_ok=True)
    (chosen.output / "raw" / "power_cuts.json").write_text(
        json.dumps(raw, indent=1) + "\n", encoding="utf-8"
    )
    (chosen.output / "power_cuts.md").write_text(render(raw), encoding="utf-8")
    print(render(raw))
    sys.exit(1 if raw["wrong"] else 0)


if __name__ == "__main__":
    main()
