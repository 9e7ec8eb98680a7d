"""Create, check and copy the folder of a local index.

index.json            description of the index; the record has its SHA-256
items.sqlite          the record: a SQLite database of items and generations (`record.py`)
acknowledged          number of the last committed transaction (`record.py`)
arrays/               files of the generations (`view.py`) and structures (`structure.py`)
bundles/              bundles of the generations
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import apsw
import numpy as np

from retrieval.base.files import sync, whole_folder
from retrieval.base.regular_files import open_plain, read_plain
from retrieval.base.runtime import installed_version
from retrieval.base.strict_json import parse_json, strict_loads
from retrieval.bundle.bundle import Bundle
from retrieval.errors import RetrievalError, StoreError
from retrieval.store.items import Generation, Keep, spans_of
from retrieval.store.record import (
    RECORD_FILE,
    Record,
    all_generations,
    ask,
    backup,
    last_number,
    no_room,
    reason_and_advice,
    upto_of,
)
from retrieval.store.search_structure import ARRAYS, Structure, StructureChoice
from retrieval.store.snapshot_view import (
    BLOCK,
    ArrayFile,
    GenerationRows,
    append,
    damage_error,
    file_of,
    missing_file,
    restore_rows,
    sums_of,
)
from retrieval.store.upkeep import BUNDLES, new_stem
from retrieval.store.words import count_faults

INDEX_FILE = "index.json"
INDEX_FORMAT = 5
_INDEX_BYTES = 1_000_000  # maximum size of `index.json`
# Compaction may replace files while they are copied, so the copy is tried again.
_TRIES = 20
_CHECK_SECONDS = 3600.0  # time limit of a check's read transaction
_COPY_SECONDS = 7 * 86_400.0  # time limit of a copy's read transaction


def create_local(
    folder: Path,
    bundle: Bundle,
    widths: Mapping[str, int],
    *,
    structure: StructureChoice | None = None,
    keep: Keep = "reference",
    replace: bool = False,
    identity: str | None = None,
) -> None:
    """Create an empty index atomically.

    Args:
        folder: the new folder, whose parent must exist.
        bundle: bundle of the first generation; the index copies it.
        widths: width of each array of an item, by name.
        structure: the search structure; chosen by size by default.
        keep: the part of an original that the index keeps, unless an item overrides it.
        replace: whether to replace an index that exists in `folder`.
        identity: unique id of the index; a new one by default.

    Raises:
        StoreError: `folder` exists already or cannot be written.
    """
    occupied = StoreError(
        f"{folder} exists already. Choose another name, or add to it with 'retrieval index add'."
    )
    description = {
        "retrieval": "index",
        "format": INDEX_FORMAT,
        "version": installed_version(),
        "id": identity or str(uuid.uuid4()),
        "created": _now(),
    }
    text = (json.dumps(description, indent=2) + "\n").encode()
    state = {
        "index": hashlib.sha256(text).hexdigest(),
        "structure": (structure or StructureChoice()).text(),
        "keep": keep,
    }
    try:
        with whole_folder(folder, replace=replace, exists_error=occupied) as fresh:
            (fresh / ARRAYS).mkdir()
            (fresh / BUNDLES).mkdir()
            (fresh / INDEX_FILE).write_bytes(text)
            Record.create(fresh)
            with Record.opened(fresh) as record:
                with record.writing() as (connection, _):
                    connection.executemany("insert into state values (?, ?)", state.items())
                    add_generation(connection, fresh, bundle, widths, "served")
                record.checkpoint()
    except (OSError, apsw.Error, StoreError) as fault:
        if isinstance(fault, StoreError):
            cause = fault.__cause__
        else:
            cause = fault
        if not isinstance(cause, OSError | apsw.Error):
            raise
        raise StoreError(
            f"The index {folder} cannot be written: {reason_and_advice(cause)}"
        ) from cause


def add_generation(
    connection: apsw.Connection, folder: Path, bundle: Bundle, widths: Mapping[str, int], state: str
) -> None:
    """Copy a generation's bundle, create its files and record it."""
    target = folder / BUNDLES / bundle.sha256[:16]
    if bundle.sha256 not in {existing.bundle for existing in all_generations(connection)}:
        # A folder without a generation may be left over from an interrupted deletion.
        with whole_folder(
            target, replace=True, exists_error=StoreError(f"{target} exists already.")
        ) as fresh:
            bundle.copy(fresh)
    stem = new_stem()
    for name, width in widths.items():
        append(file_of(folder, stem, name), 0, width, [])
    sync(folder / ARRAYS)
    sql = (
        "insert into generations (bundle, variant, widths, spans, state, upto, created, stem, rows)"
        " values (?,?,?,?,?,0,?,?,0)"
    )
    spans = json.dumps(spans_of(bundle))
    row = (bundle.sha256, bundle.variant, json.dumps(dict(widths)), spans, state, _now(), stem)
    connection.execute(sql, row)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def identity_of(folder: Path) -> str:
    """Return the unique id of an index.

    Raises:
        StoreError: `index.json` is missing, altered or of another format.
    """
    content = index_text(folder)
    with suppress(ValueError, KeyError, TypeError):
        description = strict_loads(content)
        version = str(description["version"])[:40]
        if description["format"] > INDEX_FORMAT:
            raise StoreError(
                f"The index {folder} has format {description['format']}, which retrieval {version} "
                f"wrote; this is retrieval {installed_version()}, which reads format"
                f" {INDEX_FORMAT}. Install retrieval {version} or later."
            )
    index = parse_json(content, folder / INDEX_FILE, "index", StoreError, frozenset({INDEX_FORMAT}))
    if "id" not in index:
        raise StoreError(f"{folder / INDEX_FILE} is damaged: it has no 'id'. Restore a snapshot.")
    return str(index["id"])


def index_text(folder: Path) -> bytes:
    """Return the content of an index's `index.json`."""
    path = folder / INDEX_FILE
    try:
        return read_plain(path, _INDEX_BYTES)
    except OSError as fault:
        raise StoreError(f"{path} cannot be read: {fault.strerror or fault}.") from None


def bytes_of(folder: Path) -> int:
    """Return the disk space of a folder's files in bytes, without files removed meanwhile."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                status = Path(parent, name).stat()
                # Files grow in steps and may be sparse, so count only the blocks on the disk.
                size += min(status.st_size, status.st_blocks * 512)
    return size


def check_record(folder: Path, report: Callable[[int], object]) -> tuple[list[str], list[str]]:
    """Verify all checksums of an index, and that its record and arrays agree.

    Args:
        folder: folder of the index.
        report: called with 1 after each array.

    Returns:
        Two lists: one sentence per damaged part, and one per damaged part that the next writer
        rebuilds.

    Raises:
        StoreError: the record cannot be opened.
    """
    rebuilt: list[str] = []
    with Record.opened(folder) as record, record.reading(seconds=_CHECK_SECONDS) as connection:
        pages = ask(connection, "pragma integrity_check(10)")
        faults = [f"{RECORD_FILE}: {fault}." for (fault,) in pages if fault != "ok"]
        if not faults:
            restore_rows(connection, folder)
            if count := count_faults(connection):
                faults.append(f"{RECORD_FILE}: the words of {count:,} items do not fit its items.")
        for generation in all_generations(connection):
            rows = GenerationRows.of(connection, generation)
            for name, width in generation.widths.items():
                path = file_of(folder, rows.stem, name)
                try:
                    sums = sums_of(connection, generation.number, name)
                    ArrayFile(path, width).verify(rows.rows, sums)
                except FileNotFoundError:
                    faults.append(f"{ARRAYS}/{path.name} is missing.")
                except RetrievalError as fault:
                    faults.append(str(fault))
                report(1)
            text = rows.structure_text
            rebuilt += [
                f"{ARRAYS}/{name} is missing or was altered; the next writer builds it again."
                for name in (Structure.parse(text).damaged(folder) if text else ())
            ]
            if missing := _without_vectors(connection, generation, rows):
                faults.append(f"Generation {generation.number}: {missing:,} items have no vector.")
            path = folder / BUNDLES / generation.bundle[:16]
            try:
                bundle = Bundle.open(path, variant=generation.variant, device="cpu")
                if bundle.sha256 != generation.bundle:
                    faults.append(f"{BUNDLES}/{path.name} is not the bundle that the record names.")
            except RetrievalError as fault:
                faults.append(str(fault))
    return faults, rebuilt


def _without_vectors(
    connection: apsw.Connection, generation: Generation, rows: GenerationRows
) -> int:
    """Return the number of items that should have vectors in a generation and have none."""
    g = generation.number
    served = generation.state == "served"
    if served:
        upto = last_number(connection)
    else:
        upto = upto_of(connection, g)
    sql = "select n from items where n <= ? and n not in (select n from left_out where g = ?)"
    numbers = np.array([n for (n,) in ask(connection, sql, (upto, g))], np.int64)
    return int(np.count_nonzero(rows.runs.rows_of(numbers) < 0))


def write_snapshot(
    record: Record,
    target: Path,
    advice: str = "Choose another name for the snapshot.",
) -> None:
    """Write a snapshot of an index to a new folder atomically.

    Args:
        record: record of the index.
        target: the new folder.
        advice: sentence that ends the error message if `target` exists.

    Raises:
        StoreError: `target` exists already or cannot be written, or a file that the record names
            is missing.
    """
    folder = record.folder
    occupied = StoreError(f"{target} exists already. {advice}")
    if target.exists():
        raise occupied
    if not target.parent.is_dir():
        raise StoreError(f"{target} cannot be written: there is no folder {target.parent}.")
    missing = ""
    for _ in range(_TRIES):
        try:
            with (
                record.reading(seconds=_COPY_SECONDS) as connection,
                _faults_of(folder, target),
                whole_folder(target, replace=False, exists_error=occupied) as fresh,
            ):
                _copy(connection, record, fresh)
            return
        except FileNotFoundError as fault:
            # Another process has just compacted: its new files have other names.
            missing = fault.filename
    raise missing_file(folder, missing)


@contextmanager
def _faults_of(folder: Path, target: Path) -> Iterator[None]:
    """Context manager that turns disk errors of the target into a `StoreError` that names it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, apsw.Error) as fault:
        if isinstance(fault, OSError):
            path = fault.filename
        else:
            path = None
        if Path(path or folder).is_relative_to(folder) and not no_room(fault):
            # The error is one of the index that is copied, not of the target.
            raise
        raise StoreError(f"{target} cannot be written: {reason_and_advice(fault)}") from fault


def _copy(connection: apsw.Connection, record: Record, fresh: Path) -> None:
    """Copy the state that a read transaction sees. A missing structure is left out.

    The first writer of the copy builds it again.

    Raises:
        FileNotFoundError: another process has replaced a file meanwhile.
    """
    folder = record.folder
    # This query pins the transaction, which `backup` alone would release.
    generations = all_generations(connection)
    backup(connection, fresh / RECORD_FILE)
    for inner in (ARRAYS, BUNDLES):
        (fresh / inner).mkdir()
    sql = "select stem, rows, widths, structure from generations"
    for stem, rows, widths, text in ask(connection, sql):
        for name, width in json.loads(widths).items():
            path = file_of(folder, stem, name)
            _copy_start(path, file_of(fresh, stem, name), rows * width * 4)
        for name in Structure.names(text):
            if (folder / ARRAYS / name).is_file() or name not in _structure_files(record):
                shutil.copyfile(folder / ARRAYS / name, fresh / ARRAYS / name)
    for name in {generation.bundle[:16] for generation in generations}:
        shutil.copytree(folder / BUNDLES / name, fresh / BUNDLES / name)
    shutil.copyfile(folder / INDEX_FILE, fresh / INDEX_FILE)


def _structure_files(record: Record) -> set[str]:
    """Return the names of the files of the structures that the index has now."""
    with record.reading() as connection:
        texts = ask(connection, "select structure from generations")
    return {name for (text,) in texts for name in Structure.names(text)}


def _copy_start(source: Path, target: Path, size: int) -> None:
    """Copy the first `size` bytes of a file to a new one and sync it."""
    with open_plain(source) as file, target.open("xb") as copy:
        while size and (piece := file.read(min(size, BLOCK))):
            copy.write(piece)
            size -= len(piece)
    if size:
        raise damage_error(source, "was cut short")
    sync(target)
