"""Look through a whole index: every page, every segment, every structure, every bundle; elsewhere every item."""

from __future__ import annotations

from pathlib import Path

import apsw
import numpy as np

from retrieval.errors import RetrievalError, StoreError
from retrieval.serving.bundle import Bundle
from retrieval.serving.local.generation_table import BUNDLES, all_of
from retrieval.serving.local.piece import SEGMENTS
from retrieval.serving.local.record import FILE, Record, ask
from retrieval.serving.local.segment import Numbers, Segment
from retrieval.serving.local.structures import Structure, is_whole
from retrieval.serving.progress import Meter
from retrieval.serving.stores.contract import Generation, Item, Store


def check_index(folder: Path) -> tuple[list[str], list[str]]:
    """Compare everything in an index folder with its checksums, and the record with the segments.

    Returns:
        What is damaged, a sentence each; and what the next writer builds again by itself.

    Raises:
        StoreError: the record cannot be opened.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder} is not an index: there is no such folder.")
    damaged: list[str] = []
    rebuilt: list[str] = []
    record = Record(folder)
    try:
        with record.reading(seconds=3600.0) as connection:
            for (fault,) in ask(connection, "pragma integrity_check(10)"):
                if fault != "ok":
                    damaged.append(f"{FILE}: {fault}.")
            items = np.array([n for (n,) in ask(connection, "select n from items order by n")], np.int64)
            with Meter("checking", len(ask(connection, "select s from segments")), "segments") as meter:
                for generation in all_of(connection):
                    held = _segments(folder, connection, generation.number, damaged, rebuilt, meter)
                    fresh = [
                        n for (n,) in ask(connection, "select n from fresh where g = ?", (generation.number,))
                    ]
                    out = [
                        n
                        for (n,) in ask(
                            connection, "select n from left_out where g = ?", (generation.number,)
                        )
                    ]
                    ((upto,),) = ask(
                        connection, "select upto from generations where g = ?", (generation.number,)
                    )
                    wanted = items if generation.state == "served" else items[items <= upto]
                    there = np.concatenate([*held, np.array(fresh, np.int64), np.array(out, np.int64)])
                    if missing := len(np.setdiff1d(wanted, there)):
                        damaged.append(f"Generation {generation.number}: {missing:,} items have no vector.")
                    _bundle(folder, generation.bundle, generation.variant, damaged)
    finally:
        record.close()
    return damaged, rebuilt


def _segments(
    folder: Path,
    connection: apsw.Connection,
    number: int,
    damaged: list[str],
    rebuilt: list[str],
    meter: Meter,
) -> list[Numbers]:
    held: list[Numbers] = [np.empty(0, np.int64)]
    rows = ask(connection, "select file, sum, structure from segments where g = ?", (number,))
    for file, sum_, structure in rows:
        try:
            segment = Segment(folder / SEGMENTS / file, sum_)
            segment.verify(features=True)
            held.append(segment.numbers)
        except FileNotFoundError as fault:
            damaged.append(f"{SEGMENTS}/{Path(fault.filename).name} is missing.")
        except RetrievalError as fault:
            damaged.append(f"{SEGMENTS}/{file} {fault}.")
        said = Structure.parse(structure)
        for name, expected in said.files if said else ():
            path = folder / SEGMENTS / name
            if not is_whole(path, expected):
                rebuilt.append(
                    f"{SEGMENTS}/{name} is missing or was altered; the next writer builds it again."
                )
        meter.update()
    return held


def _bundle(folder: Path, sha256: str, variant: str | None, damaged: list[str]) -> None:
    try:
        if Bundle.open(folder / BUNDLES / sha256[:16], variant=variant, device="cpu").sha256 != sha256:
            damaged.append(f"{BUNDLES}/{sha256[:16]} is another bundle than the record says.")
    except RetrievalError as fault:
        damaged.append(str(fault))


def check_store(store: Store) -> list[str]:
    """Read everything that a store holds, wherever it lies; return what is damaged, a sentence each.

    Each bundle is compared with its generation, and every item is read with its arrays. What was written meanwhile is no damage.
    """
    damaged: list[str] = []
    for generation in store.generations():
        try:
            if (
                Bundle.open(store.bundle(generation), variant=generation.variant, device="cpu").sha256
                != generation.bundle
            ):
                damaged.append(
                    f"The bundle of generation {generation.number} is another than the one that embedded its items."
                )
        except RetrievalError as fault:
            damaged.append(str(fault))
    (served,) = (one for one in store.generations() if one.state == "served")
    before, read = store.count(), 0
    after: str | None = None
    with Meter("checking", before, "items") as meter:
        while page := store.scan(after=after):
            after = page[-1].id
            items = store.get([item.id for item in page], arrays=True)
            damaged += [
                f"The item '{item.id}' has arrays that are none of its generation."
                for item in items.values()
                if item.arrays and not _fits(item, served)
            ]
            read += len(page)
            meter.update(len(page))
    if read != before and store.count() == before:
        damaged.append(f"{before:,} items are counted, and {read:,} are found.")
    return damaged


def _fits(item: Item, generation: Generation) -> bool:
    return all(
        name in item.arrays
        and item.arrays[name].shape == (width,)
        and bool(np.isfinite(item.arrays[name]).all())
        for name, width in generation.widths.items()
    )
