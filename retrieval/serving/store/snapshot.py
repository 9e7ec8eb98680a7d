"""A copy of one moment of a local index: SQLite's backup, the files that it names, bundles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from retrieval.errors import StoreError
from retrieval.host.files import whole_folder
from retrieval.serving.store.arrays import ARRAYS, BUNDLES, copy_rows
from retrieval.serving.store.record import FILE, Record, ask, backup, no_room, reason
from retrieval.serving.store.structure import Structure
from retrieval.serving.store.view import all_of
from retrieval.serving.store.writing import INDEX

_TRIES = 20
_SECONDS = 7 * 86_400.0  # files of any size are copied within one moment


def write_snapshot(
    record: Record,
    target: Path,
    instead: str = "Choose another name for the snapshot.",
) -> None:
    """Write a snapshot of an index to a new folder, whole or not at all.

    Args:
        record: of the index.
        target: the new folder.
        instead: what to do where there is something already, a sentence.

    Raises:
        StoreError: there is something already, the disk refuses, or a file that the record names
            is missing.
    """
    folder = record.folder
    taken = StoreError(f"{target} exists already. {instead}")
    if target.exists():
        raise taken
    if not target.parent.is_dir():
        raise StoreError(f"{target} cannot be written: there is no folder {target.parent}.")
    missing: str | None = None
    for _ in range(_TRIES):
        try:
            with (
                record.reading(seconds=_SECONDS) as connection,
                _faults(folder, target),
                whole_folder(target, replace=False, taken=taken) as fresh,
            ):
                _copy(connection, folder, fresh)
            return
        except FileNotFoundError as fault:  # compacted just now: the moment is over
            missing = fault.filename
    raise StoreError(
        f"The index {folder} is damaged: a file that its record names is missing: {missing}. "
        "Restore a snapshot."
    )


@contextmanager
def _faults(folder: Path, target: Path) -> Iterator[None]:
    """Say of what the disk refuses to the target that it is the target's."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, apsw.Error) as fault:
        named = fault.filename if isinstance(fault, OSError) else None
        elsewhere = not Path(named or folder).is_relative_to(folder)
        if not elsewhere and not no_room(fault):
            raise
        raise StoreError(f"{target} cannot be written: {reason(fault)}") from fault


def _copy(connection: apsw.Connection, folder: Path, fresh: Path) -> None:
    """Copy what a moment names, but missing files of a structure: the copy's writer builds it."""
    generations = all_of(connection)  # begins the moment; a backup would let go of one of its own
    backup(connection, fresh / FILE)
    for inner in (ARRAYS, BUNDLES):
        (fresh / inner).mkdir()
    sql = "select stem, rows, widths, structure from generations"
    for stem, rows, widths, said in ask(connection, sql):
        for name, width in json.loads(widths).items():
            file = f"{ARRAYS}/{stem}.{name}"
            copy_rows(folder / file, fresh / file, rows * width * 4)
        structure = Structure.parse(said)
        for name, _ in structure.files if structure is not None else ():
            if (folder / ARRAYS / name).is_file():
                shutil.copyfile(folder / ARRAYS / name, fresh / ARRAYS / name)
    for name in {one.bundle[:16] for one in generations}:
        shutil.copytree(folder / BUNDLES / name, fresh / BUNDLES / name)
    shutil.copyfile(folder / INDEX, fresh / INDEX)
