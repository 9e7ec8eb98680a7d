"""Vectors that a user brings: an index of them, beside other stores, and their duplicates.

    python benchmarks/own_vectors.py            # 20 minutes; writes results/own_vectors.md
    python benchmarks/own_vectors.py --fresh --rows 10000    # a part, in benchmarks/work
    pip install qdrant-client lancedb chromadb # the others; a missing one is left out

Vectors are those of `search.py`: Fashion-MNIST's training images and moved copies of them, as 128
principal components, with an id, a label and two columns of metadata in a Parquet table. Each
system reads it in a new process, in the way that its manual advises for many items. None builds
a structure for approximate search but Chroma, which has no other way.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench import (
    WORK,
    Kept,
    Row,
    alone,
    load,
    machine,
    markdown,
    one_thread,
    page,
    resume_arguments,
    status,
    versions,
)

WIDTH, SIZES = 128, (10_000, 100_000, 1_000_000)
WITHIN = 0.5
"""Distance of near duplicates; a random pair of images is about 10 apart."""
CPU_SECONDS = 1200
FOLDER = WORK / "own_vectors"


def prepare(rows: int) -> None:
    """Write the tables, the `.npz` file and the bundle, unless they are there already."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from scaled_bundle import make_bundle
    from search import vectors_of

    FOLDER.mkdir(parents=True, exist_ok=True)
    if not (FOLDER / "bundle").exists():
        make_bundle(FOLDER / "bundle", WIDTH, 1.0)
    if (FOLDER / f"{rows}.npz").exists():
        return
    vectors, _ = vectors_of(rows, WIDTH, 0.25)
    numbers = range(rows)
    keys = [f"item/{number:07}" for number in numbers]
    labels = [str(number % 1000) for number in numbers]
    columns = {
        "key": keys,
        "label": labels,
        "price": [number * 61 % 10_000 / 100 for number in numbers],
        "shop": [f"shop {number % 37}" for number in numbers],
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), WIDTH),
    }
    pq.write_table(pa.table(columns), FOLDER / f"{rows}.parquet", row_group_size=65_536)
    np.savez(FOLDER / f"{rows}.npz", features=vectors, keys=keys, labels=labels)


def batches(rows: int, size: int) -> Iterator[Any]:
    """Yield the table in batches of `size` rows."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(FOLDER / f"{rows}.parquet") as file:
        yield from file.iter_batches(size)


def columns_of(rows: int, size: int) -> Iterator[tuple[list[str], Any, list[dict[str, Any]]]]:
    """Yield ids, vectors (n, P) and payloads of the table's rows in batches."""
    for batch in batches(rows, size):
        vectors = batch["vector"].flatten().to_numpy().reshape(-1, WIDTH)
        payloads = batch.select(["label", "price", "shop"]).to_pylist()
        yield batch["key"].to_pylist(), vectors, payloads


# Each function below does a work for a number of rows; `folder` is empty.


def create(folder: Path, rows: int, source: Path | None = None) -> None:
    from retrieval import Index

    source = source or FOLDER / f"{rows}.parquet"
    model = FOLDER / "bundle"
    Index.create(folder / "index", source, model=model, backend="flat", progress=False).close()


def create_npz(folder: Path, rows: int) -> None:
    create(folder, rows, FOLDER / f"{rows}.npz")


def embed(folder: Path, rows: int) -> None:
    from retrieval.index.write_embeddings import embed_sources

    embed_sources(FOLDER / "bundle", FOLDER / f"{rows}.parquet", folder / "parts", progress=False)


def create_embedded(folder: Path, rows: int) -> None:
    create(folder, rows, FOLDER / f"{rows}.parts")


def restore(folder: Path, rows: int) -> None:
    from retrieval.index.integrity import restore_snapshot

    restore_snapshot(FOLDER / f"{rows}.index", folder / "restored")


def duplicates(folder: Path, rows: int) -> int:
    from retrieval import Index

    with Index.open(FOLDER / f"{rows}.index") as index:
        return len(index.duplicates(WITHIN, progress=False))


def check(folder: Path, rows: int) -> int:
    from retrieval import check_data

    source = FOLDER / f"{rows}.parquet"
    found = check_data(source, model=FOLDER / "bundle", within=WITHIN, progress=False)
    return len(found.near)


def lance(folder: Path, rows: int) -> None:
    import lancedb

    first = next(batches(rows, 1))
    lancedb.connect(folder).create_table("items", batches(rows, 65_536), schema=first.schema)


def chroma(folder: Path, rows: int) -> None:
    import chromadb
    from chromadb.config import Settings

    client = chromadb.PersistentClient(str(folder), settings=Settings(anonymized_telemetry=False))
    items = client.create_collection("items", embedding_function=None)
    for ids, vectors, payloads in columns_of(rows, client.get_max_batch_size()):
        items.add(ids=ids, embeddings=vectors, metadatas=payloads)


def qdrant(folder: Path, rows: int) -> None:
    from qdrant_client import QdrantClient, models

    client = QdrantClient(path=str(folder))
    space = models.VectorParams(size=WIDTH, distance=models.Distance.EUCLID)
    client.create_collection("items", vectors_config=space)
    # Its sync after each point would take hours; nothing but the processor is measured.
    connection = client._client.collections["items"].storage.storage
    connection.execute("pragma synchronous = off")
    number = 0
    for ids, vectors, payloads in columns_of(rows, 1000):
        payloads = [{"key": id, **payload} for id, payload in zip(ids, payloads, strict=True)]
        numbers = list(range(number, number + len(ids)))
        client.upsert("items", models.Batch(ids=numbers, vectors=vectors, payloads=payloads))
        number += len(ids)
    client.close()


PARQUET = "`index create` from Parquet"
WORKS: dict[str, tuple[Callable[[Path, int], object], str, str]] = {
    PARQUET: (create, "", "retrieval"),
    "`index create` from `.npz`, no metadata": (create_npz, "", "retrieval"),
    "`embed` into Parquet": (embed, "", "retrieval"),
    "`index create` from `embed`": (create_embedded, "", "retrieval"),
    "`index restore` into a folder": (restore, "", "retrieval"),
    "LanceDB": (lance, "lancedb", "lancedb"),
    "Chroma": (chroma, "chromadb", "chromadb"),
    "qdrant-client": (qdrant, "qdrant-client", "qdrant_client"),
    f"`index duplicates --within {WITHIN}`": (duplicates, "", "retrieval"),
    f"`data check --within {WITHIN}`": (check, "", "retrieval"),
}
"""Each work's function, package, and module."""


def measure(name: str, rows: int) -> Row:
    """Return the CPU seconds and the peak memory of a work."""
    one_thread()
    work, _, module = WORKS[name]
    importlib.import_module(module)
    folder = FOLDER / "new"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    wall, cpu = time.monotonic(), time.process_time()
    found = work(folder, rows)
    row: Row = {"cpu": time.process_time() - cpu, "wall": time.monotonic() - wall}
    row |= {"MB": status("VmHWM") / 2**20, "found": found}
    # For the works that follow.
    for made, end in (("index", "index"), ("parts", "parts")):
        if (folder / made).exists():
            shutil.rmtree(FOLDER / f"{rows}.{end}", ignore_errors=True)
            (folder / made).rename(FOLDER / f"{rows}.{end}")
    return row


def exponent(rows: list[Row], key: str) -> str:
    """Return the exponent of the growth between the two largest sizes."""
    small, large = rows[-2:]
    growth = np.log(large[key] / small[key]) / np.log(large["rows"] / small["rows"])
    return f"{growth:.2f}"


def cell(row: Row) -> str:
    if row["cpu"] is None:
        return f"over {CPU_SECONDS} s"
    return f"{row['cpu']:.1f} s, {row['MB']:,.0f} MB"


def render(kept: list[Row]) -> str:
    lines = []
    last: dict[str, Row] = {}
    for name in WORKS:
        rows = sorted((row for row in kept if row["work"] == name), key=lambda row: row["rows"])
        done = [row for row in rows if row["cpu"]]
        by_size = {row["rows"]: cell(row) for row in rows}
        growth = exponent(done, "cpu") if len(done) > 1 else "–"
        lines.append([name, *(by_size.get(size, "–") for size in SIZES), growth])
        if done:
            last[name] = done[-1]
    facts = kept[-1]
    times = ""
    if {PARQUET, "LanceDB"} <= last.keys():
        times = f": {last[PARQUET]['cpu'] / last['LanceDB']['cpu']:.1f} × as fast"
    return page(f"""
        # Vectors that you bring, and their duplicates

        `python benchmarks/own_vectors.py`. CPU seconds and peak memory of a process that reads
        vectors of {WIDTH} numbers with an id, a label and two columns of metadata from a Parquet
        table (the file of 1,000,000 has half a gigabyte), on one thread where a program lets one
        choose. {facts["machine"]}, {facts["versions"]}; load averages from
        {min(row["load"] for row in kept)} to {max(row["load"] for row in kept)}: other programs
        share the cores, so compare ratios. A work is stopped after {CPU_SECONDS} CPU seconds; "–"
        was not measured. The exponent is that of the growth of the CPU seconds between the two
        largest sizes. Memory includes the maps of files: half a gigabyte of it, at 1,000,000, are
        the vectors, which the system may take back at any time. qdrant-client's sync after each
        point was turned off.

        {markdown(["", *(f"{size:,}" for size in SIZES), "exponent"], lines)}

        **LanceDB is ahead** of `index create` at the largest size{times}. It copies the columns.
        It takes an id twice, reads a byte that was altered in its file without an error, and calls
        no sync (all three tried with version 0.40.0; NaN it refuses, as an index does). An index
        refuses an id that comes twice, encodes the vectors by its bundle, writes ids and labels
        into indexes of SQLite, keeps the SHA-256 of each vector, so that a second run encodes only
        what changed, and the checksum of each block, and syncs what it acknowledges: every second,
        and at most 16,384 items or 64 MB at a time. A killed run goes on from there.

        **What is not linear**: Chroma, which builds a graph of neighbours as it goes, and
        duplicates, because each vector is compared with all that are near it in the first principal
        components, and these become more. Below 100,000, the start of the process is a large part
        of a row. An index of more than 32,000,000 numbers, such as 1,000,000 vectors of
        {WIDTH}, also gets a graph of neighbours by `--backend auto`; here `flat` was named, and
        `search.py` measures what a graph costs.

        Duplicates are exact: every pair within the distance is found, and nothing is approximated.
    """)


def main() -> None:
    parser = resume_arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=SIZES)
    parser.add_argument("--only", nargs="*", help="works whose names have these words")
    options = parser.parse_args()
    one_thread()
    kept = Kept("own_vectors", options, ("work", "rows"))
    jobs = [
        (name, rows)
        for rows in options.rows
        for name, (_, _, module) in WORKS.items()
        if importlib.util.find_spec(module)
        and (not options.only or any(word in name for word in options.only))
    ]
    packages = dict.fromkeys(package for _, package, _ in WORKS.values() if package)
    installed = [name for name in packages if importlib.util.find_spec(name.replace("-", "_"))]
    for name, rows in kept.missing(jobs):
        prepare(rows)
        row: Row = {"work": name, "rows": rows, "machine": machine(), "load": load()}
        row["versions"] = versions("numpy", "pyarrow", *installed)
        try:
            row |= alone(measure, name, rows, cpu=CPU_SECONDS)
        except TimeoutError:
            row["cpu"] = None
        kept.add(row)
    shutil.rmtree(FOLDER / "new", ignore_errors=True)
    kept.finish(render(kept.rows))


if __name__ == "__main__":
    main()
