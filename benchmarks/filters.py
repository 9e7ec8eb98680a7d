"""What a search with a filter on metadata costs in a large index: asked first, again, with another value, after a write; against SQLite and post-filtering.

    python benchmarks/filters.py FOLDER --cache CACHE --keep        # writes results/filters.md; 1 GB of disk in FOLDER, some minutes

1,000,000 image vectors of 128 (`image_vectors.py`), searched exactly, one thread. Each item has four fields. The filters are `share < 1`, `< 10` and `< 50`, which so
many of 100 items match, and one that 0.01 % do. Ways are measured in turn in one process. Post-filtering searches for so many of the nearest items that ten should match, looks
at their metadata, and doubles until ten do. `without columns` is the store as it
was: a filter that its view has not met is one pass over all rows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.serving.bundle import Bundle
from retrieval.serving.filters import matches, parse_filter
from retrieval.serving.local.columns import Columns
from retrieval.serving.store.contract import Item
from retrieval.serving.store.local import LocalStore
from retrieval.serving.store.structure import Wanted
from retrieval.serving.store.writing import create_local

from scaled_bundle import make_bundle
from store_verbs import shares

RESULTS = Path(__file__).parent / "results"
K, BATCH = 10, 100
FILTERS = {
    "0.01 %": ("share < 1 and colour = 'colour 3'", 0.0001),
    "1 %": ("share < 1", 0.01),
    "10 %": ("share < 10", 0.1),
    "50 %": ("share < 50", 0.5),
}
NONE = "share < 0 and colour = ''"
KINDS = ("shoe", "boot", "coat", "bag", "shirt", "dress", "hat", "scarf")
WAYS = {
    "first": "fields never filtered by",
    "known": "fields in memory, a filter never asked",
    "again": "the same filter again",
    "written": f"the same, after {BATCH} items were added",
    "sqlite": "without columns, a filter never asked",
    "sqlite written": f"without columns, the same, after {BATCH} items were added",
    "post": "post-filtering",
    "all": "no filter",
}


class Nothing(Columns):
    """No columns: the record is asked each time."""

    def matching(self, connection: Any, where: Any, seq: int) -> None:
        """Tell nothing."""


class Bench:
    """An opened index, and what is measured of it."""

    def __init__(self, folder: Path, vectors: Any, queries: Any) -> None:
        self.store = LocalStore(folder / "index", upkeep=False)
        self.bundle = self.store.generations()[0].bundle
        self.vectors, self.queries = vectors, queries
        self.asked = self.next = 0
        self.search(None)

    def search(self, where: str | None, count: int = K) -> list[Item]:
        """Search for the next query."""
        self.asked += 1
        query = self.queries[self.asked % len(self.queries)][None]
        return self.store.search(
            query, count, self.bundle, where=None if where is None else parse_filter(where)
        )[0]

    def add(self) -> None:
        """Add some items, in one call."""
        ids = np.arange(self.next, self.next + BATCH) + 10**9
        self.next += BATCH
        self.store.upsert(
            [
                _item(int(id), share, self.vectors[id % len(self.vectors)])
                for id, share in zip(ids, shares(ids).tolist(), strict=True)
            ],
            self.bundle,
        )

    def post(self, where: str, share: float) -> list[Item]:
        """Search for more and more, until ten match."""
        tree, count = parse_filter(where), round(K / share)
        while True:
            found = [
                item for item in self.search(None, count) if matches(tree, item.id, item.label, item.metadata)
            ]
            if len(found) >= K or count >= 1_000_000:
                return found
            count *= 2


def _item(id: int, share: int, vector: Any) -> Item:
    metadata = {
        "share": share,
        "price": share + 0.5,
        "kind": KINDS[id * 7 % 8],
        "colour": f"colour {id * 13 % 97}",
    }
    return Item(str(id), str(id % 10), metadata, arrays={"vector": vector})


def make(folder: Path, vectors: Any) -> None:
    """Fill an index."""
    folder.mkdir(parents=True)
    make_bundle(folder / "bundle", vectors.shape[1], 1.0)
    bundle = Bundle.open(folder / "bundle")
    create_local(folder / "index", bundle, {"vector": vectors.shape[1]}, structure=Wanted("flat"))
    with LocalStore(folder / "index", upkeep=False) as store:
        for start in range(0, len(vectors), 10_000):
            ids = np.arange(start, min(start + 10_000, len(vectors)))
            rows = np.array(vectors[start : start + 10_000])
            store.upsert(
                [
                    _item(id, share, row)
                    for id, share, row in zip(ids.tolist(), shares(ids).tolist(), rows, strict=True)
                ],
                bundle.sha256,
            )
        store.compact()


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a call: CPU time and wall time."""
    cpu, wall = time.process_time(), time.perf_counter()
    act()
    return time.process_time() - cpu, time.perf_counter() - wall


def measure(bench: Bench, rounds: int) -> dict[str, Any]:
    """Return CPU and wall seconds of each way and share, and of adds."""
    found: dict[str, dict[str, list[Any]]] = {way: {name: [] for name in FILTERS} for way in WAYS}
    adds: dict[str, list[float]] = {"columns": [], "no columns": []}
    home = bench.store.home

    def anew(columns: Columns) -> None:
        home.columns, home.view = columns, None
        bench.search(None)

    for turn in range(rounds):
        for name, (where, share) in FILTERS.items():

            def note(way: str, act: Callable[[], object], name: str = name) -> None:
                found[way][name].append([round(one, 6) for one in timed(act)])

            def ask(where: str = where) -> None:
                bench.search(where)

            anew(Columns())
            note("first", ask)
            bench.search(NONE)  # no item matches: this has both fields in memory
            columns = home.columns
            anew(columns)
            note("known", ask)
            note("again", ask)
            adds["columns"].append(timed(bench.add)[0])
            note("written", ask)
            anew(Nothing())
            note("sqlite", ask)
            adds["no columns"].append(timed(bench.add)[0])
            note("sqlite written", ask)
            note("post", lambda: bench.post(where, share))  # noqa: B023
            note("all", lambda: bench.search(None))
        print(
            turn,
            json.dumps(
                {way: {name: row[-1][0] for name, row in rows.items()} for way, rows in found.items()}
            ),
            flush=True,
        )
    return {"found": found, "adds": adds}


def render(kept: dict[str, Any]) -> str:
    """Return the page."""
    found = kept["found"]

    def cpu(way: str, share: str) -> float:
        return 1e3 * statistics.median(one[0] for one in found[way][share])

    def wall(way: str, share: str) -> float:
        return 1e3 * statistics.median(one[1] for one in found[way][share])

    with_, without = (BATCH / statistics.median(kept["adds"][way]) for way in ("columns", "no columns"))
    lines = [
        "# Filters on metadata in a large index",
        "",
        f"`python benchmarks/filters.py`, {kept['date']}. {kept['machine']}; load average {kept['load'][0]} before and {kept['load'][1]} after: others shared the cores, so read CPU time and "
        f"ratios. {kept['count']:,} × {kept['width']}, vectors of images, exact search, one query, ten nearest; four fields an item. Medians of {kept['rounds']} rounds in one process, the index's files in the system's cache.",
        "",
        "Milliseconds of a search, CPU (wall):",
        "",
        f"| items that match | {' | '.join(FILTERS)} |",
        "|---" * (1 + len(FILTERS)) + "|",
        *(
            f"| {title} | {' | '.join(f'{cpu(way, share):,.1f} ({wall(way, share):,.1f})' for share in FILTERS)} |"
            for way, title in WAYS.items()
        ),
        "",
        "CPU time without columns, and of post-filtering, over that with columns; above 1, the columns are the faster:",
        "",
        f"| items that match | {' | '.join(FILTERS)} |",
        "|---" * (1 + len(FILTERS)) + "|",
        *(
            f"| {title} | {' | '.join(f'{cpu(one, share) / cpu(two, share):,.2f} ×' for share in FILTERS)} |"
            for title, one, two in (
                ("fields never filtered by, against no columns", "sqlite", "first"),
                ("fields in memory, against no columns", "sqlite", "known"),
                ("after a write, against no columns", "sqlite written", "written"),
                ("fields in memory, against post-filtering", "post", "known"),
                ("after a write, against post-filtering", "post", "written"),
            )
        ),
        "",
        "Where the fields are not in memory, a filter that was never asked is first tried on the nearest 80 items, then on as many more as those suggest, up to 1,280, before all are looked at: so it is with 10 % and "
        "50 %, and with 1 % now and then. Where they are, a sample of them tells about how many match: from a quarter on, twice as many of the nearest are searched as should be needed, below that all items are looked "
        "at. Post-filtering looks at so many of the nearest that ten match; its answers are exact here, since the search is.",
        "",
        f"A write does nothing for columns: {with_:,.0f} adds a second of CPU time, {BATCH} at a time, with a column in memory, {without:,.0f} without ({with_ / without:.2f} ×).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the index is made, or was made before")
    parser.add_argument(
        "--cache", type=Path, required=True, help="folder of the vectors, see image_vectors.py"
    )
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--keep", action="store_true", help="keep the figures in results/, and write the page"
    )
    given = parser.parse_args()
    vectors = np.load(given.cache / f"fashion-{given.width}" / "vectors.npy", mmap_mode="r")[: given.count]
    queries = np.load(given.cache / f"fashion-{given.width}" / "queries.npy")
    if not given.folder.exists():
        make(given.folder, vectors)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    kept: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "load": [round(os.getloadavg()[0], 1)], "count": given.count, "width": given.width, "rounds": given.rounds}  # fmt: skip
    kept |= measure(Bench(given.folder, vectors, queries), given.rounds)
    kept["load"].append(round(os.getloadavg()[0], 1))
    if given.keep:
        (RESULTS / "raw" / "filters.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        (RESULTS / "filters.md").write_text(render(kept), encoding="utf-8")
    print(render(kept))


if __name__ == "__main__":
    main()
