"""A look through a whole local index: every page, every block, every structure, every bundle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import apsw
import numpy as np

from retrieval.errors import RetrievalError
from retrieval.serving.bundle import Bundle
from retrieval.serving.store.arrays import ARRAYS, BUNDLES, Array, file_of
from retrieval.serving.store.items import Generation
from retrieval.serving.store.record import FILE, Record, ask, value
from retrieval.serving.store.structure import Structure, is_whole
from retrieval.serving.store.view import Runs, all_of, sums_of


def check_record(folder: Path, report: Callable[[int], object]) -> tuple[list[str], list[str]]:
    """Compare everything in an index with its checksums, and the record with the arrays.

    Args:
        folder: of the index.
        report: called with how many arrays more were looked at.

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
            for generation in all_of(connection):
                _check_arrays(connection, folder, generation, damaged, rebuilt, report)
                _check_items(connection, generation, damaged)
                _check_bundle(folder, generation, damaged)
    finally:
        record.close()
    return damaged, rebuilt


def _check_arrays(
    connection: apsw.Connection,
    folder: Path,
    generation: Generation,
    damaged: list[str],
    rebuilt: list[str],
    report: Callable[[int], object],
) -> None:
    sql = "select stem, rows, structure from generations where g = ?"
    ((stem, rows, text),) = ask(connection, sql, (generation.number,))
    for name, width in generation.widths.items():
        path = file_of(folder, stem, name)
        try:
            Array(path, width).verify(rows, sums_of(connection, generation.number, name))
        except FileNotFoundError:
            damaged.append(f"{ARRAYS}/{path.name} is missing.")
        except RetrievalError as fault:
            damaged.append(str(fault))
        report(1)
    structure = Structure.parse(text)
    for name, expected in structure.files if structure is not None else ():
        if not is_whole(folder / ARRAYS / name, expected):
            rebuilt.append(
                f"{ARRAYS}/{name} is missing or was altered; the next writer builds it again."
            )


def _check_items(connection: apsw.Connection, generation: Generation, damaged: list[str]) -> None:
    """Look whether every item that a generation should have is in it."""
    g = generation.number
    upto = value(connection, "select upto from generations where g = ?", (g,))
    if generation.state == "served":
        upto = value(connection, "select max(n) from items") or 0
    sql = "select n from items where n <= ? and n not in (select n from left_out where g = ?)"
    wanted = np.array([n for (n,) in ask(connection, sql, (upto, g))], np.int64)
    sql = "select row, n, count from runs where g = ? order by row"
    missing = int(np.count_nonzero(Runs(ask(connection, sql, (g,))).rows_of(wanted) < 0))
    if missing:
        damaged.append(f"Generation {g}: {missing:,} items have no vector.")


def _check_bundle(folder: Path, generation: Generation, damaged: list[str]) -> None:
    path = folder / BUNDLES / generation.bundle[:16]
    try:
        if Bundle.open(path, variant=generation.variant, device="cpu").sha256 != generation.bundle:
            damaged.append(f"{BUNDLES}/{path.name} is another bundle than the record says.")
    except RetrievalError as fault:
        damaged.append(str(fault))
