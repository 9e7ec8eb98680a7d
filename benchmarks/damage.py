"""Damage files of a living index, one at a time, and record whether it answers, reports the damage,
or is silently wrong.

    # writes results/raw/damage.json and results/damage.md
    python benchmarks/damage.py --count 2000 --seed 0

The writer of the index was killed, so the index has a write-ahead log; it also has a structure,
kept originals and two generations. In a copy of the index, one file gets a changed bit, byte or run
of bytes, or loses its end. A child opens the copy and compares everything with a model in memory.
The index may refuse with an error of the package, but every answer must be right. A damaged
structure must not be used.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path

from retrieval.bundle.bundle import Bundle
from retrieval.errors import RetrievalError
from retrieval.index.index import Index, open_index
from retrieval.store import record
from retrieval.store.contract import widths_of
from retrieval.store.filters import as_filter
from retrieval.store.folder import create_local, identity_of
from retrieval.store.search_structure import StructureChoice

import living_model as living
from bench import page

TOGETHER = 40  # cases in one process
KINDS = ("bit", "byte", "bytes", "zeros", "cut", "emptied")


def make(folder: Path) -> tuple[living.State, list[Bundle]]:
    """Write an index whose writer is killed; return its content."""
    bundles = living.make_bundles(folder)

    def added(numbers: range, factor: int, more: int = 0) -> living.Call:
        return {"call": "upsert", "items": [[f"id{n}", n * factor + more] for n in numbers]}

    calls: list[living.Call] = [
        added(range(150), 31),
        {"call": "compact"},
        {"call": "words"},
        {"call": "begin", "bundle": 1, "number": 2},
        {"call": "embed", "number": 2, "pending": [""] * 70, "left_out": []},
        added(range(120, 200), 17),
        {"call": "delete", "ids": ["id3", "id130"]},
        *(added(range(first, first + 6), 7, 1) for first in range(0, 300, 60)),
    ]

    def work(pipe: int) -> None:
        living.frequent_upkeep()
        record._CHECKPOINT_PAGES = 4000  # so that the log is in use
        structure = StructureChoice("ivf", {"lists": 4, "probes": 4})
        widths = widths_of(bundles[0], features=living.WIDTH)
        create_local(folder / "index", bundles[0], widths, structure=structure)
        writing = living.Writer(folder / "index", bundles, living.State(), 0, background=False)
        for call in calls:
            writing.do(call)
            writing.state = writing.state.after(call)
        os.kill(os.getpid(), signal.SIGKILL)

    if faults := living.output_of(work)[0]:
        raise RuntimeError(faults[0]["fault"])
    return functools.reduce(living.State.after, calls, living.State()), bundles


def damage(path: Path, kind: str, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    if kind == "bit":
        content[place] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        content[place] = (content[place] + draw.randrange(1, 256)) % 256
    elif kind in ("bytes", "zeros"):
        end = min(len(content), place + draw.choice([4, 64, 5000]))
        content[place:end] = draw.randbytes(end - place) if kind == "bytes" else bytes(end - place)
    else:
        del content[place if kind == "cut" else 0 :]
    path.write_bytes(content)


def look(folder: Path, name: str, state: living.State, bundles: list[Bundle]) -> tuple[str, str]:
    """Return how an index behaves after damage, and its message."""
    try:
        with open_index(folder, threads=1) as index:
            if not isinstance(index, Index):
                return "silent", "not a living index"
            wrong = living.differences(index.store, state, bundles, 0)
            if index.identity != name:
                wrong.append("its own id")
            query = bundles[0].encode(living.item_of("id5", 1, 0).arrays["features"][None]).query[0]
            if not wrong and len(index.search(query, 5, filter=as_filter("price < 5"))) != 5:
                wrong = ["search"]
            return ("silent", "; ".join(wrong)[:300]) if wrong else ("right", "")
    except RetrievalError as fault:
        return "refused", str(fault)
    except Exception as fault:
        return "crash", f"{type(fault).__name__}: {fault}"[:300]


def cases(count: int, seed: int, folder: Path) -> list[living.Row]:
    """Damage an index `count` times; return the outcomes."""
    state, bundles = make(folder)
    index, copy = folder / "index", folder / "copy"
    paths = [path for path in sorted(index.rglob("*")) if path.is_file() and path.stat().st_size]
    files = [path.relative_to(index).as_posix() for path in paths]
    rows: list[living.Row] = []
    while len(rows) < count:
        batch = [
            (files[number % len(files)], KINDS[number // len(files) % len(KINDS)], number)
            for number in range(len(rows), min(count, len(rows) + TOGETHER))
        ]

        def work(pipe: int, batch: list[tuple[str, str, int]] = batch) -> None:
            for name, kind, number in batch:
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(index, copy)
                damage(copy / name, kind, random.Random(seed * 1_000_003 + number))
                how, message = look(copy, identity_of(index), state, bundles)
                row = {"file": name, "kind": kind, "how": how, "said": message}
                os.write(pipe, json.dumps(row).encode() + b"\n")

        done, status = living.output_of(work)
        faults = [row["fault"] for row in done if "fault" in row]
        done = [row for row in done if "file" in row]
        rows += done
        if status:
            name, kind, _ = batch[min(len(done), len(batch) - 1)]
            message = f"the process ended with {status} {' '.join(faults)}".strip()
            rows.append({"file": name, "kind": kind, "how": "crash", "said": message})
        print(len(rows), flush=True)
    return rows


def group(name: str) -> str:
    """Return what kind of file a name is."""
    if name.startswith("bundles/"):
        return "bundles"
    if not name.startswith("arrays/"):
        return name
    return "array" if name.endswith((".vector", ".features", ".code")) else "structure"


def render(raw: living.Row) -> str:
    hows = ("refused", "right", "silent", "crash")
    totals = Counter({how: sum(c for *_, h, c in raw["cells"] if h == how) for how in hows})
    wrong = [f"- {row['file']}, {row['kind']}: {row['said']}" for row in raw["wrong"][:50]]
    newline = "\n"
    return page(f"""
        # Damaged files

        `python benchmarks/damage.py --count {raw["cases"]} --seed {raw["seed"]}`; {raw["machine"]}.

        {raw["cases"]:,} times one file of a living index, whose writer had been killed, was changed
        or cut off. The index was then opened and compared with a model in memory: ids, labels,
        metadata, arrays, originals, counts, generations, filters and neighbours.

        **Silently wrong answers: {totals["silent"]}. Crashes: {totals["crash"]}.** Refused with a
        sentence: {totals["refused"]:,}. Right answers only, because the damaged part is unused or
        rebuilt: {totals["right"]:,}.

        {living.counts_table(["file", "damage"], hows, raw["cells"])}

        {newline.join(wrong)}
    """)


def main() -> None:
    options = living.run_arguments(__doc__, count=2000).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = cases(options.count, options.seed, Path(folder))
    wrong = [row for row in rows if row["how"] in ("silent", "crash")]
    rows = [row | {"group": group(row["file"]), "wrong": []} for row in rows]
    raw = living.summary("cases", rows, options.seed, "group", "kind", "how") | {"wrong": wrong}
    living.conclude("damage", raw, render(raw), options.output)


if __name__ == "__main__":
    main()
