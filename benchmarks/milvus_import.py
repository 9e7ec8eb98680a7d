"""Rows of vectors into Milvus: in requests, as the plugin writes them, and by the server's own import of a Parquet file.

    python benchmarks/milvus_import.py 127.0.0.1:19530 FOLDER --write

FOLDER is one that the server, on this machine, can read. A way is done when a read that is consistent has all rows: the import says
"Completed" long before. pymilvus 3.0 is the last client that can ask a server of 2.3 for it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from retrieval import stores

from retrieval_milvus.place import MilvusPlace
from retrieval_milvus.rows import columns, plain_row

WIDTH, TABLE = 64, "g1"
RESULTS = Path(__file__).parent / "results" / "milvus_import.md"
ALL = stores.Between("born", 0, stores.ALIVE)


def rows_of(count: int) -> list[stores.Row]:
    """Return rows as a store writes them for small items."""
    vectors = np.random.default_rng(0).normal(size=(count, WIDTH)).astype(np.float32)
    return [
        stores.Row(at, "item", 1, stores.ALIVE, f"{at:032x}", f"{at:016x}", (f"{at % 10:024x}", f"{at % 3:024x}"), {}, "{}", {"v0": vector})
        for at, vector in enumerate(vectors, 1)
    ]  # fmt: skip


def requests(engine: stores.Engine, rows: list[stores.Row]) -> float:
    """Write rows as the plugin does; return seconds until all are seen."""
    began = time.perf_counter()
    for start in range(0, len(rows), 1000):
        seen = engine.put(TABLE, rows[start : start + 1000])
    assert engine.count(TABLE, ALL, seen=seen) == len(rows)
    return time.perf_counter() - began


def imported(engine: stores.Engine, rows: list[stores.Row], where: str, folder: Path) -> float:
    """Write a Parquet file and let the server import it; return the same."""
    from pymilvus import connections, utility

    began = time.perf_counter()
    plain = [plain_row(row, TABLE, 0, False) for row in rows]
    made = {name: [row[name] for row in plain] for name in columns(False)}
    made["orders"] = ["{}"] * len(rows)
    made["vector"] = pa.array([row["vector"] for row in plain], pa.list_(pa.float32()))
    file = folder / "rows.parquet"
    pq.write_table(pa.table(made), file)
    connections.connect("import", uri=f"http://{where}")
    task = utility.do_bulk_insert(f"{engine.name}__{TABLE}", [str(file.resolve())], using="import")  # type: ignore[attr-defined]
    while engine.count(TABLE, ALL, seen=0) < len(rows):
        state = utility.get_bulk_insert_state(task, using="import")
        assert not state.state_name.startswith("Failed"), state.failed_reason
        time.sleep(0.1)
    file.unlink()
    return time.perf_counter() - began


def main() -> None:
    """Measure, print a table, and write it with `--write`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("server", help="host:port")
    parser.add_argument("folder", type=Path, help="that the server can read")
    parser.add_argument("--counts", type=int, nargs="+", default=[2_000, 20_000, 200_000])
    parser.add_argument("--repeat", type=int, default=3, help="rounds, of the largest count one")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} too")
    options = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)
    lines = ["| rows | requests, rows a second | import, rows a second |", "| --- | --- | --- |"]
    for count in options.counts:
        rows, took = rows_of(count), {"requests": list[float](), "import": list[float]()}
        for _ in range(1 if count == max(options.counts) else options.repeat):
            for way in took:  # in turn, so that both meet the same load
                address = stores.Address.parse(
                    f"milvus://{options.server}/import{time.time_ns()}?timeout=300"
                )
                engine = MilvusPlace(address, timeout=300).engine()
                engine.name = address.name  # type: ignore[attr-defined]
                engine.make()
                engine.make_table(TABLE, {"v0": WIDTH}, "flat", {})
                if way == "requests":
                    took[way].append(requests(engine, rows))
                else:
                    took[way].append(imported(engine, rows, options.server, options.folder))
                engine.drop()
                engine.close()
        cells = [f"{count / statistics.median(seconds):,.0f}" for seconds in took.values()]
        lines.append(f"| {count:,} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    text = "\n".join(lines)
    if options.write:
        RESULTS.write_text(
            f"# Rows into Milvus\n\n`python benchmarks/milvus_import.py HOST:PORT FOLDER --write`: {WIDTH} numbers a row, until a consistent read has all; medians of "
            f"{options.repeat} rounds, of the largest count one.\n\n{text}\n\n- Milvus {version('milvus')}, pymilvus {version('pymilvus')}\n"
            f"- processors: {os.cpu_count()}, load average: {os.getloadavg()[0]:.1f} (other work on the machine)\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
