"""A switch of a large index to an adapter: how long it takes, and what searches feel of it.

    python benchmarks/switch.py               # in benchmarks/work/switch; writes results/switch.md
    python benchmarks/switch.py --rows 60000  # a smaller index, which is not kept

Vectors are those of `search.py`: Fashion-MNIST's training images and moved copies of them, as 128
principal components. The heads are metrics that the labels of the training images teach: weights of
the components, and the inverse root of the scatter within the classes, mixed with the identity.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.bundle.bundle import Bundle
from retrieval.data.image_archives import read_idx
from retrieval.index.adapter_bundles import make_adapter_bundle
from retrieval.index.adding import by_name
from retrieval.index.index import Index
from retrieval.index.integrity import check_index
from retrieval.store import local
from retrieval.store.local import LocalStore
from retrieval.store.record import ask
from retrieval.store.upkeep import Upkeep

from bench import FASHION, WORK, Row, alone, arguments, finish, machine_of, markdown, page, status
from scaled_bundle import make_bundle, make_index
from search import vectors_of
from serve import started

WIDTH, K, KILLS = 128, 10, 60
RATE = 25
"""Searches a second, which arrive whether or not the earlier ones are answered."""
WARM, USUAL, AFTER = 20.0, 60.0, 30.0
"""Seconds of searches that do not count, that come before the command, and that come after it."""


def scatter() -> tuple[Any, Any]:
    """Return the scatter (D, D) of the training images within and between their classes."""
    vectors, _ = vectors_of(60_000, WIDTH, 0.25)
    labels = read_idx(FASHION / "train-labels-idx1-ubyte.gz", 1)
    means = np.stack([vectors[labels == label].mean(0) for label in range(10)])
    return np.cov((vectors - means[labels]).T), np.cov(means.T)


def inverse_root(matrix: Any, share: float) -> Any:
    """Return the inverse root of a mixture of a scaled matrix and the identity."""
    scaled = matrix / (np.trace(matrix) / len(matrix))
    energy, basis = np.linalg.eigh(share * scaled + (1 - share) * np.eye(len(matrix)))
    return (basis / np.sqrt(energy)) @ basis.T


def heads() -> dict[str, Any]:
    """Return matrices (D, P) by name."""
    within, between = scatter()
    ratio = np.diag(between) / np.diag(within)
    return {
        "a weight for each number": np.diag(ratio**0.25),
        "scatter within classes, half": inverse_root(within, 0.5),
    }


def graph_of(matrix: Any) -> bytes:
    """Return the graph of an adapter that multiplies vectors with a matrix (D, P)."""
    from onnx import TensorProto, helper

    from retrieval_engines.testing.small_bundles import graph_bytes

    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", size])
        for name, size in zip(("input", "vector"), matrix.shape, strict=True)
    ]
    nodes = [helper.make_node("MatMul", ["input", "matrix"], ["vector"])]
    return graph_bytes(nodes, ends[:1], ends[1:], {"matrix": matrix.astype(np.float32)})


def prepare(work: Path, rows: int) -> None:
    """Write the index and the bundles, unless they are there already."""
    if (work / "built.json").exists():
        return
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    vectors, queries = vectors_of(rows, WIDTH, 0.25)
    np.save(work / "queries.npy", queries)
    make_bundle(work / "base", WIDTH, 1.0)
    # Without a structure, whose time is measured on its own.
    make_index(work / "index", work / "base", vectors)
    del vectors
    with LocalStore(work / "index", upkeep=False) as store:
        store.take_structure("hnsw", {})
        wall, cpu = time.monotonic(), time.process_time()
        store.compact()
        built = {"wall": time.monotonic() - wall, "cpu": time.process_time() - cpu}
        (work / "built.json").write_text(json.dumps(built))


@contextmanager
def timed(seconds: dict[str, float], *methods: tuple[type, str]) -> Iterator[None]:
    """Add the wall and CPU seconds of methods to `seconds`."""
    genuine = {(kind, name): getattr(kind, name) for kind, name in methods}

    def measured(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **options: Any) -> Any:
            wall, cpu = time.monotonic(), time.process_time()
            try:
                return method(*values, **options)
            finally:
                for key, spent in (
                    (name, time.monotonic() - wall),
                    (f"{name} cpu", time.process_time() - cpu),
                ):
                    seconds[key] = seconds.get(key, 0.0) + spent

        return call

    for (kind, name), method in genuine.items():
        setattr(kind, name, measured(name, method))
    try:
        yield
    finally:
        for (kind, name), method in genuine.items():
            setattr(kind, name, method)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def migrated(index: Path, adapter: Path) -> Row:
    """Migrate an index to an adapter; return times, memory, disk and recall."""
    seconds: dict[str, float] = {}
    before = size_of(index)
    methods = ((LocalStore, "derive"), (Upkeep, "structured"), (LocalStore, "switch"))
    with Index.open(index) as opened:
        with timed(seconds, *methods):
            began = time.monotonic()
            done = opened.migrate(adapter, progress=False)
            total = time.monotonic() - began
        peak = status("VmHWM")
        assert isinstance(opened.store, LocalStore)
        _, recall = opened.store.recall()
        with opened.store.views.moment() as (_, view):
            assert view.structure is not None
            options = dict(view.structure.structure.options)
    return {
        "items": done.from_vectors,
        "total": total,
        **seconds,
        "memory": peak,
        "disk": size_of(index) - before,
        "options": options,
        "recall": recall,
    }


def rolled_back(index: Path) -> Row:
    """Go back to the base, and drop the adapter's generation."""
    with Index.open(index) as opened:
        began = time.monotonic()
        done = opened.rollback(progress=False)
        row = {"rollback": time.monotonic() - began, "embedded": done.embedded}
        assert isinstance(opened.store, LocalStore)
        row["recall of the base"] = opened.store.recall()[1]
        opened.drop_old()
    return row


def switches(work: Path) -> list[Row]:
    """Return the measurements of a switch to each head and back."""
    rows = []
    for name, matrix in heads().items():
        with tempfile.TemporaryDirectory(dir=work) as folder:
            base = Bundle.open(work / "base", threads=1)
            adapter = make_adapter_bundle(base, graph_of(matrix), Path(folder) / "adapter")
            row = alone(migrated, work / "index", adapter) | alone(rolled_back, work / "index")
        rows.append({"head": name, **row})
        print(rows[-1], flush=True)
    return rows


# With a server


async def send(
    port: int, bodies: list[bytes], stop: asyncio.Event
) -> list[tuple[float, float, int]]:
    """Send searches at a steady rate; return when each began, its seconds and its status."""
    answers: list[tuple[float, float, int]] = []
    head = "POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    async def ask(body: bytes, due: float) -> None:
        status = 0
        # Without an answer, the status stays 0.
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{head}Connection: close\r\n".encode())
            writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.read()
            status = int(answer.split(maxsplit=2)[1])
            writer.close()
        answers.append((due, time.monotonic() - due, status))

    tasks = []
    due = time.monotonic()
    number = 0
    while not stop.is_set():
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        # A search that is sent late has waited since it was due.
        tasks.append(asyncio.create_task(ask(bodies[number % len(bodies)], due)))
        number += 1
        due += 1 / RATE
    await asyncio.gather(*tasks)
    return answers


async def run_beside(port: int, bodies: list[bytes], *words: str) -> tuple[list[Any], float, float]:
    """Search before, during and after a command; return the answers, its start and its end."""
    stop = asyncio.Event()
    sending = asyncio.create_task(send(port, bodies, stop))
    await asyncio.sleep(WARM + USUAL)
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        "nice", sys.executable, "-m", "retrieval.cli", "index", *words, stdout=subprocess.DEVNULL
    )
    assert await process.wait() == 0
    ended = time.monotonic()
    await asyncio.sleep(AFTER)
    stop.set()
    return await sending, began, ended


def beside_a_server(work: Path, index: str, *options: str) -> list[Row]:
    """Return the latencies of searches through a server during a migration and a rollback.

    Args:
        work: folder with the index's bundle and the queries.
        index: address of the index.
        options: options of `retrieval serve`.
    """
    bodies = [
        json.dumps({"vector": query, "k": K}).encode()
        for query in np.load(work / "queries.npy")[:1000].round(5).tolist()
    ]
    rows = []
    with tempfile.TemporaryDirectory(dir=work) as folder:
        head = graph_of(heads()["a weight for each number"])
        base = Bundle.open(work / "base", threads=1)
        adapter = make_adapter_bundle(base, head, Path(folder) / "adapter")
        serve = ("-m", "retrieval.cli", "serve", index, "--port", "0", *options)
        with started(*serve) as (_, port):
            for words in (("migrate", index, str(adapter)), ("rollback", index)):
                answers, began, ended = asyncio.run(run_beside(port, bodies, *words))
                for phase, low, high in (
                    ("before", began - USUAL, began),
                    ("meanwhile and after", began, np.inf),
                    ("the last second and after", ended - 1.0, np.inf),
                ):
                    chosen = [(spent, code) for due, spent, code in answers if low <= due < high]
                    spent = 1000 * np.array([entry[0] for entry in chosen])
                    rows.append(
                        {
                            "command": words[0],
                            "phase": phase,
                            "searches": len(chosen),
                            "failed": sum(code != 200 for _, code in chosen),
                            **{f"p{q}": float(np.percentile(spent, q)) for q in (50, 99)},
                            "slowest": float(spent.max()),
                            "seconds": ended - began,
                        }
                    )
                    print(rows[-1], flush=True)
    with Index.open(index) as opened:
        opened.drop_old()
    return rows


# Kills


def forward(index: Path, target: Path | None) -> None:
    """Migrate an index to a bundle or, without one, roll back."""
    # Otherwise most kills would meet a process that waits.
    local._NOTICE_SECONDS = 0.5
    with Index.open(index, threads=1) as opened:
        if target is None:
            opened.rollback(progress=False)
        else:
            opened.migrate(target, progress=False)


def state_of(index: Path) -> tuple[str, str]:
    """Return the served bundle, and how far the generation that follows it is."""
    with LocalStore(index, upkeep=False) as store, store.record.reading() as connection:
        sql = "select state, bundle, upto, structure from generations order by g"
        rows = ask(connection, sql)
        served = next(bundle for state, bundle, _, _ in rows if state == "served")
        stage = "not begun"
        for state, _, upto, structure in rows:
            if state == "building":
                stage = "vectors" if upto < store.count() else "graph"
                stage = "before the switch" if structure else stage
        return served, stage


def wrong_arrays(index: Path, vectors: Any) -> int:
    """Return how many items of an index have other arrays than its bundle computes."""
    with Index.open(index, threads=1) as opened:
        expected = {"vector": vectors}
        if opened.bundle.manifest.adapter is not None:
            expected = by_name(opened.bundle.adapt(vectors))
        items = opened.get([f"{row:07}" for row in range(len(vectors))], arrays=True)
        wrong = len(vectors) - len(items)
        for id, item in items.items():
            for name, array in expected.items():
                wrong += not np.allclose(item.arrays[name], array[int(id)], atol=1e-4)
        return wrong


def killed(work: Path, count: int) -> Row:
    """Kill migrations and rollbacks at random moments; return where, and what was wrong after."""
    alone(prepare, work, 30_000)
    vectors, _ = vectors_of(30_000, WIDTH, 0.25)
    base = Bundle.open(work / "base", threads=1)
    random = np.random.default_rng(0)
    folder = Path(tempfile.mkdtemp(dir=work))
    targets: list[Path | None] = []
    for number in range(3):
        head = graph_of(np.diag(random.uniform(0.9, 1.1, WIDTH)))
        targets.append(make_adapter_bundle(base, head, folder / f"adapter {number}"))
    targets.insert(2, None)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["switch"])
    row: Row = {"kills": 0, "ended": 0, "wrong items": 0, "faults": 0}
    stages = Counter[str]()
    # The first call for a target runs to its end, and tells how long a call takes.
    longest: dict[Path | None, float] = {}
    while row["kills"] < count:
        target = targets[row["ended"] % len(targets)]
        process = context.Process(target=forward, args=(work / "index", target))
        began = time.monotonic()
        process.start()
        limit = longest.get(target)
        process.join(None if limit is None else random.uniform(0.0, limit))
        if process.is_alive():
            process.kill()
            process.join()
            row["kills"] += 1
            stages[state_of(work / "index")[1]] += 1
        else:
            assert process.exitcode == 0
            row["ended"] += 1
            longest[target] = max(longest.get(target, 0.0), time.monotonic() - began)
            with Index.open(work / "index", threads=1) as opened:
                for generation in opened.store.generations()[:-2]:
                    if generation.state != "served":
                        opened.store.drop(generation)
        if process.exitcode == 0 or row["kills"] % 10 == 0:
            row["wrong items"] += wrong_arrays(work / "index", vectors)
            row["faults"] += sum(map(len, check_index(work / "index")))
            print(row, dict(stages), flush=True)
    return row | {"stages": dict(stages)}


def kills_of(raw: Row) -> str:
    """Return the section on kills, if they were measured."""
    if "killed" not in raw:
        return ""
    row = raw["killed"]
    stages = ", ".join(f"{stage} {count}" for stage, count in row["stages"].items())
    return f"""
        ## Kills

        Migrations to three adapters and rollbacks of an index of 30,000 vectors were killed
        (`SIGKILL`) at {row["kills"]} random moments, with half a second instead of 7 before the
        switch, and repeated until {row["ended"]} of them had ended. After every tenth kill and
        every end, all arrays of all items and all files were compared: {row["wrong items"]} items
        were wrong, and {row["faults"]} faults were found. How far the next generation was when its
        process was killed: {stages}. *Not begun* includes rollbacks, which build none.
    """


def served_table(rows: list[Row]) -> str:
    """Return the table of `beside_a_server`."""
    columns = ["command", "searches", "number", "failed", "p50, ms", "p99, ms", "slowest, ms"]
    lines = [
        [
            row["command"],
            row["phase"],
            f"{row['searches']:,}",
            str(row["failed"]),
            *(f"{row[name]:.1f}" for name in ("p50", "p99", "slowest")),
        ]
        for row in rows
    ]
    return markdown(columns, lines)


def render(raw: Row) -> str:
    lines = []
    for row in raw["heads"]:
        graph = "its links" if row["structured"] < raw["built"]["wall"] / 3 else "built again"
        if row["options"]:
            graph += f", `ef_search={row['options']['ef_search']}`"
        lines.append(
            [
                row["head"],
                f"{row['derive']:.1f}",
                f"{row['structured']:.1f}",
                graph,
                f"{row['total']:.1f}",
                f"{row['derive cpu'] + row['switch cpu']:.1f}",
                f"{row['rollback']:.1f}",
                f"{row['recall']:.3f}",
                f"{row['memory'] / 1e6:,.0f}",
                f"{row['disk'] / 1e6:,.0f}",
            ]
        )
    head = ["head", "vectors, s", "graph, s", "graph", "migrate, s", "CPU, s", "rollback, s"]
    head += ["recall@10 after", "most memory, MB", "disk, MB"]
    return page(f"""
        # A switch to an adapter

        `python benchmarks/switch.py`: an index of {raw["rows"]:,} vectors of {WIDTH} numbers, whose
        graph (`hnsw`) took {raw["built"]["wall"]:,.0f} s to build ({raw["built"]["cpu"]:,.0f} s of
        CPU) and finds {raw["recall"]:.3f} of the ten nearest. It moves to an adapter and back;
        each is a new process. *Vectors* is the time in which the new vectors are computed from
        those that are stored, and written; *graph* that in which the links of the old graph are
        taken over and measured or, if they find over a point less, a new graph is built. *Migrate*
        is the whole call, of which 7 s are for servers to load the new generation before it is
        served. *Most memory* counts the files that are mapped. {raw["machine"]}, shared with other
        programs (load {raw["load"]}), so wall times say little and CPU times more.

        {markdown(head, lines)}

        ## Searches meanwhile

        `retrieval serve --feedback` on the same machine, searched for {RATE} vectors a second,
        which arrive whether or not earlier ones are answered, for {USUAL:g} s before `nice
        retrieval index migrate` begins, and until {AFTER:g} s after it has ended; then the same
        for `rollback`.

        {served_table(raw["served"])}

        {kills_of(raw)}
    """)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="number of vectors")
    parser.add_argument(
        "--part", choices=["heads", "served", "kills"], help="measure only one part"
    )
    parser.add_argument("--write", action="store_true", help="write the page; measure nothing")
    options = parser.parse_args()
    work = WORK / "switch" / str(options.rows)
    if not options.write:
        alone(prepare, work, options.rows)
        kept = work / "measured.json"
        raw = json.loads(kept.read_text()) if kept.exists() else {}
        raw |= {"rows": options.rows, "built": json.loads((work / "built.json").read_text())}
        raw |= machine_of("faiss-cpu", "numpy", "onnxruntime")
        if options.part in (None, "heads"):
            raw["heads"] = switches(work)
            raw["recall"] = raw["heads"][0]["recall of the base"]
        if options.part in (None, "kills"):
            raw["killed"] = killed(WORK / "switch" / "killed", KILLS)
        if options.part in (None, "served"):
            raw["served"] = beside_a_server(work, str(work / "index"), "--feedback")
        kept.write_text(json.dumps(raw))
    raw = json.loads((work / "measured.json").read_text())
    if {"heads", "served"} <= raw.keys():
        finish("switch", raw, render(raw), keep=options.rows == 1_000_000)


if __name__ == "__main__":
    main()
