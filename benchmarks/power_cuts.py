"""Cut the power of a machine that writes to a living index at a thousand moments, and compare what
a disk may then hold with what was acknowledged.

    # writes results/raw/power_cuts.json and results/power_cuts.md; needs strace
    python benchmarks/power_cuts.py --count 1000 --seed 0

A process creates an index and makes random calls of a store. Sometimes it is killed during a call,
and another process continues. `strace` records every system call that changes a file or a name. For
random moments of that record, `power_disk.py` builds a disk as a power cut may leave it: any part
of what was not synced is missing. The script then opens the index and compares it with a model in
memory. Everything acknowledged must be there, the running call must have had its whole effect or
none, the index must open, and it must accept further calls.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from retrieval.bundle.bundle import Bundle
from retrieval.errors import RetrievalError
from retrieval.store import snapshot_view
from retrieval.store.contract import widths_of
from retrieval.store.folder import create_local
from retrieval.store.local import LocalStore
from retrieval.store.record import Record

import living_model as living
from bench import page
from power_disk import MODES, Disk, strace

LIVES, CALLS, CUTS = 3, 12, 40
"""Processes in one record, calls of each process, and cuts of one record."""
FAULTS = ("commits", "folders")
"""Syncs that a store can leave out, to show that the script detects it."""
CREATE: living.Call = {"call": "create"}


# The recorded process


class _Enough(Exception):
    """Raised after the wanted number of calls."""


def forget(fault: str) -> None:
    """Make this process leave out syncs."""
    sync, opened = os.fsync, Record._open
    if fault == "commits":

        def careless(record: Record) -> Any:
            connection = opened(record)
            connection.execute("pragma synchronous = off")
            return connection

        Record._open = careless  # type: ignore[method-assign]
    else:
        os.fsync = snapshot_view.sync_data = lambda file: (
            None if stat.S_ISDIR(os.fstat(file).st_mode) else sync(file)
        )


def live(folder: Path, seed: int, killed: str, fault: str | None) -> None:
    """Create or continue an index, and report the begin and the end of each call.

    A process that is killed ("line", "sync") has no thread for upkeep, and a process that ends
    normally waits for its upkeep. So no other call is running whose progress the trace would not
    show.
    """
    living.frequent_upkeep()
    if fault is not None:
        forget(fault)
    draw = random.Random(seed)
    paths = [folder / f"bundle{number}" for number in range(living.BUNDLES)]
    bundles = [Bundle.open(path, threads=1) for path in paths]
    marks = os.open(folder / "marks", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    count = [0]

    def tell(what: str, call: Any) -> None:
        os.write(marks, json.dumps([what, call]).encode())
        count[0] += what == "end"
        if count[0] > CALLS:
            raise _Enough
        if what == "begin" and killed == "line" and count[0] == CALLS // 2:
            living.kill_at_line(draw.randint(40, 8000))

    index = folder / "disk" / "index"
    created = not index.exists()
    if created:
        tell("begin", CREATE)
        create_local(index, bundles[0], widths_of(bundles[0], features=living.WIDTH))
        tell("end", None)
    known = json.loads((folder / "states.json").read_text())
    states = [living.State(**fields) for fields in known["states"]]
    for state in states:
        entries = state.generations.items()
        state.generations = {int(number): tuple(entry) for number, entry in entries}  # type: ignore[misc]
    background = None if killed == "no" else False
    writing = living.Writer(
        index, bundles, states[0], draw.randrange(1 << 40), tell, None, background
    )
    if not created:
        same = [not living.differences(writing.store, state, bundles, 0) for state in states]
        which = same.index(True)
        writing.state = states[which]
        writing.first = known["again"] if which == 0 else None
        writing.store._begin_to_write()
        tell("is", which)
    try:
        writing.run()
    except _Enough:
        if writing.background or draw.random() < 0.5:
            writing.store.close()
        os._exit(0)


# The index after a power cut


def record(
    folder: Path, seed: int, fault: str | None = None, lives: int = LIVES
) -> tuple[Disk, living.Expected]:
    """Run processes that create an index and change it; return the disk and what it should hold."""
    root = folder / "disk"
    root.mkdir()
    disk, expected, draw = Disk(root), living.Expected(living.State(), CREATE), random.Random(seed)
    for life in range(lives):
        known = {"states": [vars(state) for state in expected.states], "again": expected.again}
        (folder / "states.json").write_text(json.dumps(known))
        killed = draw.choice(["line", "sync", "sync", "no"]) if life < lives - 1 else "no"
        words = ["--live", str(folder), str(seed + life), killed, *([fault] if fault else [])]
        kill = draw.randint(*((1, 40) if life else (10, 120))) if killed == "sync" else None
        line = [*strace(folder / "trace", kill), sys.executable, __file__, *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300)
        if done.returncode not in (0, -9, 137):
            raise RuntimeError(done.stderr)
        seen = len(disk.marks)
        disk.replay(folder / "trace", folder / "marks")
        for when, text in disk.marks[seen:]:
            expected.take(*json.loads(text), when)
    return disk, expected


def same(disk: Disk, folder: Path) -> list[str]:
    """Return the files that differ between the end of a trace and the system; none should."""
    disk.write(folder, disk.time, "all", "all", random.Random(0))
    real, replayed = (
        {
            path.relative_to(top): path.read_bytes()
            for path in Path(top).rglob("*")
            if path.is_file() and not path.name.endswith(("-shm", ".lock"))
        }
        for top in (disk.root, folder)
    )
    names = real.keys() | replayed.keys()
    return sorted(str(name) for name in names if real.get(name) != replayed.get(name))


def cut(
    disk: Disk, expected: living.Expected, bundles: list[Bundle], folder: Path, draw: random.Random
) -> dict[str, Any]:
    """Cut the power at a random moment of a random call; return the state of the index."""
    ends = [when for when, *_ in expected.moments[1:]] + [disk.time]
    within = [
        (moment, times)
        for moment, end in zip(expected.moments, ends, strict=True)
        if (times := [when for when in disk.moments if moment[0] < when <= end])
    ]
    (_, states, copies, running), times = draw.choice(within)
    when = draw.choice(times) - draw.randrange(2)
    names, data = draw.choice(MODES), draw.choice(MODES)
    disk.write(folder, when, names, data, draw)
    call = running["call"] if running else "between calls"
    try:
        outcome, faults = look(folder, states, copies, running, bundles, draw)
    except RetrievalError as fault:
        outcome, faults = "refused", [str(fault)]
    except Exception as fault:
        outcome, faults = "crash", [f"{type(fault).__name__}: {fault}"]
    shutil.rmtree(folder)
    place = f"{call}, names {names}, data {data}, moment {when}"
    row = {"call": call, "names": names, "data": data, "outcome": outcome}
    return row | {"wrong": [f"{place}: {fault}"[:300] for fault in faults]}


def look(
    folder: Path,
    states: list[living.State],
    copies: living.Copies,
    running: living.Call | None,
    bundles: list[Bundle],
    draw: random.Random,
) -> tuple[str, list[str]]:
    """Return the outcome of the running call, and everything that is wrong."""
    index = folder / "index"
    if running == CREATE and not index.exists():
        return "not there", []
    result = living.check(index, states, copies, bundles, 0)
    if result["wrong"]:
        return "wrong", result["wrong"]
    state = states[result["which"]]
    pairs = [[f"id{number}", draw.randrange(1 << 30)] for number in range(3)]
    more: living.Call = {"call": "upsert", "items": pairs}
    served = state.generations[state.served][0]
    with LocalStore(index, upkeep=False) as store:
        store.upsert(
            [living.item_of(id, version, served) for id, version in pairs], bundles[served].sha256
        )
    with LocalStore(index, upkeep=False) as store:
        if wrong := living.differences(store, state.after(more), bundles, 1):
            return "wrong", [f"goes on: {fault}" for fault in wrong]
    if len(states) < 2 or states[0] == states[1]:
        return ("there" if running == CREATE else "same either way"), []
    return ("there" if result["which"] else "not there"), []


def cuts(options: Any, folder: Path) -> list[living.Row]:
    """Cut the power as often as the options say; return one row per cut."""
    bundles = living.make_bundles(folder)
    rows: list[living.Row] = []
    while len(rows) < options.count:
        draw = random.Random(options.seed * 1_000_003 + len(rows))
        with tempfile.TemporaryDirectory(dir=folder) as name:
            here = Path(name)
            for number in range(living.BUNDLES):
                shutil.copytree(folder / f"bundle{number}", here / f"bundle{number}")
            disk, expected = record(here, draw.randrange(1 << 40), options.without, options.lives)
            if differ := same(disk, here / "whole"):
                raise RuntimeError(f"The record is not whole: {', '.join(differ)}")
            for number in range(min(options.each, options.count - len(rows))):
                rows.append(cut(disk, expected, bundles, here / f"cut{number}", draw))
                living.report(len(rows), rows[-1])
    return rows


def render(raw: living.Row) -> str:
    outcomes = ("there", "not there", "same either way", "wrong", "refused", "crash")
    order = sorted(raw["modes"], key=lambda cell: MODES.index(cell[0]))
    wrong = "\n".join(f"- {text}" for text in raw["wrong"][:50])
    verdict = """Everything acknowledged was there, the running call had had its whole effect or
        none, and every index opened."""
    return page(f"""
        # Power cuts

        `python benchmarks/power_cuts.py --count {raw["cuts"]} --seed {raw["seed"]}`;
        {raw["machine"]}.

        Processes created a living index and made random calls. Some were killed, at a random line
        of Python or when they entered a sync, and others continued. `strace` recorded each system
        call that changed a file or a name. {raw["cuts"]:,} times a disk was built from the record
        as a power cut at a random moment may leave it: any part of what was not synced by then is
        missing. The index was then opened and compared with a model in memory: ids, labels,
        metadata, arrays, originals, counts, generations, filters, neighbours and snapshots, and the
        files with the index's record. Then the index was written to and opened again.

        **Differences: {len(raw["wrong"])}.** {"" if raw["wrong"] else verdict}

        {living.counts_table(["call that ran"], outcomes, raw["cells"])}

        Unsynced changes that reached the disk, and how often each case was drawn. Prefix: the
        changes before a random moment, and a part of the next one. Any: a random choice of changed
        names and of sectors of 512 or 4,096 bytes.

        {living.counts_table(["names"], MODES, order, prefix="bytes: ")}

        {wrong}
    """)


def main() -> None:
    if sys.argv[1:2] == ["--live"]:
        folder, seed, killed, *faults = sys.argv[2:]
        live(Path(folder), int(seed), killed, faults[0] if faults else None)
    parser = living.run_arguments(__doc__, count=1000)
    parser.add_argument("--lives", type=int, default=LIVES, help="processes in one record")
    parser.add_argument("--each", type=int, default=CUTS, help="cuts of one record")
    less = "have the store leave out these syncs; losses are then expected"
    parser.add_argument("--without", choices=FAULTS, help=less)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = cuts(options, Path(folder))
    raw = living.summary("cuts", rows, options.seed, "call", "outcome")
    raw["modes"] = living.cells_of(rows, "names", "data")
    living.conclude("power_cuts", raw, render(raw), options.output)


if __name__ == "__main__":
    main()
