"""A copy of one moment of an index: the record by SQLite's own backup, the files that it names, and the bundles."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from retrieval.errors import StoreError
from retrieval.host.files import whole_folder
from retrieval.serving.local.generation_table import BUNDLES, all_of
from retrieval.serving.local.home import INDEX
from retrieval.serving.local.piece import SEGMENTS
from retrieval.serving.local.record import FILE, Record, ask, backup, no_room, reason
from retrieval.serving.local.segment import features_file
from retrieval.serving.local.writer import files_of
from retrieval.serving.stores.contract import FEATURES

_TRIES = 20
_WHOLE = 3  # tries, before a structure's missing files are no reason for another one
_SECONDS = 7 * 86_400.0  # files of any size are copied within one moment


def write_snapshot(
    record: Record, folder: Path, target: Path, instead: str = "Choose another name for the snapshot."
) -> None:
    """Write a snapshot of an index to a new folder, whole or not at all.

    Args:
        record: of the index.
        folder: of the index.
        target: the new folder.
        instead: what to do where there is something already, a sentence.

    Raises:
        StoreError: there is something already, the disk refuses, or a file that the record names is missing.
    """
    taken = StoreError(f"{target} exists already. {instead}")
    if target.exists():
        raise taken
    if not target.parent.is_dir():
        raise StoreError(f"{target} cannot be written: there is no folder {target.parent}.")
    missing: str | None = None
    for attempt in range(_TRIES):
        try:
            with (
                record.reading(seconds=_SECONDS) as connection,
                _faults(folder, target),
                whole_folder(target, replace=False, taken=taken) as fresh,
            ):
                _copy(connection, folder, fresh, whole=attempt < _WHOLE)
            return
        except FileNotFoundError as fault:  # merged away just now
            missing = fault.filename
        except StoreError as fault:
            if not isinstance(fault.__cause__, FileNotFoundError):
                raise
            missing = fault.__cause__.filename
    raise StoreError(
        f"The index {folder} is damaged: a file that its record names is missing: {missing}. Restore a snapshot."
    )


@contextmanager
def _faults(folder: Path, target: Path) -> Iterator[None]:
    """Say of what the disk refuses to the target that it is the target's; what is wrong with the index is for others to say."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, apsw.Error) as fault:
        elsewhere = isinstance(fault, OSError) and not Path(fault.filename or folder).is_relative_to(folder)
        if not elsewhere and not no_room(fault):
            raise
        raise StoreError(f"{target} cannot be written: {reason(fault)}") from fault


def _copy(connection: apsw.Connection, folder: Path, fresh: Path, *, whole: bool) -> None:
    """Copy what a moment names; a structure that is not `whole` goes without its missing files, and is built again by the copy's writer."""
    all_of(connection)  # begins the moment; a backup would let go of one that it began itself
    backup(connection, fresh / FILE)
    for inner in (SEGMENTS, BUNDLES):
        (fresh / inner).mkdir()
    keeping = {one.number for one in all_of(connection) if FEATURES in one.widths}
    for file, structure, generation in ask(connection, "select file, structure, g from segments"):
        if generation in keeping:
            source = features_file(folder / SEGMENTS / file)
            shutil.copyfile(source, fresh / SEGMENTS / source.name)
        for name in files_of(file, structure):
            if name == file or whole or (folder / SEGMENTS / name).is_file():
                shutil.copyfile(folder / SEGMENTS / name, fresh / SEGMENTS / name)
    for name in {one.bundle[:16] for one in all_of(connection)}:
        shutil.copytree(folder / BUNDLES / name, fresh / BUNDLES / name)
    shutil.copyfile(folder / INDEX, fresh / INDEX)
