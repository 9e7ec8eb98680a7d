"""Our local store beside qdrant-client's local mode, milvus-lite, lancedb, chromadb and bare FAISS, side by side in one run.

    python benchmarks/store.py FOLDER --vectors vectors.npy --queries queries.npy     # environments, stores and figures in FOLDER
    python benchmarks/store.py FOLDER … --only chromadb --sizes 100000                # a part of it
    python benchmarks/store.py --page                                                 # the page, of what was kept

Each system runs in a process of its own, in a virtual environment of its own, which the script makes in FOLDER/environments. An
interrupted run goes on where it stopped. Needs strace, and 15 GB of disk at 1,000,000 vectors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import store_report
from store_durability import durability
from store_run import HERE, Failed, Run, Worker, opened
from store_systems import SYSTEMS
from store_verbs import shares

KEPT = HERE / "results" / "raw" / "store.json"
PAGE = HERE / "results" / "store.md"
EFS = (16, 32, 64, 128, 256, 512, 1024)
K, ENOUGH, QUERIES = 10, 0.95, 200
LONG = 60.0
SLOW = 10.0  # seconds: what takes longer is measured once
SEARCHES: list[tuple[int, int | None]] = [(1, None), (32, None), (1, 1), (1, 10), (1, 50)]
WRITES = [("adds", 1), ("adds", 100), ("adds", 10_000), ("deletes", 1), ("deletes", 100)]


def environments(run: Run) -> None:
    """Install each system where it is not."""
    for name in run.names:
        python = run.python(name)
        if SYSTEMS[name].packages and not python.exists():
            root = python.parents[1]
            subprocess.run([sys.executable, "-m", "venv", f"{root}.tmp"], check=True)
            Path(f"{root}.tmp").rename(root)
            pip = [
                str(python),
                "-m",
                "pip",
                "install",
                "-q",
                "--no-cache-dir",
                "numpy",
                *SYSTEMS[name].packages,
            ]
            if subprocess.run(pip, check=False).returncode:
                shutil.rmtree(root)
                raise SystemExit(f"pip could not install {name}.")
        code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
        packages = [*(SYSTEMS[name].packages or ("apsw", "faiss-cpu")), "numpy"]
        found = subprocess.run(
            [str(python), "-c", code, *packages], capture_output=True, text=True, check=True
        )
        run.at("versions")[name] = json.loads(found.stdout)
        if not SYSTEMS[name].packages:
            log = ["git", "log", "-1", "--format=%h", "--", "retrieval"]
            commit = subprocess.run(
                log, cwd=HERE.parent, capture_output=True, text=True, check=False
            ).stdout.strip()
            run.at("versions")[name]["retrieval"] = f"at {commit}"


def load(run: Run, name: str, size: int) -> dict[str, Any]:
    """Fill a store; one that begins with another's folder takes a copy of it."""
    folder, base = run.store(name, size), SYSTEMS[name].base
    limit = run.given.load_minutes * 60
    if base is not None:
        if run.at("sizes", str(size), base).get("load", {}).get("count") != size:
            raise Failed(f"{base} did not load them")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(run.store(base, size), folder)
    worker = Worker(run, name, folder, cores=os.cpu_count() or 1)
    try:
        worker.ask("open", load=True)
        found = worker.ask("load", upto=size, seconds=limit, within=2 * limit + 60)
        worker.end()
    except Failed:
        worker.kill()
        raise
    return {
        **found,
        "minutes": run.given.load_minutes,
        "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    }


def farthest(run: Run, size: int, below: int | None) -> np.ndarray[Any, Any]:
    """Return the squared distance of each query's tenth nearest item, exactly."""
    file = run.folder / f"truth-{size}-{below}.npy"
    if not file.exists():
        queries, best = (
            run.queries[:QUERIES].astype(np.float64),
            np.full((min(QUERIES, len(run.queries)), K), np.inf),
        )
        for start in range(0, size, 20_000):
            ids = np.arange(start, min(start + 20_000, size))
            ids = ids if below is None else ids[shares(ids) < below]
            rows = run.vectors[ids % len(run.vectors)].astype(np.float64)
            squares = (rows**2).sum(1) - 2 * queries @ rows.T + (queries**2).sum(1)[:, None]
            best = np.partition(np.concatenate([best, squares], axis=1), K - 1, axis=1)[:, :K]
        np.save(file, best.max(axis=1))
    return np.load(file)


def recall(run: Run, worker: Worker, size: int, below: int | None) -> tuple[float, int]:
    """Return the share of the ten nearest items that is found, and of how many queries; equal distances count as one another."""
    limit = farthest(run, size, below) * (1 + 1e-6) + 1e-9
    found = worker.ask("answers", below=below, most=QUERIES, seconds=5.0)["found"]
    hits = 0
    for query, (ids, most) in enumerate(zip(found, limit, strict=False)):
        rows = run.vectors[np.unique(np.array(ids, np.int64)) % len(run.vectors)].astype(np.float64)
        hits += int(((rows - run.queries[query]) ** 2).sum(1).__le__(most).sum())
    return hits / K / len(found), len(found)


def tune(run: Run, worker: Worker, size: int, below: int | None, first: int) -> dict[str, Any]:
    """Return the least `ef` that finds enough of a filter's neighbours, and what it finds."""
    efs = [0] if SYSTEMS[worker.name].exact else [ef for ef in EFS if ef >= first]
    for ef in efs:
        if ef:
            worker.ask("tune", ef=ef)
        share, queries = recall(run, worker, size, below)
        if share >= ENOUGH:
            break
    return {"ef": ef, "recall": share, "queries": queries}


def ready(run: Run, size: int) -> list[str]:
    """Return the systems that hold as many items."""
    return [
        name for name in run.names if run.at("sizes", str(size), name).get("load", {}).get("count") == size
    ]


def in_turn(
    run: Run, tables: dict[str, list[Any]], turns: int, label: str, ask: Callable[[str], dict[str, Any]]
) -> None:
    """Measure each system once, then each once again, so often; what is slow or failed only once."""
    for turn in range(turns):
        for name, table in tables.items():
            if len(table) > turn or (table and table[0].get("seconds", SLOW + 1) > SLOW):  # fmt: skip
                continue
            try:
                table.append(ask(name))
            except Failed as fault:
                table.append({"failed": str(fault)[-600:]})
            run.save()
            print(f"{time.strftime('%H:%M:%S')} {name}, {label}: {json.dumps(table[-1])[:150]}", flush=True)


def search(run: Run, size: int, turns: int) -> None:
    """Measure the searches of one size."""
    names = ready(run, size)
    tables = {name: run.at("sizes", str(size), name) for name in names}
    if all(len(tables[name].get("search", {})) == len(SEARCHES) for name in names):
        return
    with opened(run, names, lambda name: run.store(name, size)) as workers:
        for batch, below in SEARCHES:
            key = f"{batch}, {below}"
            for name in names:
                tuned = tables[name].setdefault("tuned", {})
                first = int(tuned.get("None", {}).get("ef", 0))
                run.once(tuned, str(below), lambda: tune(run, workers[name], size, below, first), name)  # noqa: B023

            def ask(name: str, batch: int = batch, below: int | None = below) -> dict[str, Any]:
                workers[name].ask("tune", ef=tables[name]["tuned"][str(below)].get("ef", 0))
                one = (tables[name].get("search", {}).get(f"1, {below}") or [{}])[0]
                if batch * one.get("seconds", 0.0) / max(1, one.get("items", 1)) > LONG:
                    return {"skipped": f"{batch} queries would take more than {LONG:.0f} s"}
                return workers[name].ask("searches", batch=batch, below=below, seconds=run.given.seconds)

            lists = {name: tables[name].setdefault("search", {}).setdefault(key, []) for name in names}
            in_turn(run, lists, turns, f"{size}, search {key}", ask)


def opening(run: Run, size: int, turns: int) -> None:
    """Measure opening, and the memory of a process that has searched."""

    def ask(name: str) -> dict[str, Any]:
        worker = Worker(run, name, run.store(name, size))
        try:
            found = worker.ask("open")
            first = worker.ask("first")
        finally:
            worker.kill()
        return {**found, **first}

    lists = {name: run.at("sizes", str(size), name).setdefault("open", []) for name in ready(run, size)}
    in_turn(run, lists, turns, f"{size}, opening", ask)


def writes(run: Run, size: int, turns: int) -> None:
    """Measure adds and deletes on copies; where the system does not sync, once more with a sync of what it wrote."""
    names = [name for name in ready(run, size) if SYSTEMS[name].base is None]
    tables = {name: run.at("sizes", str(size), name).setdefault("writes", {}) for name in names}
    unsynced = [name for name in names if store_report.survives(run.kept, name) == "no"]
    kinds = [(kind, batch, settle) for settle in (False, True) for kind, batch in WRITES]
    if all(f"{kind}, {batch}, {settle}" in tables[name] for kind, batch, settle in kinds for name in (unsynced if settle else names)):  # fmt: skip
        return
    copies = run.folder / "stores" / "copies"
    shutil.rmtree(copies, ignore_errors=True)
    for name in names:
        shutil.copytree(run.store(name, size), copies / name.replace(" ", "-"))
    gone = np.random.default_rng(size).permutation(size).tolist()
    with opened(run, names, lambda name: copies / name.replace(" ", "-")) as workers:
        for number, (kind, batch, settle) in enumerate(kinds):

            def ask(name: str, kind: str = kind, batch: int = batch, settle: bool = settle, number: int = number) -> dict[str, Any]:  # fmt: skip
                calls = [tables[name].get(f"{kind}, {few}, {settle}") for few in (1, 100)]
                one, hundred = (told[0]["seconds"] / told[0]["calls"] if told and "calls" in told[0] else 0.0 for told in calls)  # fmt: skip
                if batch > 100 and (hundred - one) / 99 * batch > LONG:
                    return {"skipped": f"{batch:,} would take more than {LONG:.0f} s"}
                some = {}
                if kind == "deletes":
                    start = len(gone) * number // len(kinds)
                    done = len(tables[name][f"{kind}, {batch}, {settle}"]) * 20_00
                    some = {"ids": gone[start + done : start + done + 2_000]}
                return workers[name].ask(kind, batch=batch, settle=settle, seconds=run.given.seconds, **some)

            asked = unsynced if settle else names
            lists = {name: tables[name].setdefault(f"{kind}, {batch}, {settle}", []) for name in asked}
            in_turn(run, lists, turns, f"{size}, {kind} {batch} {'synced' if settle else ''}", ask)
    shutil.rmtree(copies)


def measure(run: Run) -> None:
    """Do all that is not done yet."""
    run.kept.setdefault("began", time.strftime("%Y-%m-%d %H:%M"))
    run.kept.setdefault(
        "machine", f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    run.kept.setdefault("load", []).append(round(os.getloadavg()[0], 1))
    run.kept.setdefault("vectors", run.given.what)
    environments(run)
    for name in run.names:
        if SYSTEMS[name].base is None:
            run.once(run.at("durability"), name, lambda: durability(run, name))  # noqa: B023
    for size in run.given.sizes:
        for name in run.names:
            if SYSTEMS[name].base is not None and size != min(run.given.sizes):
                continue
            run.once(run.at("sizes", str(size), name), "load", lambda: load(run, name, size), name)  # noqa: B023
        if not run.given.load_only:
            turns = run.given.turns
            search(run, size, turns)
            opening(run, size, turns)
            writes(run, size, turns)
    run.kept["load"].append(round(os.getloadavg()[0], 1))
    run.kept["ended"] = time.strftime("%Y-%m-%d %H:%M")
    run.save()


def main() -> None:
    """Measure, keep, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--vectors", type=Path, help="(N, D) float32, .npy")
    parser.add_argument("--queries", type=Path, help="(200 or more, D) float32, .npy")
    parser.add_argument(
        "--environments", type=Path, help="where the systems are installed: else FOLDER/environments"
    )
    parser.add_argument("--what", default="", help="what the vectors are, for the page")
    parser.add_argument("--only", nargs="*", choices=list(SYSTEMS))
    parser.add_argument("--sizes", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each system at each turn")
    parser.add_argument("--load-minutes", type=float, default=3.0, help="for each system and size")
    parser.add_argument("--load-only", action="store_true")
    parser.add_argument(
        "--keep", action="store_true", help="keep the figures in results/, and write the page"
    )
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if not given.page:
        given.folder.mkdir(parents=True, exist_ok=True)
        run = Run(given)
        measure(run)
        if given.keep:
            KEPT.write_text(json.dumps(run.kept, indent=1) + "\n", encoding="utf-8")
    if given.page or given.keep:
        PAGE.write_text(store_report.render(json.loads(KEPT.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
