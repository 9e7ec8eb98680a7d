"""Items with vectors of 16 numbers, and a process that writes items to an index."""

import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from retrieval.store import search_structure, upkeep
from retrieval.store.contract import Item
from retrieval.store.local import LocalStore

VECTORS = np.random.default_rng(0).normal(size=(9000, 16)).astype(np.float32)


def items(numbers: Iterable[int]) -> list[Item]:
    """Return items `id N`, whose label and price follow from their number."""
    return [
        Item(f"id{n}", str(n % 10), {"price": n}, arrays={"vector": VECTORS[n]}) for n in numbers
    ]


def write(folder: Path, who: str, count: int, reopen: bool, seconds: float = 3.0) -> set[str]:
    """Write to and delete from an index for some seconds; return the ids that it then has."""
    upkeep._MIN_DEAD_ROWS = search_structure.MIN_ROWS = 200
    random, end, done = np.random.default_rng(len(who)), time.monotonic() + seconds, 0
    store, present = LocalStore(folder), set[str]()
    bundle = store.generations()[0].bundle
    while time.monotonic() < end:
        ids = [f"{who} {done + n}" for n in range(count)]
        store.upsert([Item(id, arrays={"vector": random.normal(size=16)}) for id in ids], bundle)
        present |= set(ids)
        done += count
        if done % (7 * count) == 0:
            gone = {f"{who} {n}" for n in range(done - 2 * count, done - count)}
            store.delete(gone)
            present -= gone
        if done % (15 * count) == 0:
            store.compact()
        if reopen:
            store.close()
            store = LocalStore(folder)
    store.close()
    assert done
    return present
