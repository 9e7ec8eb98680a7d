"""What an index costs as it grows: build, bytes, memory, recall, latency and CPU of each structure from 10⁵ to 10⁷ vectors, and the law of its growth.

    python benchmarks/scale.py FOLDER --cache VECTORS                          # all that is not measured yet, smallest first
    python benchmarks/scale.py FOLDER --cache VECTORS --sizes 10000000 --only "ours rabitq"
    python benchmarks/scale.py --page                                          # the page, of what was kept

Contestants are in scale_systems.py, scale_store.py; the vectors are crop_vectors.py's: embeddings of real crops. Each measurement is a line of FOLDER/scale.jsonl, made by processes of its own
on one core: one builds and writes, one opens that, tunes its search on some queries, and is measured on others. What has a line is not measured again, so an interrupted run goes on; `--keep` copies the lines
into results/raw/, from where the page is written. Needs 20 GB of disk for 10⁷ vectors, and 6 GB of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = (
    "1"  # count only before NumPy is imported
)

import numpy as np

from crop_vectors import crop_vectors
from scale_systems import SYSTEMS, K, System

HERE = Path(__file__).parent
KEPT = HERE / "results" / "raw" / "scale.jsonl"
PAGE = HERE / "results" / "scale.md"
PLAN = HERE / "results" / "scale_plan.md"
SIZES = (100_000, 200_000, 500_000, 1_000_000, 10_000_000)
QUERIES, TUNING, ROUNDS, ENOUGH = 200, 400, 3, 0.95
"""Queries that are measured; others, with which a search is tuned; rounds of the measured; and the recall that is asked for."""
SURE = 1.645
"""Standard errors by which the recall of the tuning queries is to be above `ENOUGH`, so that of 20 measurements 19 are."""
SHORT, BRIEF = 30, 2.0  # rounds of quick searches, and seconds of CPU until which they go on
LONG, FEW = 6.0, 20  # seconds of a round, after which no further query is asked, if so many were


def memory(system: System) -> dict[str, int]:
    """Return bytes of this process: its own with those of others that work for it, of mapped files, and the most that it ever had of both."""
    said = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    found = {
        what: 1024 * int(said[key].split()[0])
        for what, key in (("own", "RssAnon"), ("mapped", "RssFile"), ("peak", "VmHWM"))
    }
    return {**found, "own": found["own"] + system.beside()}


def truth(folder: Path, vectors: Any, queries: Any, sizes: list[int]) -> None:
    """Write the ten nearest rows of each query at each size, of double precision among the 40 nearest of single; sizes are prefixes of one another."""
    import faiss

    best, rows, done = np.full((len(queries), 40), np.inf), np.zeros((len(queries), 40), np.int64), 0
    for size in sorted(sizes):
        for start in range(done, size, 100_000):
            away, near = faiss.knn(queries, vectors[start : min(start + 100_000, size)], 40)
            both, names = np.concatenate([best, away], 1), np.concatenate([rows, near + start], 1)
            kept = np.argpartition(both, 40, axis=1)[:, :40]
            best, rows = np.take_along_axis(both, kept, 1), np.take_along_axis(names, kept, 1)
        done = size
        found = []
        for query, there in zip(queries, rows, strict=True):
            apart = vectors[there].astype(np.float64) - query
            found.append(there[np.argsort((apart**2).sum(1), kind="stable")[:K]])
        np.save(folder / f"truth-{size}.npy", np.array(found))


def build(system: System, vectors: Any, folder: Path) -> dict[str, Any]:
    """Build; return what it took."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    system.begin(folder)
    wall, cpu = time.perf_counter(), system.cpu()
    system.build(vectors, folder)
    return {
        "cpu": system.cpu() - cpu,
        "wall": time.perf_counter() - wall,
        "bytes": sum(
            file.stat().st_size
            for part in system.written(folder)
            for file in part.rglob("*")
            if file.is_file()
        ),
        "memory": memory(system),
    }


def search(system: System, vectors: Any, queries: Any, limits: Any, folder: Path) -> dict[str, Any]:
    """Open; try each point on the queries behind the first `QUERIES`; measure the cheapest that finds enough of these on the first."""
    system.begin(folder)
    cpu = system.cpu()
    system.load(vectors, folder)
    opened = system.cpu() - cpu
    tried: list[dict[str, Any]] = []
    for point in system.points:
        if past(tried, point):
            break
        others = queries[QUERIES:], limits[QUERIES:]
        tried.append({"point": point, **once(system, vectors, *others, point, 1)})
    good = [one for one in tried if one["surely"] >= ENOUGH]
    chosen = min(good, key=lambda one: one["cpu"], default=max(tried, key=lambda one: one["recall"]))
    return {
        "opened": opened,
        "tried": tried,
        "point": chosen["point"],
        "enough": bool(good),
        **once(system, vectors, queries[:QUERIES], limits[:QUERIES], chosen["point"], ROUNDS),
        "memory": memory(system),
    }


def past(tried: list[dict[str, Any]], point: dict[str, int]) -> bool:
    """Return whether a point cannot be the cheapest: it has more than four times the lists of one that finds enough, or, of one number alone, more of that."""
    most = 4 if len(point) > 1 else 1
    first = [next(iter(one["point"].values()), 0) for one in tried if one["surely"] >= ENOUGH]
    return bool(first) and next(iter(point.values()), 0) > most * min(first)


def once(
    system: System, vectors: Any, queries: Any, limits: Any, point: dict[str, int], rounds: int
) -> dict[str, Any]:
    """Ask each query by itself, in rounds; return recall (equal distances count as one another), CPU seconds a query, and latencies, each query at its best."""
    walls, found, cpus = np.full(len(queries), np.inf), np.zeros(len(queries)), []
    for turn in range(rounds if rounds == 1 else SHORT):
        if turn >= rounds and len(queries) * sum(cpus) > BRIEF:
            break
        cpu = system.cpu()
        for at, query in enumerate(queries):
            began = time.perf_counter()
            rows = system.search(query[None], point)
            walls[at] = min(walls[at], time.perf_counter() - began)
            if turn == 0:
                apart = ((vectors[np.unique(rows)].astype(np.float64) - query) ** 2).sum(1)
                found[at] = min(K, int((apart <= limits[at]).sum())) / K
            if at + 1 >= FEW and system.cpu() - cpu > LONG:
                queries = queries[: at + 1]
                break
        cpus.append((system.cpu() - cpu) / len(queries))
    found, walls = found[: len(queries)], walls[: len(queries)]
    p50, p99 = np.percentile(walls, (50, 99))
    recall, doubt = found.mean(), SURE * found.std(ddof=1) / len(found) ** 0.5
    return {
        "recall": float(recall), "surely": float(recall - doubt), "cpu": min(cpus), "rounds": len(cpus), "p50": float(p50), "p99": float(p99), "queries": len(queries),
    }  # fmt: skip


def worker(given: argparse.Namespace) -> None:
    """Do one half of a measurement in this process, and print its figures as the last line."""
    import faiss

    faiss.omp_set_num_threads(1)
    os.sched_setaffinity(
        0, {max(os.sched_getaffinity(0))}
    )  # a server that is started has no more than others
    vectors, queries = crop_vectors(given.cache, given.sizes[0])
    queries = np.ascontiguousarray(queries[: QUERIES + TUNING])
    if given.worker == "truth":
        truth(given.folder, vectors, queries, given.sizes)
        print("{}")
        return
    folder, system = given.folder / "built", systems()[given.only[0]]
    try:
        done = build(system, vectors, folder) if given.worker == "build" else searched(given, system, vectors, queries)  # fmt: skip
    finally:
        system.close()
    print(json.dumps(done))


def searched(given: argparse.Namespace, system: System, vectors: Any, queries: Any) -> dict[str, Any]:
    """Search with the true neighbours that were found before."""
    tenth = np.load(given.folder / f"truth-{given.sizes[0]}.npy")[:, -1]
    limits = ((vectors[tenth].astype(np.float64) - queries) ** 2).sum(1) * (1 + 1e-6) + 1e-9
    return search(system, vectors, queries, limits, given.folder / "built")


def systems() -> dict[str, System]:
    """Return every contestant."""
    from scale_store import STORES

    return {**SYSTEMS, **STORES}


def asked(given: argparse.Namespace, half: str, sizes: list[int], only: str) -> dict[str, Any]:
    """Run one half in a process of its own, and end it with all that it started.

    Raises:
        RuntimeError: it failed, with the end of what it said.
        subprocess.TimeoutExpired: it took too long.
    """
    command = [sys.executable, __file__, str(given.folder), "--cache", str(given.cache), "--worker", half]
    command += ["--sizes", *map(str, sizes), "--only", only]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = running.communicate(timeout=given.minutes * 60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    if running.returncode:
        raise RuntimeError(err[-600:])
    said: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return said


def measure(given: argparse.Namespace) -> None:
    """Measure all that has no line yet."""
    import faiss

    given.folder.mkdir(parents=True, exist_ok=True)
    kept = given.folder / "scale.jsonl"
    done = {(line["system"], line["size"]) for line in lines(kept) if "failed" not in line}
    if missing := [size for size in given.sizes if not (given.folder / f"truth-{size}.npy").exists()]:
        asked(given, "truth", sorted(missing, reverse=True), "ours flat")
    for size in sorted(given.sizes):
        for name, system in systems().items():
            if (name, size) in done or size > system.most or (given.only and name not in given.only):
                continue
            line: dict[str, Any] = {
                "system": name, "size": size, "width": 128, "when": time.strftime("%Y-%m-%d %H:%M"), "faiss": faiss.__version__,
                "options": faiss.get_compile_options().strip(), "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
                "load": [round(os.getloadavg()[0], 1)],
            }  # fmt: skip
            try:
                line["build"] = asked(given, "build", [size], name)
                line["search"] = asked(given, "search", [size], name)
            except (RuntimeError, subprocess.TimeoutExpired) as fault:
                line["failed"] = str(fault)[-600:]
            line["load"].append(round(os.getloadavg()[0], 1))
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{time.strftime('%H:%M:%S')} {json.dumps(line)[:400]}", flush=True)
            shutil.rmtree(given.folder / "built", ignore_errors=True)


def lines(file: Path) -> list[dict[str, Any]]:
    """Return what was measured; the last line may have been cut off."""
    found = []
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(text))
    return found


def main() -> None:
    """Measure, keep, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--cache", type=Path, help="folder of the vectors, see crop_vectors.py")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--only", nargs="*", help="names of contestants")
    parser.add_argument("--minutes", type=float, default=60.0, help="for each half of a measurement")
    parser.add_argument("--keep", action="store_true", help="keep the lines in results/, and write the page")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--worker", choices=["truth", "build", "search"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given)
        return
    if not given.page:
        measure(given)
        if given.keep:
            found = [line for line in lines(given.folder / "scale.jsonl") if "failed" not in line]
            KEPT.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")
    if given.page or given.keep:
        from scale_report import plan, render

        PAGE.write_text(render(lines(KEPT)), encoding="utf-8")
        PLAN.write_text(plan(lines(KEPT)), encoding="utf-8")


if __name__ == "__main__":
    main()
