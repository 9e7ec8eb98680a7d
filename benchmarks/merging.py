"""How long searches take while segments are merged: beside a writer, with merges and without, in turn in one run.

    python benchmarks/merging.py --cache FOLDER        # writes results/merging.md; some minutes, 1 GB of disk in the temporary folder

An index of 100,000 image vectors of 128 (`image_vectors.py`). One thread adds 100 items every 50 ms. Searches come from one thread and from four of the
same process, and from another process, each with a pause of 5 ms between two. Conditions follow each other again and again: nobody writes; the
writer alone, while upkeep is held back; upkeep as it comes; all segments merged into one without a pause, with their structure, as `compact` does; and the same
with structures built as before they gave way to searches. A condition with merges goes on until one has ended. `--structures` measures some anew, and leaves the others as they are kept.
A search counts for the condition in which it began and ended. Its time is also given less the time for which its thread could run and
got no core (Linux's `schedstat`): that is what locks, the disk and its own work cost, whoever else uses the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from retrieval.serving.bundle import Bundle
from retrieval.serving.local import aside as building
from retrieval.serving.local import upkeep as module
from retrieval.serving.local.merged import Stopped
from retrieval.serving.local.upkeep import Upkeep
from retrieval.serving.store.contract import Item
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.structure import Wanted
from retrieval.serving.store.writing import create_local

from opening import make_bundle

RESULTS = Path(__file__).parent / "results"
CONDITIONS = {
    "quiet": "nobody writes",
    "adds": "a writer, no merges",
    "upkeep": "a writer, upkeep as it comes",
    "merging": "a writer, all segments merged again and again",
    "equal": "the same, built at equal priority",
    "before": "the same, built with all cores and at equal priority",
}
READERS = {
    "1": "one thread",
    "4": "four threads",
    "process": "another process",
}
LONG = ("merging", "equal", "before")
NICER = building._NICER
K, BATCH, EVERY, PAUSE = 10, 100, 0.05, 0.005
FRESH = 10_000  # ids that are added, and then changed again and again: the index does not grow
LONGEST = 120.0  # seconds for one merge, where others use the cores
OPTIONS = {"flat": {}, "hnsw": {"m": 16, "ef_construction": 40}}
Search = tuple[float, float, float]  # beginning, end, seconds less those of waiting for a core


def search(store: LocalStore, queries: Any, bundle: str, stop: threading.Event, out: list[Search]) -> None:
    """Search until told to stop; note when each search began and ended."""
    at = 0
    with Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").open("rb", buffering=0) as waits:

        def waited() -> float:
            waits.seek(0)
            return int(waits.read().split()[1]) / 1e9

        while not stop.is_set():
            began, before = time.monotonic(), waited()
            store.search(queries[at % len(queries)][None], K, bundle)
            ended = time.monotonic()
            out.append((began, ended, max(0.0, ended - began - (waited() - before))))
            at += 1
            time.sleep(PAUSE)


class Writing:
    """The writer and the upkeep of an index, which are let go on or held back."""

    def __init__(self, store: LocalStore, vectors: Any, bundle: str) -> None:
        self._store, self._vectors, self._bundle = store, vectors, bundle
        self._next = 0
        self.steps = dict.fromkeys(CONDITIONS, 0)

    def run(self, condition: str, seconds: float) -> tuple[str, float, float]:
        """Keep a condition for so long; return it with its beginning and end."""
        end = threading.Event()
        upkeep = Upkeep(self._store.home, self._store.writer, thread=False)
        acts = {"quiet": [], "adds": [self._add]}.get(
            condition, [self._add, lambda e: self._tend(e, upkeep, condition)]
        )
        threads = [threading.Thread(target=act, args=(end,)) for act in acts]
        before, began = self.steps[condition], time.monotonic()
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        while condition in LONG and not self.steps[condition] > before and time.monotonic() < began + LONGEST:
            time.sleep(0.1)
        over = time.monotonic()
        end.set()
        upkeep._stop.set()
        for thread in threads:
            thread.join()
        return condition, began, over

    def _add(self, end: threading.Event) -> None:
        due = time.monotonic()
        while not end.is_set():
            ids = [10**9 + n % FRESH for n in range(self._next, self._next + BATCH)]
            self._next += BATCH
            items = [
                Item(
                    str(id),
                    metadata={"share": id % 100},
                    arrays={"vector": self._vectors[id % len(self._vectors)]},
                )
                for id in ids
            ]
            self._store.upsert(items, self._bundle)
            due += EVERY
            end.wait(max(0.0, due - time.monotonic()))

    def _tend(self, end: threading.Event, upkeep: Upkeep, condition: str) -> None:
        generation = self._store.generations()[0]
        upkeep._thread = threading.current_thread()  # as if it were its own
        module.aside = (lambda work: work()) if condition == "before" else building.aside  # type: ignore[attr-defined]
        building._NICER = 0 if condition == "equal" else NICER
        while not end.is_set():
            try:
                if condition == "upkeep":
                    self.steps[condition] += 1 if upkeep.step() else 0
                    end.wait(0.01)
                else:
                    upkeep.flush(generation)
                    parts = upkeep._parts(generation)
                    upkeep._merge(generation, parts, sum(part.alive for part in parts))
            except Stopped:
                return
            self.steps[condition] += condition != "upkeep"


def measure(
    index: Path, vectors: Any, queries: Path, readers: str, given: argparse.Namespace
) -> dict[str, Any]:
    """Return the searches' seconds by condition."""
    found: list[Search] = []
    phases = []
    stop = threading.Event()
    with LocalStore(index, upkeep=False) as store:
        bundle = store.generations()[0].bundle
        writing = Writing(store, vectors, bundle)
        other, threads = None, []
        if readers == "process":
            other = subprocess.Popen(
                [sys.executable, __file__, "--reader", str(index), "--queries", str(queries)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert other.stdout is not None
            other.stdout.readline()
        else:
            rows = np.load(queries)
            threads = [
                threading.Thread(target=search, args=(store, rows[n * 97 :], bundle, stop, found))
                for n in range(int(readers))
            ]
            store.search(rows[:1], K, bundle)
            for thread in threads:
                thread.start()
        wanted = given.conditions
        for _ in range(given.rounds):
            phases += [writing.run(condition, given.seconds) for condition in wanted]
        stop.set()
        for thread in threads:
            thread.join()
        if other is not None:
            found = json.loads(other.communicate("stop\n", 60)[0])
    counted: dict[str, list[Search]] = {name: [] for name in wanted}
    for one in found:
        for kind, start, over in phases:
            if start <= one[0] and one[1] <= over:
                counted[kind].append(one)
    return {name: summary(searches) for name, searches in counted.items()} | {"steps": writing.steps}


def reader(index: Path, queries: Path) -> None:
    """Search in a process of its own until a line comes; then print what was noted."""
    found: list[Search] = []
    stop = threading.Event()
    with LocalStore(index) as store:
        bundle, rows = store.generations()[0].bundle, np.load(queries)
        store.search(rows[:1], K, bundle)
        print("ready", flush=True)
        thread = threading.Thread(target=search, args=(store, rows, bundle, stop, found))
        thread.start()
        sys.stdin.readline()
        stop.set()
        thread.join()
    print(json.dumps(found))


def make(folder: Path, vectors: Any, count: int, structure: str) -> Path:
    """Fill an index."""
    folder.mkdir()
    make_bundle(folder / "bundle", vectors.shape[1], 1.0)
    bundle = Bundle.open(folder / "bundle")
    create_local(
        folder / "index",
        bundle,
        {"vector": vectors.shape[1]},
        structure=Wanted(structure, OPTIONS[structure]),
    )
    with LocalStore(folder / "index", upkeep=False) as store:
        for start in range(0, count, 10_000):
            rows = np.array(vectors[start : start + 10_000])
            store.upsert(
                [
                    Item(str(start + n), metadata={"share": n % 100}, arrays={"vector": row})
                    for n, row in enumerate(rows)
                ],
                bundle.sha256,
            )
        store.compact()
    return folder / "index"


def summary(searches: list[Search]) -> dict[str, float]:
    """Return what the page shows of many searches, in milliseconds."""
    wall = [1e3 * (ended - began) for began, ended, _ in searches]
    own = [1e3 * one for *_, one in searches]
    return {
        "count": len(searches),
        "wall": {"p50": round(float(np.percentile(wall, 50)), 3), "p99": round(float(np.percentile(wall, 99)), 3)},
        "own": {"p50": round(float(np.percentile(own, 50)), 3), "p99": round(float(np.percentile(own, 99)), 3)},
    }  # fmt: skip


def render(kept: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# Searches while segments are merged",
        "",
        "`python benchmarks/merging.py`. Others shared the cores, so read the ratios. Conditions follow each other in turn. "
        "Milliseconds of one search for one query: wall time, and in brackets without the time for which it waited for a core, which the ratios are of. Threads of one process "
        "share Python's lock with the writer.",
        "",
    ]
    for structure, run in kept.items():
        lines += _section(structure, run)
    return "\n".join(lines)


def _section(structure: str, run: dict[str, Any]) -> list[str]:
    """Return what the page says of one structure."""
    lines = [
        f"## {structure}",
        "",
        f"{run['date']}. {run['machine']}; load average {run['load'][0]} before and {run['load'][1]} after. {run['count']:,} × {run['width']}, vectors of images{run.get('built', '')}; one thread adds "
        f"{BATCH} items every {1e3 * EVERY:.0f} ms{run.get('fresh', '')}; {run['rounds']} rounds of {run['seconds']:g} s a condition{run.get('longer', '')}.",
        "",
        "| searches from | condition | searches | p50 | p99 | p99 against the writer alone | p99 against nobody writing |",
        "|---" * 7 + "|",
    ]
    found: list[tuple[float, float, str]] = []
    for readers, row in run["found"].items():
        for name, title in CONDITIONS.items():
            if name not in row:
                continue
            one = row[name]
            beside = {base: one["own"]["p99"] / row[base]["own"]["p99"] for base in ("adds", "quiet")}
            shown = [
                f"{beside[base]:.2f} ×" if name not in (base, "quiet") else "" for base in ("adds", "quiet")
            ]
            times = [f"{one['wall'][at]:.2f} ({one['own'][at]:.2f})" for at in ("p50", "p99")]
            lines.append(
                f"| {READERS[readers]} | {title} | {one['count']:,} | {times[0]} | {times[1]} | {shown[0]} | {shown[1]} |"
            )
            if name in ("upkeep", "merging"):
                found.append((beside["adds"], beside["quiet"], f"{READERS[readers]}, {title}"))
    by_adds, by_quiet = max(found), max(found, key=lambda one: one[1])
    ended = []
    if "built" in run:
        steps = {readers: row["steps"]["merging"] for readers, row in run["found"].items()}
        said = ", ".join(f"{many} beside {READERS[name]}" for name, many in steps.items())
        ended = ["", f"Merges that ended: {said}."]
    return [
        *lines,
        "",
        f"At most, the p99 with merges is {by_adds[0]:.2f} × that beside the same writer without ({by_adds[2]}), and {by_quiet[1]:.2f} × that where nobody writes ({by_quiet[2]}).",
        *ended,
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, help="folder of the vectors, see image_vectors.py")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--conditions", nargs="*", default=list(CONDITIONS), choices=list(CONDITIONS))
    parser.add_argument("--structures", nargs="*", default=["flat", "hnsw"], help="flat, hnsw")
    parser.add_argument("--readers", nargs="*", default=list(READERS))
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep the figures in results/ in the place of these structures', and write the page",
    )
    parser.add_argument("--reader", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--queries", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.reader:
        reader(given.reader, given.queries)
        return
    queries = given.cache / f"fashion-{given.width}" / "queries.npy"
    vectors = np.load(queries.with_name("vectors.npy"), mmap_mode="r")[: given.count]
    raw = RESULTS / "raw" / "merging.json"
    kept: dict[str, Any] = json.loads(raw.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        for structure in given.structures:
            options = "".join(f", {key} {value}" for key, value in OPTIONS[structure].items())
            run: dict[str, Any] = {
                "date": time.strftime("%Y-%m-%d"), "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
                "load": [round(os.getloadavg()[0], 1)], "count": given.count, "width": given.width, "rounds": given.rounds, "seconds": given.seconds,
                "built": f", `{structure}`{options}", "fresh": f", of {FRESH:,} ids, which it changes again and again",
                "longer": f"; one with merges goes on until one has ended, for {LONGEST:g} s at most", "found": {},
            }  # fmt: skip
            index = make(Path(folder) / structure, vectors, given.count, structure)
            for readers in given.readers:
                run["found"][readers] = measure(index, vectors, queries, readers, given)
                print(structure, readers, json.dumps(run["found"][readers]), flush=True)
            kept[structure] = run | {"load": [*run["load"], round(os.getloadavg()[0], 1)]}
    if given.keep:
        raw.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "merging.md").write_text(render(kept), encoding="utf-8")
    print(render(kept))


if __name__ == "__main__":
    main()
