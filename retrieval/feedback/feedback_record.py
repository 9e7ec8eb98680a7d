"""The record of feedback: a SQLite file of searches, the marks on their hits, and trials.

The file has page checksums and a write-ahead log, as the record of an index has. Marks are synced
to the disk before `add` returns; searches are not, but no mark is durable without its search.
Several processes may use the file: servers note searches and marks, a worker learns from them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import numpy as np

from retrieval.base.arrays import Floats32
from retrieval.base.files import hold, scratch_folder, sync
from retrieval.base.regular_files import open_plain
from retrieval.errors import DataError, StoreError, some
from retrieval.feedback import JUDGED_SECONDS, UNJUDGED_SECONDS
from retrieval.store.contract import StoreUnavailable
from retrieval.store.record import (
    ask,
    connect,
    create_database,
    file_id,
    is_cut,
    no_room,
    reason_and_advice,
    value,
)

FEEDBACK_FILE = "feedback.sqlite"
LIKED, DISLIKED, CLICKED = 1, -1, 2
MAX_HITS = 1000
"""Largest number of hits that are noted of a search, and of marks in a request."""
MAX_UNJUDGED = 1_000_000
"""Largest number of searches without a mark; the oldest are deleted first."""
MAX_MARKS = 5_000_000
"""Largest number of marks; further ones are refused."""
CALM_SHARE = 0.25
"""Share of the explored searches that a watch gets while its evidence is weak."""
SUSPICION = 1.5
"""Wealth of the gamblers from which a watch gets all explored searches."""
_BUSY_MILLISECONDS = 5000
_CHUNK = 10_000
"""Largest number of searches that one transaction deletes."""
_as_json = json.JSONEncoder(ensure_ascii=False).encode
_FORMAT = 1
_APPLICATION = 0x52465942  # marks the file as one of feedback

_SCHEMA = f"""
pragma application_id = {_APPLICATION};
pragma user_version = {_FORMAT};
create table searches (n integer primary key autoincrement, id text not null unique,
 at real not null, voter text not null, base text not null, served text not null, query blob,
 item text, hits text not null, challenger text not null, credits text not null,
 judged integer not null default 0) strict;
create index unjudged on searches (n, at) where judged = 0;
create index judged on searches (n) where judged = 1;
create table marks (search integer not null, voter text not null, item text not null,
 mark integer not null, at real not null, primary key (search, voter, item))
 strict, without rowid;
create table counts (name text primary key, count integer not null) strict, without rowid;
insert into counts values ('marks', 0);
create trigger mark_added after insert on marks
 begin update counts set count = count + 1 where name = 'marks'; end;
create trigger mark_removed after delete on marks
 begin update counts set count = count - 1 where name = 'marks'; end;
create table trials (n integer primary key autoincrement, kind text not null, base text not null,
 challenger text not null, head blob, incumbent text not null, learner text not null,
 alpha real not null, explore integer not null, cutoff integer not null, opened real not null,
 closed real, verdict text, evidence text not null, tainted integer not null) strict;
create unique index open_trial on trials (kind) where verdict is null;
create table trial_voters (trial integer not null, voter text not null,
 primary key (trial, voter)) strict, without rowid;
"""
"""SQL of the tables.

`searches.hits` is a JSON list of ids, "" for a forgotten item. `marks.mark` is `LIKED`, `DISLIKED`
or `CLICKED`. `trial_voters` names the voters whose feedback taught a trial's challenger, from
searches up to number `trials.cutoff`.
"""


class UnknownSearch(DataError):
    """The record lacks the search of a mark: it expired, was forgotten, or never took place."""


class NoRoom(StoreError):
    """The disk is full, or the record has `MAX_MARKS` marks."""


class Search(NamedTuple):
    """One search that was answered.

    Attributes:
        id: random id that the answer carried.
        answered: seconds since 1970.
        voter: who searched: the name of the API key, then "/" and the request's user if it named
            one; "" without both.
        base: SHA-256 of the manifest of the bundle whose vectors feedback is learned over.
        served: SHA-256 of the manifest of the bundle that answered.
        query: base vector of the query, if it was not an item of the index.
        item: id of the query's item, or None.
        hits: ids of the hits in the order shown; "" for an item that was forgotten.
        challenger: SHA-256 of the trial's challenger if its hits were interleaved, or "".
        credits: credit of each hit for the challenger, from -1 to 1, if they were interleaved; see
            `team_draft`.
    """

    id: str
    answered: float
    voter: str
    base: str
    served: str
    query: Floats32 | None
    item: str | None
    hits: tuple[str, ...]
    challenger: str = ""
    credits: tuple[float, ...] = ()


@dataclass(frozen=True)
class JudgedSearch:
    """A search with its marks.

    Attributes:
        n: number of the search; later searches have higher numbers.
        search: the search.
        marks: mark of each item, by voter: `LIKED`, `DISLIKED` or `CLICKED`.
    """

    n: int
    search: Search
    marks: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Trial:
    """A challenger on trial against what is served.

    Attributes:
        kind: "challenge", or "watch" of the head that is served, against the base alone.
        base: SHA-256 of the manifest of the base bundle.
        challenger: SHA-256 of the head's bytes, or `base` if the challenger is the base itself.
        head: ONNX graph of the challenger's head; None if it is the base itself.
        incumbent: SHA-256 of the manifest of the bundle that is served.
        learner: name of the learner that made the head.
        alpha: error rate of the trial.
        cutoff: number of the last search that the challenger learned from.
        explore: whether servers may interleave the hits of both.
        voters: voters whose feedback the challenger learned from.
        n: number of the trial.
        opened: seconds since 1970.
        closed: seconds since 1970, or None while it is open.
        verdict: None while it is open; "switched", "refused", "rolled back", "withdrawn".
        evidence: JSON object; it must not name voters, who may ask to be forgotten.
        tainted: whether feedback that the challenger learned from was forgotten.
    """

    kind: str
    base: str
    challenger: str
    head: bytes | None
    incumbent: str
    learner: str
    alpha: float
    cutoff: int
    explore: bool = False
    voters: frozenset[str] = frozenset()
    n: int = 0
    opened: float = 0.0
    closed: float | None = None
    verdict: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    tainted: bool = False

    @property
    def share(self) -> float:
        """Share of the explored searches that this trial gets; later trials get the rest.

        A watch costs its users good hits, so it gets few until its evidence grows.
        """
        if self.kind == "watch" and self.evidence.get("wealth", 1.0) < SUSPICION:
            return CALM_SHARE
        return 1.0


class FeedbackRecord:
    """The file of feedback. Threads may share one record; each process opens its own."""

    def __init__(self, path: Path, create: bool = False) -> None:
        self.path = path
        self._create = create
        self._turn = threading.RLock()
        self._connection: apsw.Connection | None = None
        self._file: tuple[int, int] | None = None

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> FeedbackRecord:
        """Open the file of feedback.

        Args:
            path: the file; `feedback.sqlite` in the folder of a local index.
            create: whether to create the file if it is missing, also later, if somebody removes it.
                Only its owner can read it.

        Raises:
            StoreError: the file is missing, damaged, of another kind, or cannot be written.
        """
        record = cls(path, create)
        with record._faults("opened"):
            record._connect()
        return record

    def close(self) -> None:
        """Close the file."""
        with self._turn:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def __enter__(self) -> FeedbackRecord:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _connect(self) -> apsw.Connection:
        """Open the connection, again if the file was replaced."""
        file = file_id(self.path)
        if self._connection is not None and file == self._file:
            return self._connection
        self.close()
        if self._create and file is None and not os.path.lexists(self.path):
            _create(self.path)
            file = file_id(self.path)
        if not os.path.lexists(self.path):
            raise StoreError(
                f"There is no feedback at {self.path}. Take it with 'retrieval serve INDEX"
                " --feedback'."
            )
        # SQLite would wait for a pipe, and follow a link.
        open_plain(self.path).close()
        connection = connect(self.path, apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.set_busy_timeout(_BUSY_MILLISECONDS)
            connection.execute("pragma secure_delete = on; pragma temp_store = memory").fetchall()
            if connection.pragma("application_id") != _APPLICATION:
                raise StoreError(f"{self.path} is not a file of feedback. Name another file.")
            if (version := connection.pragma("user_version")) != _FORMAT:
                raise StoreError(
                    f"{self.path} has format {version}; this version of retrieval reads format"
                    f" {_FORMAT}. Upgrade retrieval, or name another file."
                )
            if is_cut(connection, self.path):
                raise StoreError(f"{self.path} is damaged: it was cut short. {_repair(self.path)}")
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self._file = file
        return connection

    @contextmanager
    def _faults(self, action: str) -> Iterator[None]:
        """Context manager that turns errors of SQLite and the disk into a `StoreError`."""
        try:
            yield
        except apsw.NotADBError as fault:
            raise StoreError(
                f"{self.path} is not a file of feedback, or its beginning is damaged. Name another"
                " file."
            ) from fault
        except (apsw.Error, OSError) as fault:
            kind = StoreError
            if isinstance(fault, apsw.BusyError):
                kind = StoreUnavailable
            elif no_room(fault):
                kind = NoRoom
            reason = reason_and_advice(fault, self.path.name, _repair(self.path))
            raise kind(f"The feedback {self.path} cannot be {action}: {reason}") from fault

    @contextmanager
    def _reading(self) -> Iterator[apsw.Connection]:
        """Context manager of a read transaction, which sees one state."""
        with self._turn, self._faults("read"):
            connection = self._connect()
            connection.execute("begin")
            try:
                yield connection
            finally:
                if connection.in_transaction:
                    connection.execute("rollback")

    @contextmanager
    def _writing(self, *, durable: bool = True) -> Iterator[apsw.Connection]:
        """Context manager of a transaction; on exit it is committed and, if `durable`, synced."""
        with self._turn, self._faults("written"):
            connection = self._connect()
            connection.execute(f"pragma synchronous = {'full' if durable else 'normal'}")
            connection.execute("begin immediate")
            try:
                yield connection
                connection.execute("commit")
            finally:
                if connection.in_transaction:
                    connection.execute("rollback")

    # Searches and marks

    def note_searches(self, searches: Iterable[Search]) -> None:
        """Write searches. They are in the file for every process, but not synced.

        Raises:
            StoreError: the file cannot be written, and none of them was.
        """
        rows = []
        for search in searches:
            query = None if search.query is None else search.query.astype("<f4").tobytes()
            hits = _as_json(search.hits[:MAX_HITS])
            keys = (search.id, search.answered, search.voter, search.base, search.served)
            credits = _as_json(search.credits[:MAX_HITS])
            rows.append((*keys, query, search.item, hits, search.challenger, credits))
        sql = (
            "insert or ignore into searches (id, at, voter, base, served, query, item, hits,"
            " challenger, credits) values (?,?,?,?,?,?,?,?,?,?)"
        )
        with self._writing(durable=False) as connection:
            connection.executemany(sql, rows)
            # Most searches get no mark, so the difference of numbers tells when there are too many.
            oldest = value(connection, "select min(n) from searches where judged = 0") or 0
            newest = value(connection, "select max(n) from searches") or 0
            if newest - oldest >= MAX_UNJUDGED:
                connection.execute(
                    "delete from searches where judged = 0 and n <= ?", (newest - MAX_UNJUDGED,)
                )

    def add(self, search_id: str, voter: str, marks: Mapping[str, int]) -> int:
        """Write a voter's marks on the hits of a search; return how many are new or changed.

        A later mark of the same voter on the same hit replaces the earlier, but a click does not
        replace a like or dislike. When this returns, the marks survive a power cut.

        Args:
            search_id: id of the search.
            voter: who marks.
            marks: mark of each item: `LIKED`, `DISLIKED` or `CLICKED`.

        Raises:
            UnknownSearch: there is no such search, or it has expired.
            DataError: a marked item was not among its hits, or there are too many marks.
            NoRoom: the disk is full, or there are `MAX_MARKS` marks.
            StoreError: the file cannot be written.
        """
        if len(marks) > MAX_HITS:
            raise DataError(f"{len(marks):,} items are marked at once; at most {MAX_HITS:,} may.")
        sql = (
            "insert into marks values (?, ?, ?, ?, ?) on conflict do update"
            " set mark = excluded.mark, at = excluded.at where mark <> excluded.mark"
            f" and excluded.mark <> {CLICKED}"
        )
        now = time.time()
        with self._writing() as connection:
            row = value(connection, "select n, hits from searches where id = ?", (search_id,))
            if row is None:
                raise UnknownSearch(
                    f"There is no search {search_id}. It was never answered here, was forgotten, or"
                    " is older than searches are kept."
                )
            n = row[0]
            hits = set(json.loads(row[1]))
            if strangers := [item for item in marks if not item or item not in hits]:
                raise DataError(
                    f"Not among the hits that search {search_id} returned: {some(strangers)}. Mark"
                    " hits of the search."
                )
            if value(connection, "select count from counts") + len(marks) > MAX_MARKS:
                raise NoRoom(
                    f"The feedback {self.path} has {MAX_MARKS:,} marks, which is the most."
                    " Export it, and forget the oldest with 'retrieval feedback forget'."
                )
            counted = 0
            for item, mark in marks.items():
                connection.execute(sql, (n, voter, item, mark, now))
                counted += connection.changes()
            connection.execute("update searches set judged = 1 where n = ?", (n,))
        return counted

    def knows(self, search_id: str) -> bool:
        """Return whether a search is in the file."""
        with self._reading() as connection:
            sql = "select 1 from searches where id = ?"
            return value(connection, sql, (search_id,)) is not None

    def judged(
        self, base: str | None = None, after: int = 0, limit: int = -1
    ) -> list[JudgedSearch]:
        """Return searches with their marks, ordered by number.

        Args:
            base: SHA-256 of a bundle's manifest, to return only searches over its vectors.
            after: number after which the searches begin.
            limit: how many to return; -1 for all.
        """
        sql = (
            "select n, id, at, voter, base, served, query, item, hits, challenger, credits"
            " from searches where judged = 1 and n > ?1 and (?2 is null or base = ?2)"
            " order by n limit ?3"
        )
        of_search = "select voter, item, mark from marks where search = ? order by voter, item"
        searches = []
        with self._reading() as connection:
            for row in ask(connection, sql, (after, base, limit)):
                n, id, answered, searcher, of_base, served, query, item, *interleaved = row
                hits, challenger, credits = interleaved
                vector = None if query is None else np.frombuffer(query, "<f4").astype(np.float32)
                shown = tuple(json.loads(hits))
                marks: dict[str, dict[str, int]] = {}
                for voter, marked, mark in connection.execute(of_search, (n,)):
                    marks.setdefault(voter, {})[marked] = mark
                keys = (id, answered, searcher, of_base, served)
                search = Search(*keys, vector, item, shown, challenger, tuple(json.loads(credits)))
                searches.append(JudgedSearch(n, search, marks))
        return searches

    def counts(self) -> dict[str, int]:
        """Return the numbers of searches, of those with marks, of marks, voters and trials."""
        sql = (
            "select (select count(*) from searches), (select count(*) from searches where judged),"
            " (select count from counts), (select count(distinct voter) from marks),"
            " (select count(*) from trials)"
        )
        with self._reading() as connection:
            numbers = ask(connection, sql)[0]
        return dict(zip(("searches", "judged", "marks", "voters", "trials"), numbers, strict=True))

    def voters(self) -> list[tuple[str, int, int, float]]:
        """Return each voter with the numbers of searches and marks, and the time of the last."""
        sql = (
            "select voter, sum(search), sum(mark), max(at) from (select voter, 1 as search, 0 as"
            " mark, at from searches union all select voter, 0, 1, at from marks)"
            " group by voter order by voter"
        )
        with self._reading() as connection:
            return ask(connection, sql)

    # Deleting

    def forget(
        self, *, voter: str | None = None, item: str | None = None, before: float | None = None
    ) -> dict[str, int]:
        """Delete feedback so that its bytes leave the file; return the numbers of what was deleted.

        Trials whose challenger learned from deleted feedback become tainted. Give exactly one
        argument.

        Args:
            voter: a voter, or the name of a key with all of its users. Deletes their searches with
                all marks on them, and their marks.
            item: id of an item. Deletes searches by it, marks on it, and its id among the hits.
            before: seconds since 1970. Deletes earlier searches and marks.

        Returns:
            The numbers of "searches", "marks" and "tainted" trials.

        Raises:
            DataError: none or several arguments are given.
            StoreError: the file cannot be written.
        """
        parameter: object
        if (voter is not None) + (item is not None) + (before is not None) != 1:
            raise DataError(
                "Forget feedback of a voter, of an item, or before a time: one of them."
            )
        if voter is not None:
            condition = "(voter = ?1 or substr(voter, 1, length(?1) + 1) = ?1 || '/')"
            parameter = voter
        elif item is not None:
            condition = "item = ?1"
            parameter = item
        else:
            condition = "at < ?1"
            parameter = before
        shows = "exists (select 1 from json_each(hits) where value = ?1)"
        deleted_marks = f"{condition} or search in (select n from searches where {condition})"
        touched = deleted_marks
        if item is not None:
            # An unmarked hit above the last mark taught, too.
            touched += f" or search in (select n from searches where {shows})"
        taint = (
            "update trials set tainted = 1, head = iif(verdict is null, head, x'') where not"
            " tainted and exists (select 1 from marks join trial_voters using (voter)"
            f" where trial = trials.n and search <= cutoff and ({touched}))"
        )
        counts = {}
        with self._writing() as connection:

            def run(sql: str) -> int:
                connection.execute(sql, (parameter,) if "?1" in sql else ())
                return connection.changes()

            counts["tainted"] = run(taint)
            counts["marks"] = run(f"delete from marks where {deleted_marks}")
            counts["searches"] = run(f"delete from searches where {condition}")
            if voter is not None:
                run(f"delete from trial_voters where {condition}")
            if item is not None:
                run(
                    "update searches set hits = (select json_group_array(iif(value = ?1, '', value)"
                    f" order by key) from json_each(hits)) where {shows}"
                )
            run(
                "update searches set judged = 0 where judged and not exists"
                " (select 1 from marks where search = n)"
            )
        self._wipe()
        return counts

    def _wipe(self) -> None:
        """Write the file anew without deleted content, and empty the write-ahead log."""
        with self._turn, self._faults("written"):
            connection = self._connect()
            connection.execute("pragma synchronous = full; vacuum")
            # This waits for readers as long as a transaction waits for the lock.
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)

    def expire(
        self, searches_seconds: float = UNJUDGED_SECONDS, marks_seconds: float = JUDGED_SECONDS
    ) -> int:
        """Delete searches that are older than they are kept; return how many.

        What a head learned from them stays learned, unlike after `forget`.

        Args:
            searches_seconds: how long a search without marks is kept.
            marks_seconds: how long a search with marks is kept, and its marks.
        """
        count = 0
        now = time.time()
        for judged, seconds in ((0, searches_seconds), (1, marks_seconds)):
            expired = (
                f"select n from searches where judged = {judged} and at < ?1 order by n"
                f" limit {_CHUNK}"
            )
            while True:
                with self._writing(durable=False) as connection:
                    connection.execute(
                        f"delete from marks where search in ({expired})", (now - seconds,)
                    )
                    # Deleting the marks first leaves the same searches to select.
                    connection.execute(
                        f"delete from searches where n in ({expired})", (now - seconds,)
                    )
                    deleted = connection.changes()
                count += deleted
                if deleted < _CHUNK:
                    break
        return count

    # Trials

    def open_trials(self) -> list[Trial]:
        """Return the trials that are open, at most one of each kind, oldest first."""
        return self._trials("verdict is null")

    def trials(self, base: str | None = None) -> list[Trial]:
        """Return all trials, oldest first, or those over one base bundle."""
        return self._trials("?1 is null or base = ?1", (base,))

    def _trials(self, condition: str, bindings: tuple[object, ...] = ()) -> list[Trial]:
        columns = (
            "n, kind, base, challenger, head, incumbent, learner, alpha, cutoff, explore, opened,"
            " closed, verdict, evidence, tainted"
        )
        sql = f"select {columns} from trials where {condition} order by n"
        of_trial = "select voter from trial_voters where trial = ?"
        trials = []
        with self._reading() as connection:
            for row in ask(connection, sql, bindings):
                fields = dict(zip(columns.split(", "), row, strict=True))
                fields["explore"] = bool(fields["explore"])
                fields["tainted"] = bool(fields["tainted"])
                fields["evidence"] = json.loads(fields["evidence"])
                fields["voters"] = frozenset(
                    voter for (voter,) in ask(connection, of_trial, (fields["n"],))
                )
                trials.append(Trial(**fields))
        return trials

    def begin_trial(self, trial: Trial) -> Trial:
        """Write a new trial; return it with its number and time.

        Raises:
            StoreError: another trial of its kind is open, or the file cannot be written.
        """
        sql = (
            "insert into trials (kind, base, challenger, head, incumbent, learner, alpha, explore,"
            " cutoff, opened, evidence, tainted) values (?,?,?,?,?,?,?,?,?,?,?,0) returning n"
        )
        described = (trial.kind, trial.base, trial.challenger, trial.head, trial.incumbent)
        options = (trial.learner, trial.alpha, int(trial.explore), trial.cutoff, time.time())
        evidence = json.dumps(dict(trial.evidence))
        with self._writing() as connection:
            is_open = "select 1 from trials where verdict is null and kind = ?"
            if value(connection, is_open, (trial.kind,)) is not None:
                raise StoreError(f"Another {trial.kind} is open. Close it first.")
            n = value(connection, sql, (*described, *options, evidence))
            rows = ((n, voter) for voter in sorted(trial.voters))
            connection.executemany("insert into trial_voters values (?, ?)", rows)
        return self._trials("n = ?", (n,))[0]

    def note_evidence(self, n: int, evidence: Mapping[str, Any]) -> None:
        """Replace the evidence of trial `n`."""
        with self._writing() as connection:
            connection.execute(
                "update trials set evidence = ? where n = ?", (json.dumps(dict(evidence)), n)
            )

    def close_trial(self, n: int, verdict: str, evidence: Mapping[str, Any]) -> None:
        """Close trial `n`; a closed trial is left unchanged."""
        with self._writing() as connection:
            connection.execute(
                "update trials set verdict = ?, evidence = ?, closed = ?, head ="
                " iif(tainted, x'', head) where n = ? and verdict is null",
                (verdict, json.dumps(dict(evidence)), time.time(), n),
            )

    @contextmanager
    def worker_lock(self) -> Iterator[None]:
        """Context manager in which no other process learns from this file.

        Raises:
            StoreError: another process is learning from it.
        """
        with hold(self.path, "learning from this feedback", StoreError):
            yield


def feedback_file(index: object, file: Path | None = None) -> Path:
    """Return the file of an index's feedback.

    Args:
        index: the index's folder, or its address.
        file: the file that the user named; by default `feedback.sqlite` in the folder.

    Raises:
        StoreError: the index is not in a folder, and no file is named.
    """
    if file is not None:
        return file
    if isinstance(index, Path):
        return index / FEEDBACK_FILE
    raise StoreError(
        f"The index {index} is not in a folder: name the file of its feedback, --feedback-file"
        " FILE."
    )


def _create(path: Path) -> None:
    """Write an empty file of feedback, whole or not at all, unless another process did."""
    with scratch_folder(path.parent, f".{path.name}.", ".part") as folder:
        fresh = folder / path.name
        os.close(os.open(fresh, os.O_CREAT | os.O_EXCL, 0o600))
        create_database(fresh, _SCHEMA)
        with hold(path, "creating this file", StoreError):
            if os.path.lexists(path):
                return
            # A log that is left of a removed file would be taken for one of the new file.
            for end in ("-wal", "-shm"):
                path.with_name(path.name + end).unlink(missing_ok=True)
            fresh.rename(path)
    sync(path.parent)


def _repair(path: Path) -> str:
    return f"Move {path} away; 'retrieval serve' begins a new one."
