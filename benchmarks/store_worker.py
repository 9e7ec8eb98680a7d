"""One system of `store.py` in a process of its own: reads commands, one JSON object a line, and answers each with one.

python store_worker.py SYSTEM FOLDER VECTORS.npy QUERIES.npy
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from store_systems import SYSTEMS
from store_verbs import Syncing

K = 10


def memory() -> float:
    """Return what this process holds in memory, in MB."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


class Worker:
    """The commands; each returns what is kept of it."""

    def __init__(self, name: str, folder: str, vectors: str, queries: str) -> None:
        self.vectors = np.load(vectors, mmap_mode="r")
        self.queries = np.load(queries)
        self.system = SYSTEMS[name](Path(folder), self.vectors.shape[1])
        self.next = 10**9  # ids of items that are added while it is measured

    def rows(self, ids: Any) -> Any:
        """Return the vectors of items."""
        return np.ascontiguousarray(self.vectors[ids % len(self.vectors)], np.float32)

    def open(self, load: bool = False) -> dict[str, Any]:
        """Open the store, after its imports."""
        for module in self.system.modules:
            importlib.import_module(module)
        before, began, cpu = memory(), time.perf_counter(), time.process_time()
        self.system.open()
        opened = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "before": before}
        if load:
            self.system.begin_load()
        return opened

    def first(self) -> dict[str, Any]:
        """Search once, then say what the process holds."""
        began, cpu = time.perf_counter(), time.process_time()
        self.system.search(self.queries[:1], K, None)
        first = {"first": time.perf_counter() - began, "first_cpu": time.process_time() - cpu}
        for query in range(1, 4):
            self.system.search(self.queries[query : query + 1], K, None)
        return {**first, "memory": memory()}

    def load(self, upto: int, seconds: float) -> dict[str, Any]:
        """Add items 0 … upto − 1, going on where an earlier load stopped, for so long at most."""
        began, cpu = time.perf_counter(), time.process_time()
        have = first = self.system.count()
        while have < upto and time.perf_counter() - began < seconds:
            ids = np.arange(have, min(have + 10_000, upto))
            self.system.add(ids, self.rows(ids))
            have += len(ids)
        if have == upto:
            self.system.loaded()
        return {
            "count": have,
            "added": have - first,
            "seconds": time.perf_counter() - began,
            "cpu": time.process_time() - cpu,
        }

    def fill(self, ids: list[int]) -> dict[str, Any]:
        """Add some items, in one call."""
        self.system.add(np.array(ids), self.rows(np.array(ids)))
        return {}

    def remove(self, ids: list[int]) -> dict[str, Any]:
        """Delete some items, in one call."""
        self.system.delete(np.array(ids))
        return {}

    def loaded(self) -> dict[str, Any]:
        """Do what follows a load."""
        self.system.loaded()
        return {}

    def close(self) -> dict[str, Any]:
        """Close the store."""
        self.system.close()
        return {}

    def count(self) -> dict[str, Any]:
        """Count the items."""
        return {"count": self.system.count()}

    def find(self, ids: list[int]) -> dict[str, Any]:
        """Return which items a search for their own vectors finds."""
        numbers = np.array(ids)
        found = self.system.search(self.rows(numbers), K, None)
        return {"found": [id for id, near in zip(ids, found, strict=True) if id in near]}

    def _timed(self, act: Callable[[], int], seconds: float, most: int) -> dict[str, Any]:
        """Do something again and again, for about so long; return items, calls, seconds and CPU seconds."""
        items = calls = 0
        began, cpu = time.perf_counter(), time.process_time()
        while calls < most and (not calls or time.perf_counter() - began < seconds):
            items += act()
            calls += 1
        return {"items": items, "calls": calls, "seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}  # fmt: skip

    def adds(self, batch: int, seconds: float, settle: bool) -> dict[str, Any]:
        """Add batches of new items; with `settle`, sync what each call has written."""
        after = Syncing(self.system.folder) if settle else lambda: None

        def act() -> int:
            ids = np.arange(self.next, self.next + batch)
            self.next += batch
            self.system.add(ids, self.rows(ids))
            after()
            return batch

        return self._timed(act, seconds, 10**9)

    def deletes(self, batch: int, seconds: float, settle: bool, ids: list[int]) -> dict[str, Any]:
        """Delete some of these items, a batch at a time."""
        after, left = Syncing(self.system.folder) if settle else lambda: None, np.array(ids)

        def act() -> int:
            nonlocal left
            some, left = left[:batch], left[batch:]
            self.system.delete(some)
            after()
            return len(some)

        return self._timed(act, seconds, len(ids) // batch)

    def tune(self, ef: int) -> dict[str, Any]:
        """Look at so many candidates."""
        self.system.tune(ef)
        return {}

    def answers(self, below: int | None, most: int, seconds: float) -> dict[str, Any]:
        """Return what queries find, 8 at a time, for about so long."""
        found: list[list[int]] = []
        self._timed(
            lambda: found.extend([list(map(int, one)) for one in self.system.search(self.queries[len(found) : len(found) + 8], K, below)]) or 8,
            seconds,
            most // 8,
        )  # fmt: skip
        return {"found": found}

    def searches(self, batch: int, below: int | None, seconds: float) -> dict[str, Any]:
        """Search batches of queries, for about so long."""
        at = 0

        def act() -> int:
            nonlocal at
            asked = np.take(self.queries, np.arange(at, at + batch), axis=0, mode="wrap")
            at += batch
            self.system.search(asked, K, below)
            return batch

        return self._timed(act, seconds, 10**9)

    def mark(self, name: str) -> None:
        """Leave a mark in a trace of system calls."""
        try:
            os.open(f"/mark-{name}", os.O_RDONLY)
        except OSError:
            return

    def marked(self, do_: str, ids: list[int]) -> dict[str, Any]:
        """Add or delete items between two marks."""
        numbers = np.array(ids)
        vectors = self.rows(numbers)
        self.mark(f"{do_}-begins")
        if do_ == "add":
            self.system.add(numbers, vectors)
        else:
            self.system.delete(numbers)
        self.mark(f"{do_}-ends")
        return {}


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a system prints is no answer
    worker = Worker(*sys.argv[1:])
    for line in sys.stdin:
        said = json.loads(line)
        try:
            answer = getattr(worker, said.pop("do"))(**said)
        except NotImplementedError:
            answer = {"cannot": True}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
