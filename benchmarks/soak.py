"""Read and write an index over HTTP while its server is killed repeatedly, and compare the index
with what the clients were told.

    # writes results/raw/soak.json and results/soak.md
    python benchmarks/soak.py --seconds 600 --seed 0

Several clients of `retrieval.client` put, relabel and delete their own items, one or many at a
time, search, and read items. Each client records for every id what the server acknowledged last,
and which later requests had no answer. It compares every answer to a read with this record at once.
Meanwhile, SIGKILL ends the whole server, or one of its two processes, every few seconds. A killed
server is started again, alternately with one process and with two. At the end the index is checked
and compared with the records: ids, labels, metadata, vectors, and searches with exact search by
NumPy.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from retrieval.bundle.bundle import Bundle
from retrieval.client import Client, NewItem, Retries
from retrieval.errors import ServerError
from retrieval.index.index import Index, create_index

from bench import page
from living_model import conclude, run_arguments, system, unsound
from retrieval_engines.testing.small_bundles import FEATURES, make_bundle

IDS = 150
"""Ids of each client, so few that most writes change an existing item."""
RETRIES = Retries(times=40, seconds=30.0, first=0.05, longest=0.5)
MANY, K, SEARCHES = 8, 10, 100


@dataclass(frozen=True)
class Value:
    """The features and the label of an item."""

    features: int
    label: str

    def numbers(self) -> list[float]:
        """Return the features as whole numbers, so that vectors and distances are exact."""
        vector = np.random.default_rng(self.features).integers(-99, 100, FEATURES)
        return list(map(float, vector))

    def as_item(self) -> dict[str, Any]:
        """Return the client's item."""
        about = {"made": self.features}
        return {"vector": self.numbers(), "label": self.label, "metadata": about}


def value_of(item: Any) -> Value:
    """Return the value of an item or a hit."""
    return Value(item.metadata["made"], item.label or "")


@dataclass
class Record:
    """The possible values of each id: one after an acknowledged write; None means no item."""

    known: dict[str, tuple[Value | None, ...]] = field(default_factory=dict)

    def may_be(self, id: str) -> tuple[Value | None, ...]:
        """Return the possible values of an item."""
        return self.known.get(id, (None,))

    def begin(self, id: str, value: Value | None) -> None:
        """Note a write that has begun: until it is acknowledged, old and new value are right."""
        self.known[id] = (*self.may_be(id), value)

    def acknowledge(self, id: str, value: Value | None) -> None:
        """Note an acknowledged write."""
        self.known[id] = (value,)


class Worker:
    """A client that writes its own items (`name/…`) and compares what it reads."""

    def __init__(self, name: str, url: str, seed: int, stop: threading.Event) -> None:
        self.name = name
        self.record, self.counts = Record(), Counter[str]()
        self.wrong: list[str] = []
        self._url, self._stop_ = url, stop
        self._random = random.Random(seed)
        self._made = seed * 1_000_000
        self.thread = threading.Thread(target=self._run, name=name)

    def _run(self) -> None:
        """Make one call after the other."""
        with Client(self._url, retries=RETRIES, timeout=10.0) as client:
            while not self._stop_.is_set():
                does = self._random.choices(
                    (self._put, self._relabel, self._add, self._delete, self._search, self._get),
                    (30, 10, 10, 15, 20, 15),
                )[0]
                try:
                    does(client)
                except ServerError as fault:
                    self.counts["unanswered"] += 1
                    if fault.status is not None and fault.status not in (503, 504):
                        self.wrong.append(f"{does.__name__}: {fault}")
                except Exception as fault:  # this client's record would no longer be compared
                    self.wrong.append(f"{does.__name__} failed: {fault!r}")
                    return

    def _id(self) -> str:
        return f"{self.name}/{self._random.randrange(IDS)}"

    def _value(self) -> Value:
        self._made += 1
        return Value(self._made, f"label {self._made}")

    @contextmanager
    def _written(self, values: Mapping[str, Value | None]) -> Iterator[None]:
        """Note a write before its request and after its acknowledgement."""
        for id, value in values.items():
            self.record.begin(id, value)
        yield
        for id, value in values.items():
            self.record.acknowledge(id, value)
        self.counts["writes"] += 1

    def _put(self, client: Client) -> None:
        id, value = self._id(), self._value()
        with self._written({id: value}):
            client.put(id, **value.as_item())

    def _relabel(self, client: Client) -> None:
        """Change label and metadata of an item that surely exists; keep its vector."""
        known = {id: values[0] for id, values in self.record.known.items() if len(values) == 1}
        if entries := [(id, value) for id, value in known.items() if value]:
            id, before = self._random.choice(entries)
            value = Value(before.features, f"relabelled {self._random.random()}")
            with self._written({id: value}):
                client.patch(id, label=value.label, metadata={"made": value.features})

    def _add(self, client: Client) -> None:
        values = {self._id(): self._value() for _ in range(MANY)}
        with self._written(values):
            client.add([NewItem(id, **value.as_item()) for id, value in values.items()])

    def _delete(self, client: Client) -> None:
        id = self._id()
        before = self.record.may_be(id)
        with self._written({id: None}), _not_found() as missing:
            client.delete(id)
        if missing and None not in before:
            self.wrong.append(f"{id} was there, and could not be deleted: {missing[0]}")

    def _get(self, client: Client) -> None:
        id, value = self._id(), None
        with _not_found():
            value = value_of(client.get(id))
        self.counts["reads"] += 1
        if value not in self.record.may_be(id):
            self.wrong.append(f"{id} is {value}, and may be {self.record.may_be(id)}")

    def _search(self, client: Client) -> None:
        """Search for an own item, which must be the nearest unless it may be deleted."""
        id = self._id()
        known = self.record.may_be(id)
        value = known[-1] or self._value()
        results = client.search(vector=value.numbers(), k=3, filter={"id": {"in": [id]}}).results
        near = client.search(vector=value.numbers(), k=K).results
        self.counts["reads"] += 2
        values = [value_of(hit) for hit in results] or [None]
        if values[0] not in known or len(results) > 1:
            self.wrong.append(f"a search for {id} found {values}, and it may be {known}")
        for hit in near:
            known, value = self.record.may_be(str(hit.id)), value_of(hit)
            if str(hit.id).startswith(f"{self.name}/") and value not in known:
                self.wrong.append(f"a search found {hit.id} as {value}, and it may be {known}")


@contextmanager
def _not_found() -> Iterator[list[ServerError]]:
    """Catch the answer 404 and add it to the list."""
    faults: list[ServerError] = []
    try:
        yield faults
    except ServerError as fault:
        if fault.status != 404:
            raise
        faults.append(fault)


class Server:
    """A server that is killed; its output goes to `log`."""

    def __init__(self, index: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._line = [sys.executable, "-m", "retrieval.cli", "serve", str(index), "--port"]
        self._line += [str(self.port), "--open", "admin", "--workers", "2", "--processes"]
        self._log = log
        self.start(2)

    def start(self, processes: int) -> None:
        """Start the server in a new process group; its clients wait for it themselves."""
        self.processes = processes
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._line, str(processes)],
                stdout=log,
                stderr=log,
                cwd=self._log.parent,
                start_new_session=True,
            )

    def answers(self, end: float) -> None:
        """Wait until the server answers, or until a time by `time.monotonic`."""
        while time.monotonic() < end:
            with (
                suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/livez", timeout=5),
            ):
                return
            time.sleep(0.05)

    def members(self) -> list[psutil.Process]:
        """Return the server's processes, without decoders, which end by themselves."""
        members = []
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):
                members += [child] if "--multiprocessing-fork" in child.cmdline() else []
        return members

    def kill(self) -> None:
        """Kill all processes at once, and wait until they are gone."""
        group = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        while any(_runs(process) for process in group):
            time.sleep(0.01)

    def end(self) -> int:
        """Stop the server normally; return its exit code."""
        self.process.terminate()
        return self.process.wait(30)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def kill_for(server: Server, seconds: float, pause: tuple[float, float], seed: int) -> Counter[str]:
    """Kill the server or one of its processes repeatedly; return the number of kills of each."""
    draw, kills, end = random.Random(seed), Counter[str](), time.monotonic() + seconds
    names = ("first process", "second process")
    while time.monotonic() < end:
        server.answers(end)
        time.sleep(min(draw.uniform(*pause), max(0.0, end - time.monotonic())))
        members = dict(zip(names, server.members(), strict=False))
        target = draw.choice(["whole", *members])
        if target == "whole":
            kills[f"whole, of {server.processes}"] += 1
            server.kill()
            server.start(3 - server.processes)
        else:
            kills[target] += 1
            with suppress(psutil.Error):
                members[target].kill()
    return kills


def differences(
    index: Path, bundle: Bundle, records: list[Record], seed: int
) -> tuple[int, list[str]]:
    """Return the number of items, and the differences of the index from the clients' records."""
    wrong = unsound(index)
    known = {id: values for record in records for id, values in record.known.items()}
    with Index.open(index, threads=1) as opened:
        items = opened.get([item.id for item in opened.scan(limit=1_000_000)], arrays=True)
        for id in known.keys() | items.keys():
            value = value_of(items[id]) if id in items else None
            if value not in known.get(id, ()):
                wrong.append(f"{id} is {value}, and may be {known.get(id)}")
        ids = sorted(items)
        features = [value_of(items[id]).numbers() for id in ids]
        vectors = np.asarray(bundle.encode(np.array(features, np.float32)).vector, np.float64)
        kept = np.array([items[id].arrays["vector"] for id in ids], np.float64)
        other = np.flatnonzero((vectors != kept).any(axis=1))
        wrong += [f"{ids[row]} has another vector" for row in other]
        draw = np.random.default_rng(seed)
        for _ in range(SEARCHES):
            query = np.float32(features[draw.integers(len(ids))])
            query += draw.integers(-5, 6, FEATURES).astype(np.float32)
            exact = np.sqrt(((vectors - bundle.encode(query[None]).vector[0]) ** 2).sum(axis=1))
            hits = opened.search(query, K)
            distances = np.array([hit.distance for hit in hits])
            if not np.allclose(distances, np.sort(exact)[:K], rtol=1e-6):
                wrong.append(f"a search found {distances}")
            own = exact[[ids.index(hit.id) for hit in hits]]
            apart = np.flatnonzero(~np.isclose(distances, own, rtol=1e-6))
            wrong += [f"{hits[row].id} is not so near" for row in apart]
    return len(ids), wrong


def soak(
    folder: Path, seconds: float, clients: int, pause: tuple[float, float], seed: int
) -> dict[str, Any]:
    """Run everything in a folder; return the counts and the differences."""
    index = folder / "soak.index"
    bundle = make_bundle(folder / "bundle")
    create_index(index, bundle, progress=False)
    server, stop = Server(index, folder / "log"), threading.Event()
    workers = [
        Worker(f"c{number}", f"http://127.0.0.1:{server.port}", seed * 100 + number + 1, stop)
        for number in range(clients)
    ]
    for worker in workers:
        worker.thread.start()
    try:
        kills = kill_for(server, seconds, pause, seed)
        stop.set()
        for worker in workers:
            worker.thread.join(120)
        server.answers(time.monotonic() + 120)
        code = server.end()
    finally:
        stop.set()
        if server.process.poll() is None:
            server.kill()
    records, opened = [worker.record for worker in workers], Bundle.open(bundle, threads=1)
    count, wrong = differences(index, opened, records, seed)
    wrong += [text for worker in workers for text in worker.wrong]
    wrong += [f"exit code {code}"] if code else []
    counts = sum((worker.counts for worker in workers), Counter())
    return {
        "system": system(),
        "seconds": seconds,
        "clients": clients,
        "seed": seed,
        "kills": dict(sorted(kills.items())),
        **counts,
        "items": count,
        "unknown": sum(len(known) > 1 for record in records for known in record.known.values()),
        "searches compared": SEARCHES,
        "wrong": wrong,
    }


def render(raw: dict[str, Any]) -> str:
    kills = "\n".join(f"| {what} | {count} |" for what, count in raw["kills"].items())
    return page(f"""
        # A server that is killed while it is written to

        `python benchmarks/soak.py --seconds {raw["seconds"]:g} --seed {raw["seed"]}`;
        {raw["system"]}.

        For {raw["seconds"] / 60:.3g} minutes {raw["clients"]} clients read and wrote an index over
        HTTP, while SIGKILL ended its server, or one of its two processes, every few seconds.
        {raw["writes"]:,} writes (of one item, or of {MANY} at once) were acknowledged.
        {raw["reads"]:,} reads were answered and compared with the client's record.
        {raw.get("unanswered", 0):,} requests had no answer after their retries. At the end the
        index had {raw["items"]:,} items; the last write of {raw["unknown"]:,} ids had no answer.
        `retrieval index check` read the whole index, and {raw["searches compared"]} searches were
        compared with exact search.

        **Differences: {len(raw["wrong"])}.**

        | killed | times |
        |---|--:|
        {kills}

        The whole: the supervisor and all processes at once, or the only process. Each of two
        processes answers searches and writes.
    """)


def main() -> None:
    parser = run_arguments(__doc__, seconds=600.0, clients=4)
    pauses = {"nargs": 2, "default": (1.0, 6.0), "help": "seconds between two kills: from, to"}
    parser.add_argument("--pause", type=float, **pauses)  # type: ignore[arg-type]
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, pause = Path(name), tuple(options.pause)
        raw = soak(folder, options.seconds, options.clients, pause, options.seed)
        if raw["wrong"]:
            print((folder / "log").read_text(errors="replace")[-20_000:], file=sys.stderr)
    conclude("soak", raw, render(raw), options.output)


if __name__ == "__main__":
    main()
