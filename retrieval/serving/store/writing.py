"""What writers of a local index do inside a transaction of its record; and a new, empty index."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import apsw
import numpy as np

from retrieval.errors import RetrievalError, StoreError
from retrieval.host.files import sync, whole_folder
from retrieval.host.version import installed_version
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.plain import read_plain
from retrieval.serving.files.strict_json import parse_json, strict_loads
from retrieval.serving.store.arrays import ARRAYS, BLOCK, BUNDLES, append, file_of
from retrieval.serving.store.contract import StoreUnavailable
from retrieval.serving.store.items import Floats, Generation, Item, Keep, spans_of, to_row, usable
from retrieval.serving.store.record import Record, ask, reason, value
from retrieval.serving.store.structure import Structure, Wanted
from retrieval.serving.store.view import Numbers, all_of

INDEX = "index.json"
FORMAT = 3
_INDEX_BYTES = 1_000_000
_CLAIM_SECONDS = 600.0
_ACTIVE: set[str] = set()
"""Stems of the work that this process does."""


def create_local(
    folder: Path,
    bundle: Bundle,
    widths: Mapping[str, int],
    *,
    structure: Wanted | None = None,
    keep: Keep = "reference",
    replace: bool = False,
    identity: str | None = None,
) -> None:
    """Write an empty index, whole or not at all.

    Args:
        folder: must not exist, or is an index that gives way (`replace`); its parent must.
        bundle: of the first generation; a copy goes into the index.
        widths: width of each array of an item, by name.
        structure: which structure it is to have.
        keep: what it keeps of originals, unless an item says otherwise.
        replace: see `folder`.
        identity: its id; a new one by default.

    Raises:
        StoreError: there is something already, or the disk refuses.
    """
    taken = StoreError(
        f"{folder} exists already. Choose another name, or add to it with 'retrieval index add'."
    )
    description = {
        "retrieval": "index",
        "format": FORMAT,
        "version": installed_version(),
        "id": identity or str(uuid.uuid4()),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    text = (json.dumps(description, indent=2) + "\n").encode()
    try:
        with whole_folder(folder, replace=replace, taken=taken) as fresh:
            (fresh / ARRAYS).mkdir()
            (fresh / BUNDLES).mkdir()
            (fresh / INDEX).write_bytes(text)
            Record.create(fresh)
            record = Record(fresh)
            try:
                with record.writing() as (connection, _):
                    state = {
                        "index": hashlib.sha256(text).hexdigest(),
                        "structure": (structure or Wanted()).text(),
                        "keep": keep,
                    }
                    connection.executemany("insert into state values (?, ?)", state.items())
                    add_generation(connection, fresh, bundle, widths, "served")
                record.checkpoint()
            finally:
                record.close()
    except (OSError, apsw.Error, StoreError) as fault:
        cause = fault.__cause__ if isinstance(fault, StoreError) else fault
        if not isinstance(cause, OSError | apsw.Error):
            raise
        raise StoreError(f"The index {folder} cannot be written: {reason(cause)}") from cause


def identity_of(folder: Path) -> str:
    """Return the id that an index got when it was created.

    Raises:
        StoreError: its `index.json` is missing, altered, or of another format.
    """
    path = folder / INDEX
    content = index_text(folder)
    with suppress(ValueError, KeyError, TypeError):
        description = strict_loads(content)
        version = str(description["version"])[:40]
        if description["format"] > FORMAT:
            raise StoreError(
                f"The index {folder} has format {description['format']}, which retrieval {version} "
                f"wrote; this is retrieval {installed_version()}, which reads format {FORMAT}. "
                f"Install retrieval {version} or later."
            )
    return str(parse_json(content, path, "index", StoreError, frozenset({FORMAT}))["id"])


def index_text(folder: Path) -> bytes:
    """Return what the description of an index holds."""
    path = folder / INDEX
    try:
        return read_plain(path, _INDEX_BYTES)
    except OSError as fault:
        raise StoreError(f"{path} cannot be read: {fault.strerror or fault}.") from None


def add_generation(
    connection: apsw.Connection, folder: Path, bundle: Bundle, widths: Mapping[str, int], state: str
) -> int:
    """Begin a generation: its bundle, its files, its row in the record; return its number."""
    target = folder / BUNDLES / bundle.sha256[:16]
    if bundle.sha256 not in {known.bundle for known in all_of(connection)}:
        # A folder that no generation has may be the rest of one that was being deleted.
        with whole_folder(target, replace=True, taken=StoreError(f"{target} is there.")) as fresh:
            bundle.copy(fresh)
    stem = new_stem()
    for name, width in widths.items():
        append(file_of(folder, stem, name), 0, width, [])
    sync(folder / ARRAYS)
    sql = (
        "insert into generations (bundle, variant, widths, spans, state, upto, created, stem, rows)"
        " values (?,?,?,?,?,0,?,?,0) returning g"
    )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    spans = json.dumps(spans_of(bundle))
    row = (bundle.sha256, bundle.variant, json.dumps(dict(widths)), spans, state, now, stem)
    return int(value(connection, sql, row))


def new_stem() -> str:
    """Return the beginning of names of files that no other has."""
    return uuid.uuid4().hex[:16]


def numbers_of(connection: apsw.Connection, ids: Iterable[object]) -> list[int]:
    """Return the numbers of those ids that are there."""
    text = json.dumps(usable(ids), ensure_ascii=False)
    sql = "select n from items where id in (select value from json_each(?))"
    return [n for (n,) in ask(connection, sql, (text,))]


def insert(connection: apsw.Connection, items: Sequence[Item], texts: Sequence[str]) -> range:
    """Write items, none of which is there, without their arrays; return their numbers.

    Args:
        connection: inside the transaction.
        items: to write.
        texts: their metadata, as `checked` gives them.
    """
    sql = "select seq from sqlite_sequence where name = 'items'"
    first = int(value(connection, sql) or 0) + 1
    numbers = range(first, first + len(items))
    connection.executemany(
        "insert into items values (?,?,?,?,?,?,?,?,?,?,?)", map(to_row, numbers, items, texts)
    )
    kept = [
        (n, item.original)
        for n, item in zip(numbers, items, strict=True)
        if item.original is not None
    ]
    connection.executemany("insert into originals values (?, ?)", kept)
    names = sorted(set(itertools.chain.from_iterable(item.metadata for item in items)))
    connection.executemany("insert or ignore into fields values (?)", ((one,) for one in names))
    return numbers


def remove(connection: apsw.Connection, seq: int, numbers: Sequence[int]) -> None:
    """Delete items by number; their rows are masked from this transaction on."""
    if not numbers:
        return
    text = json.dumps(list(numbers))
    for table in ("items", "originals"):
        connection.execute(
            f"delete from {table} where n in (select value from json_each(?))", (text,)
        )
    sql = "insert or ignore into removed select value, ? from json_each(?)"
    connection.execute(sql, (seq, text))


def keep_rows(
    connection: apsw.Connection,
    folder: Path,
    generation: Generation,
    numbers: Numbers,
    arrays: Mapping[str, Iterable[Floats]],
) -> None:
    """Append rows to a generation's files, and note them.

    Args:
        connection: inside the transaction.
        folder: of the index.
        generation: whose rows.
        numbers: (n,) ascending, above those that it has.
        arrays: chunks (m, width) of all n rows, by name.
    """
    if not len(numbers):
        return
    g = generation.number
    ((stem, rows),) = ask(connection, "select stem, rows from generations where g = ?", (g,))
    for name, width in generation.widths.items():
        block = rows * width * 4 // BLOCK
        sql = "select sum from sums where g = ? and name = ? and block = ?"
        last = value(connection, sql, (g, name, block)) or 0
        sums = append(file_of(folder, stem, name), rows, width, arrays[name], last)
        put_sums(connection, g, name, sums)
    put_runs(connection, g, rows, numbers)
    connection.execute("update generations set rows = rows + ? where g = ?", (len(numbers), g))


def put_sums(connection: apsw.Connection, g: int, name: str, sums: Mapping[int, int]) -> None:
    """Write checksums of one array of a generation."""
    rows = [(g, name, block, sum_) for block, sum_ in sums.items()]
    connection.executemany("insert or replace into sums values (?,?,?,?)", rows)


def put_runs(connection: apsw.Connection, g: int, rows: int, numbers: Numbers) -> None:
    """Note the numbers of the rows from `rows` on."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(numbers) != 1) + 1])
    counts = np.diff(np.concatenate([starts, [len(numbers)]]))
    runs = [
        (g, rows + start, int(numbers[start]), count)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
    ]
    sql = "select row, n + count, count from runs where g = ? order by row desc limit 1"
    for row, following, count in ask(connection, sql, (g,)):
        if following == runs[0][2]:  # the first goes on with the last that is there
            more = count + runs.pop(0)[3]
            connection.execute("update runs set count = ? where g = ? and row = ?", (more, g, row))
    connection.executemany("insert into runs values (?,?,?,?)", runs)


def tidy(record: Record) -> None:
    """Remove what the record does not name: a process that was killed left it, or gave it up.

    Its lock keeps other processes from making any meanwhile; files of claimed work stay.
    """
    with record.locked() as connection:
        rows = ask(connection, "select g, stem, widths, structure from generations")
        files = {f"{stem}.{name}" for _, stem, widths, _ in rows for name in json.loads(widths)}
        for *_, text in rows:
            if (structure := Structure.parse(text)) is not None:
                files |= {name for name, _ in structure.files}
        stems = {
            stem
            for owner, until, stem in ask(connection, "select owner, until, stem from claims")
            if until > time.time() and not _is_gone(owner, stem)
        }
        bundles = {generation.bundle[:16] for generation in all_of(connection)}
        for path in (record.folder / ARRAYS).iterdir():
            if path.name not in files and path.name.partition(".")[0] not in stems:
                path.unlink(missing_ok=True)
        for path in (record.folder / BUNDLES).iterdir():
            if path.is_dir() and path.name not in bundles:
                shutil.rmtree(path, ignore_errors=True)
            elif not path.is_dir():  # the lock of a copy that was killed
                path.unlink(missing_ok=True)


@contextmanager
def claimed(record: Record, g: int, wait: float) -> Iterator[str]:
    """Claim background work on a generation against every process; give the stem of its files.

    The claim's row says who has it and until when; `renew` prolongs it. One that has expired, or
    whose process on this machine has ended, is taken over: so who finishes asks `is_mine` first.

    Args:
        record: of the index.
        g: number of the generation.
        wait: seconds to wait for who has it.

    Raises:
        StoreUnavailable: another process has it.
    """
    work, stem = f"generation {g}", new_stem()
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    end = time.monotonic() + wait
    while True:
        with record.writing() as (connection, _):
            sql = "select owner, until, stem from claims where work = ?"
            held = ask(connection, sql, (work,))
            if not held or held[0][1] < time.time() or _is_gone(*held[0][::2]):
                row = (work, owner, time.time() + _CLAIM_SECONDS, stem)
                connection.execute("insert or replace into claims values (?,?,?,?)", row)
                break
        if time.monotonic() > end:
            raise StoreUnavailable(
                f"{held[0][0].capitalize()} is compacting the index {record.folder}, or building "
                "what speeds its search up. Wait for it."
            )
        time.sleep(0.2)
    _ACTIVE.add(stem)
    try:
        yield stem
        with record.writing() as (connection, _):
            connection.execute("delete from claims where stem = ?", (stem,))
    except BaseException:
        _ACTIVE.discard(stem)
        with suppress(RetrievalError, OSError):
            tidy(record)
        raise
    finally:
        _ACTIVE.discard(stem)


def renew(record: Record, stem: str) -> None:
    """Prolong a claim."""
    with record.writing() as (connection, _):
        until = time.time() + _CLAIM_SECONDS
        connection.execute("update claims set until = ? where stem = ?", (until, stem))


def is_mine(connection: apsw.Connection, stem: str) -> bool:
    """Whether a claim still stands."""
    return bool(value(connection, "select count(*) from claims where stem = ?", (stem,)))


def _is_gone(owner: str, stem: str) -> bool:
    """Whether nobody does the work of a claim any more, as far as this machine can tell."""
    _, pid, _, host = owner.split(" ", 3)
    if host != socket.gethostname():
        return False
    if int(pid) == os.getpid():
        return stem not in _ACTIVE
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
