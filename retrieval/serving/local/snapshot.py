"""A copy of one moment of an index: the record by SQLite's own backup, the files that it names, and the bundles."""

from __future__ import annotations

import shutil
from pathlib import Path

import apsw

from retrieval.errors import StoreError
from retrieval.host.files import whole_folder
from retrieval.serving.local.generation_table import BUNDLES, all_of
from retrieval.serving.local.record import FILE, Record, ask, backup
from retrieval.serving.local.view import SEGMENTS
from retrieval.serving.local.writer import files_of

INDEX = "index.json"
_TRIES = 20


def write_snapshot(record: Record, folder: Path, target: Path) -> None:
    """Write a snapshot of an index to a new folder, whole or not at all.

    Raises:
        StoreError: there is something already, the disk refuses, or a file that the record names is missing.
    """
    if target.exists():
        raise StoreError(f"{target} exists already. Choose another name for the snapshot.")
    if not target.parent.is_dir():
        raise StoreError(f"{target} cannot be written: there is no folder {target.parent}.")
    for _ in range(_TRIES):
        taken = StoreError(f"{target} exists already. Choose another name for the snapshot.")
        try:
            with record.reading() as connection, whole_folder(target, replace=False, taken=taken) as fresh:
                _copy(connection, folder, fresh)
            return
        except FileNotFoundError:  # merged away just now
            continue
        except StoreError as fault:
            if not isinstance(fault.__cause__, FileNotFoundError):
                raise
    raise StoreError(f"The index {folder} is damaged: a file that its record names is missing.")


def _copy(connection: apsw.Connection, folder: Path, fresh: Path) -> None:
    all_of(
        connection
    )  # the moment begins with what is read first, and that must not be the backup, which lets go of it at its end
    backup(connection, fresh / FILE)
    for inner in (SEGMENTS, BUNDLES):
        (fresh / inner).mkdir()
    for file, structure in ask(connection, "select file, structure from segments"):
        for name in files_of(file, structure):
            shutil.copyfile(folder / SEGMENTS / name, fresh / SEGMENTS / name)
    for name in {one.bundle[:16] for one in all_of(connection)}:
        shutil.copytree(folder / BUNDLES / name, fresh / BUNDLES / name)
    shutil.copyfile(folder / INDEX, fresh / INDEX)
