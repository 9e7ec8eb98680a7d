"""Alter or cut off files of a living index, one at a time, and see whether it answers, says that it
is damaged, or is silently wrong.

    # writes results/raw/damage.json and results/damage.md
    python benchmarks/damage.py --count 2000 --seed 0

The index is one whose writer was killed: with a write-ahead log, segments, a structure, kept
originals and two generations. In a copy of it a bit, a byte or some bytes of a file are altered, or
its end is cut off. A child opens the copy and compares everything with a model in memory. It may
refuse, with an error of the package; what it answers must be right. A structure that is damaged
must not be used.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from retrieval.errors import RetrievalError
from retrieval.serving.bundle import Bundle
from retrieval.serving.filters import as_filter
from retrieval.serving.index.index import Index, open_index
from retrieval.serving.store import record
from retrieval.serving.store.contract import widths_of
from retrieval.serving.store.folder import create_local
from retrieval.serving.store.folder import identity_of as identity
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.structure import StructureChoice

from kills import forked
from living_model import WIDTH, State, differences, item_of, make_bundles, small

RESULTS = Path(__file__).parent / "results"
TOGETHER = 40  # cases in one process
KINDS = ("bit", "byte", "bytes", "zeros", "cut", "emptied")


def make(folder: Path) -> tuple[State, list[Bundle]]:
    """Write an index whose writer is killed; return what it holds."""
    bundles = make_bundles(folder)
    state = State()
    first = {"call": "large", "items": [[f"id{n}", n * 31] for n in range(150)]}
    rest: list[dict[str, Any]] = [
        {"call": "large", "items": [[f"id{n}", n * 17] for n in range(120, 200)]},
        {"call": "delete", "ids": ["id3", "id130"]},
        *(
            {"call": "upsert", "items": [[f"id{n}", n * 7 + 1] for n in range(at, at + 6)]}
            for at in range(0, 300, 60)
        ),
    ]
    for call in (first, *rest):
        state = state.after(call)

    def work(pipe: int) -> None:
        small()
        record._CHECKPOINT_PAGES = 4000  # so that the log is in use
        create_local(
            folder / "index",
            bundles[0],
            widths_of(bundles[0], features=WIDTH),
            structure=StructureChoice("ivf", {"lists": 4, "probes": 4}),
        )
        store = LocalStore(folder / "index", upkeep=False)

        def add(call: dict[str, Any]) -> None:
            store.upsert([item_of(id, one, 0) for id, one in call["items"]], bundles[0].sha256)

        add(first)
        store.compact()
        generation = store.begin(bundles[1], widths_of(bundles[1], features=WIDTH))
        store.embed(
            generation,
            [item_of(one.id, int(one.id[2:]) * 31, 1) for one in store.pending(generation, 70)],
        )
        for call in rest:
            if "ids" in call:
                store.delete(call["ids"])
            else:
                add(call)
        os.kill(os.getpid(), signal.SIGKILL)

    process, pipe = forked(work)
    with os.fdopen(pipe) as file:
        fault = file.read()
    os.waitpid(process, 0)
    if fault:
        raise RuntimeError(fault)
    return State(state.items, {1: (0, {}, "served"), 2: (1, {}, "building")}), bundles


def damage(path: Path, kind: str, draw: random.Random) -> None:
    """Alter a file."""
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    if kind == "bit":
        content[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        content[at] = (content[at] + draw.randrange(1, 256)) % 256
    elif kind in ("bytes", "zeros"):
        end = min(len(content), at + draw.choice([4, 64, 5000]))
        content[at:end] = draw.randbytes(end - at) if kind == "bytes" else bytes(end - at)
    else:
        del content[at if kind == "cut" else 0 :]
    path.write_bytes(content)


def look(folder: Path, name: str, state: State, bundles: list[Bundle]) -> tuple[str, str]:
    """Return what an index does after damage, and what it says."""
    try:
        with open_index(folder, threads=1) as index:
            if not isinstance(index, Index):
                return "silent", "not a living index"
            wrong = differences(index.store, state, bundles, 0)
            if index.identity != name:
                wrong.append("its own id")
            if (
                not wrong
                and len(
                    index.search(
                        bundles[0].encode(item_of("id5", 1, 0).arrays["features"][None]).query[0],
                        5,
                        where=as_filter("price < 5"),
                    )
                )
                != 5
            ):
                wrong = ["search"]
            return ("silent", "; ".join(wrong)[:300]) if wrong else ("right", "")
    except RetrievalError as fault:
        return "refused", str(fault)
    except Exception as fault:
        return "crash", f"{type(fault).__name__}: {fault}"[:300]


def cases(
    count: int, seed: int, folder: Path, shown: Callable[[int], object]
) -> list[dict[str, Any]]:
    """Damage an index so many times; return what each time came of it."""
    state, bundles = make(folder)
    names = [
        path.relative_to(folder / "index").as_posix()
        for path in sorted((folder / "index").rglob("*"))
        if path.is_file()
    ]
    files = [name for name in names if (folder / "index" / name).stat().st_size]
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        batch = [
            (files[at % len(files)], KINDS[at // len(files) % len(KINDS)], at)
            for at in range(len(rows), min(count, len(rows) + TOGETHER))
        ]

        def work(pipe: int, batch: list[tuple[str, str, int]] = batch) -> None:
            for name, kind, at in batch:
                copy = folder / "copy"
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(folder / "index", copy)
                damage(copy / name, kind, random.Random(seed * 1_000_003 + at))
                how, said = look(copy, identity(folder / "index"), state, bundles)
                os.write(
                    pipe,
                    json.dumps({"file": name, "kind": kind, "how": how, "said": said}).encode()
                    + b"\n",
                )

        process, pipe = forked(work)
        with os.fdopen(pipe) as file:
            done = [json.loads(line) for line in file]
        _, status = os.waitpid(process, 0)
        rows += done
        if status:
            name, kind, _ = batch[min(len(done), len(batch) - 1)]
            rows.append(
                {
                    "file": name,
                    "kind": kind,
                    "how": "crash",
                    "said": f"the process ended with {status}",
                }
            )
        shown(len(rows))
    return rows


def group(name: str) -> str:
    """Return what kind of file a name is."""
    if name.startswith("bundles/"):
        return "bundles"
    if not name.startswith("arrays/"):
        return name
    return "array" if name.endswith((".vector", ".features", ".code")) else "structure"


def summary(rows: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return what is kept of a run."""
    cells = Counter((group(row["file"]), row["kind"], row["how"]) for row in rows)
    return {
        "seed": seed,
        "cases": len(rows),
        "wrong": [row for row in rows if row["how"] in ("silent", "crash")],
        "cells": [[*key, count] for key, count in sorted(cells.items())],
        "machine": (
            f"{platform.system()}, Python {platform.python_version()}, apsw {version('apsw')}"
        ),
    }


def render(raw: dict[str, Any]) -> str:
    """Return the page of a run that was kept."""
    cells = {(file, kind, how): count for file, kind, how, count in raw["cells"]}
    totals = Counter(
        {
            how: sum(count for *_, one, count in raw["cells"] if one == how)
            for how in ("right", "refused", "silent", "crash")
        }
    )
    lines = [
        "# Damaged files\n",
        (
            f"`python benchmarks/damage.py --count {raw['cases']} --seed {raw['seed']}`;"
            f" {raw['machine']}.\n"
        ),
        (
            f"{raw['cases']:,} times one file of a living index, whose writer had been killed, was"
            " altered or cut off. Then an opened index was compared with a model in memory: ids,"
            " labels, metadata, arrays, originals, counts, generations, filters and neighbours.\n"
        ),
        (
            f"**Wrong answers without a word: {totals['silent']}. Crashes: {totals['crash']}.**"
            f" Refused with a sentence: {totals['refused']:,}. All answers right, since what was"
            f" altered is not used, or is made again: {totals['right']:,}.\n"
        ),
        "| file | damage | refused | right | silent | crash |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for file, kind in sorted({key[:2] for key in cells}):
        counts = " | ".join(
            str(cells.get((file, kind, how), 0)) for how in ("refused", "right", "silent", "crash")
        )
        lines.append(f"| {file} | {kind} | {counts} |")
    lines += ["", *(f"- {row['file']}, {row['kind']}: {row['said']}" for row in raw["wrong"][:50])]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        raw = summary(
            cases(chosen.count, chosen.seed, Path(folder), lambda done: print(done, flush=True)),
            chosen.seed,
        )
    (chosen.output / "raw").mkdir(exist_ok=True)
    (chosen.output / "raw" / "damage.json").write_text(
        json.dumps(raw, indent=1) + "\n", encoding="utf-8"
    )
    (chosen.output / "damage.md").write_text(render(raw), encoding="utf-8")
    print(render(raw))
    sys.exit(1 if raw["wrong"] else 0)


if __name__ == "__main__":
    main()
