"""Look through a whole living index: every page, every segment, every structure, every bundle."""

from __future__ import annotations

from pathlib import Path

import apsw
import numpy as np

from retrieval.errors import RetrievalError, StoreError, listed
from retrieval.serving.bundle import Bundle
from retrieval.serving.local.generation_table import BUNDLES, all_of
from retrieval.serving.local.piece import SEGMENTS
from retrieval.serving.local.record import FILE, Record, ask
from retrieval.serving.local.segment import Numbers, Segment
from retrieval.serving.local.snapshot import write_snapshot
from retrieval.serving.local.structures import Structure, is_whole
from retrieval.serving.progress import Meter


def check_index(folder: Path) -> tuple[list[str], list[str]]:
    """Compare everything in an index folder with its checksums, and the record with the segments.

    Returns:
        What is damaged, a sentence each; and what the next writer builds again by itself.

    Raises:
        StoreError: the record cannot be opened.
    """
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


def restore(snapshot: Path, target: Path) -> None:
    """Copy a snapshot to a new place, after looking through it.

    Raises:
        StoreError: the snapshot is damaged, there is something at the place already, or the disk refuses.
    """
    damaged, _ = check_index(snapshot)
    if damaged:
        raise StoreError(listed(f"The snapshot {snapshot} is damaged", damaged))
    record = Record(snapshot)
    try:
        write_snapshot(record, snapshot, target)
    finally:
        record.close()
