"""What a writing store does beside its writes: fresh items become segments, small segments become large ones, deleted items go."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from retrieval.errors import RetrievalError, StoreError
from retrieval.serving.local.aside import aside
from retrieval.serving.local.generation_table import all_of
from retrieval.serving.local.home import Home
from retrieval.serving.local.merged import Rows, Stopped, forget
from retrieval.serving.local.piece import SEGMENTS, damaged, positions, verify_anew
from retrieval.serving.local.ready import Row
from retrieval.serving.local.record import ask, value
from retrieval.serving.local.segment import Segment, write_segment
from retrieval.serving.local.structures import Structure, build_structure, is_whole
from retrieval.serving.local.view import ARRAYS, View
from retrieval.serving.local.writer import FLUSH_BYTES, FLUSH_ROWS, Writer, file_name, files_of, remove_files
from retrieval.serving.stores.contract import VECTOR, Floats, Generation

log = logging.getLogger("retrieval.serving.local")

_FAN = 4
"""So many segments of about one size become one, which is so many times as large: each item is rewritten once a size."""
_DEAD = 0.25
"""Share of deleted items from which a segment is rewritten without them."""
_PAUSE, _LONGEST = (
    5.0,
    600.0,
)  # seconds after a fault, before it is tried again: twice as long after each, at most


@dataclass(frozen=True)
class _Part:
    """A segment that is to be merged."""

    number: int
    count: int
    dead: int
    file: str
    structure: str | None
    segment: Segment

    @property
    def alive(self) -> int:
        return self.count - self.dead


class Upkeep:
    """Tends a store's segments, in a thread that begins with the first write.

    Every step ends in one short transaction; until then nothing has changed, and a process that is killed leaves files that
    nobody names.

    Args:
        home: of the store.
        writer: of the store.
        thread: whether to work in the background.

    Attributes:
        merges: how many segments it has made of several.
    """

    def __init__(self, home: Home, writer: Writer, *, thread: bool = True) -> None:
        self.merges = 0
        self._home = home
        self._writer = writer
        self._work = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._background = thread
        self._turn = (
            threading.Lock()
        )  # one step at a time: two merges of the same segments would write one file
        self._looked: set[str] = set()  # structures whose files are what was written
        self._dead: dict[
            int, tuple[int, int]
        ] = {}  # of a segment: up to which transaction its dead were counted, and how many

    def wake(self) -> None:
        """Look soon whether there is something to do."""
        if self._background and self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
            self._thread.start()
        self._work.set()

    def _run(self) -> None:
        # At the priority of every other thread: with a lower one it is put aside on a busy machine while it holds Python's lock, and
        # searches wait two to three times as long. What needs no lock for long, FAISS's building, is done `aside`.
        faults = 0
        while not self._stop.is_set():
            self._work.wait()
            self._work.clear()
            try:
                while not self._stop.is_set() and self.step():
                    pass
                faults = 0
                continue
            except Stopped:
                return
            except RetrievalError as fault:
                if self._stop.is_set():
                    return
                said = f"Segments could not be merged, and are left as they are: {fault}"
                log.warning("%s It is tried again in %g seconds.", said, pause_after(faults))
            except Exception:
                log.exception("Segments could not be merged, and are left as they are.")
            self._stop.wait(pause_after(faults))
            faults += 1
            self._work.set()  # whether somebody writes meanwhile or not

    def close(self) -> None:
        """Give up the step that runs, and end."""
        self._stop.set()
        self._work.set()
        if self._thread is not None:
            self._thread.join()

    def step(self) -> bool:
        """Do what is most needed; return whether there was anything."""
        with self._turn:
            return self._step()

    def _step(self) -> bool:
        self._writer.hold()  # which clears what nobody names, so before anything is written
        for generation in self._generations():
            if self._flush(generation):
                return True
        for generation in self._generations():
            parts = self._parts(generation)
            if chosen := _choose(parts):
                self._merge(generation, chosen, sum(part.alive for part in parts))
                return True
            if self._build(generation, parts):
                return True
        return False

    def _generations(self) -> tuple[Generation, ...]:
        with self._home.record.reading() as connection:
            return all_of(connection)

    def compact(self, report: Callable[[int, int], object]) -> None:
        """Make one segment of each generation's, without deleted items, and give the room back."""
        try:
            with self._turn:
                self._compact(report)
        except Stopped:
            raise StoreError(f"The index {self._home.folder} was closed. Open it again.") from None

    def _compact(self, report: Callable[[int, int], object]) -> None:
        self._writer.hold()
        for generation in self._generations():
            self._flush(generation, least=1)
            parts = self._parts(generation)
            total = sum(part.alive for part in parts)
            if len(parts) > 1 or any(part.dead for part in parts):
                done = 0

                def more(count: int, total: int = total) -> None:
                    nonlocal done
                    done += count
                    report(done, total)

                self._merge(generation, parts, total, more)
            self._build(generation, self._parts(generation))
        record = self._home.record
        with self._writer.turn, record.faults("written"):
            with record.connection() as connection:
                connection.execute("vacuum")
            record.checkpoint()

    def flush(self, generation: Generation) -> None:
        """Make a segment of all fresh items of a generation."""
        self._flush(generation, least=1)

    def _flush(self, generation: Generation, least: int | None = None) -> bool:
        """Make a segment of a generation's fresh items, where there are many."""
        width = 4 * sum(generation.widths.values())
        least = least or min(FLUSH_ROWS, max(1, FLUSH_BYTES // width))
        count = "select count(*) from (select 1 from fresh where g = ? limit ?)"
        with self._home.record.reading() as connection:
            if value(connection, count, (generation.number, least)) < least:
                return False
        with self._writer.turn, self._writer.transaction(segments=True) as (connection, _):
            names = [name for name in ARRAYS if name in generation.widths]
            rows = ask(connection, f"select n, {', '.join(names)} from fresh where g = ? order by n", (generation.number,))  # fmt: skip
            if not rows:  # deleted meanwhile, or somebody else was faster
                return False
            numbers = np.array([row[0] for row in rows], np.int64)
            arrays: dict[str, list[Floats]] = {
                name: [np.frombuffer(b"".join(row[at] for row in rows), "<f4").reshape(len(rows), -1)]
                for at, name in enumerate(names, 1)
            }
            self._writer.add_segment(connection, generation, numbers, arrays)
            connection.execute("delete from fresh where g = ?", (generation.number,))
        self._home.renew()
        return True

    def _parts(self, generation: Generation) -> list[_Part]:
        with self._home.record.reading() as connection:
            rows = ask(
                connection,
                "select s, file, sum, count, structure from segments where g = ? order by s",
                (generation.number,),
            )
            seq = int(value(connection, "select value from state where key = 'seq'"))
            counted = [self._dead.get(row[0], (-1, 0)) for row in rows]
            sql = "select n, seq from removed where seq > ? order by n"
            removed = np.array(ask(connection, sql, (min(counted, default=(seq, 0))[0],)), np.int64).reshape(
                -1, 2
            )
        parts = []
        for (number, file, sum_, count, structure), (since, dead) in zip(rows, counted, strict=True):
            segment = self._segment(file, sum_)
            dead += len(positions(segment.numbers, removed[removed[:, 1] > since, 0]))
            self._dead[number] = seq, dead
            parts.append(_Part(number, count, dead, file, structure, segment))
        return parts

    def _segment(self, file: str, sum_: str) -> Segment:
        view: View | None = self._home.view
        for piece in view.pieces if view else ():
            if piece.segment.path.name == file:
                return piece.segment
        path = self._home.folder / SEGMENTS / file
        try:
            return Segment(path, sum_)
        except FileNotFoundError:
            raise damaged(path, StoreError("is missing")) from None
        except StoreError as fault:
            raise damaged(path, fault) from None

    def _merge(
        self,
        generation: Generation,
        parts: Sequence[_Part],
        total: int,
        report: Callable[[int], object] = lambda count: None,
    ) -> None:
        """Make one segment of several. Items that are deleted meanwhile stay masked in it."""
        for part in parts:
            verify_anew(part.segment, features=True)
        with self._home.record.reading() as connection:
            removed = np.array([n for (n,) in ask(connection, "select n from removed order by n")], np.int64)
        held = [part.segment for part in parts]
        alive = [~np.isin(segment.numbers, removed) for segment in held]
        numbers = np.concatenate([segment.numbers[keep] for segment, keep in zip(held, alive, strict=True)])
        order = None if bool((np.diff(numbers) > 0).all()) else np.argsort(numbers, kind="stable")
        file = file_name(generation, "merged")
        path = self._home.folder / SEGMENTS / file
        sum_, structure = None, None
        if len(numbers):
            arrays = {
                name: Rows([segment.arrays[name] for segment in held], alive, order, self._stop)
                for name in generation.widths
            }
            try:
                with self._home.record.faults("written"):
                    sum_ = write_segment(path, numbers if order is None else numbers[order], arrays)
                written = Segment(path, sum_)
                structure = self._structure(written, generation, total, report)
                self._home.ready.wrote(file, written)
                row = Row(0, file, sum_, len(numbers), None if structure is None else structure.text())
                self._load(row, written, generation)
            except BaseException:  # each try has a file of its own: on a full disk they would be ever more
                self._home.ready.forget([file])
                remove_files(self._home.folder, [one.name for one in path.parent.glob(f"{path.stem}.*")])
                raise
        files = [name for part in parts for name in files_of(part.file, part.structure)]
        with self._writer.turn, self._writer.transaction(segments=True) as (connection, _):
            text = json.dumps([part.number for part in parts])
            sql = "select count(*) from segments where s in (select value from json_each(?))"
            if value(connection, sql, (text,)) != len(parts):  # the generation was dropped meanwhile
                remove_files(
                    self._home.folder, files_of(file, None if structure is None else structure.text())
                )
                return
            connection.execute("delete from segments where s in (select value from json_each(?))", (text,))
            if sum_ is not None:
                connection.execute(
                    "insert into segments (g, file, sum, count, structure) values (?,?,?,?,?)",
                    (generation.number, file, sum_, len(numbers), structure and structure.text()),
                )
            left = ask(connection, "select file, sum from segments")
            forget(connection, removed, [self._segment(*one) for one in left])
        self.merges += 1
        for part in parts:
            self._dead.pop(part.number, None)
        self._home.renew()
        remove_files(self._home.folder, files)
        self._home.ready.forget(files)

    @property
    def _beside(self) -> bool:
        """Whether somebody may be searching while this works: not where a command was told to do it and does nothing else."""
        return threading.current_thread() is self._thread or self._home.view is not None

    def _load(self, row: Row, segment: Segment, generation: Generation) -> None:
        """Load what was written, where somebody searches: no search has to wait for that."""
        if self._home.view is not None and generation.state == "served":
            self._home.ready.wrote_structure(row, segment, generation)

    def _structure(
        self, segment: Segment, generation: Generation, total: int, report: Callable[[int], object]
    ) -> Structure | None:
        vectors = segment.arrays[VECTOR]
        widest = max(stop - start for start, stop in generation.spans)
        wanted = self._home.structure().of(len(vectors), total, widest, len(generation.spans))
        if wanted is None:
            return None

        def shown(count: int) -> None:
            if self._stop.is_set():
                raise Stopped
            report(count)

        run = aside if self._beside else lambda work: work()
        with self._home.record.faults("written"):
            return build_structure(
                segment.path, vectors, generation.spans, *wanted, self._home.make, shown, run
            )

    def _build(self, generation: Generation, parts: Sequence[_Part]) -> bool:
        """Build the structure of a segment that has not the one that is wanted, or whose files are not what was written."""
        total = sum(part.alive for part in parts)
        widest = max(stop - start for start, stop in generation.spans)
        wanted = self._home.structure()
        for part in parts:
            said = Structure.parse(part.structure)
            want = wanted.of(part.count, total, widest, len(generation.spans))
            if (said and (said.backend, said.options)) == want and (said is None or self._sound(said)):
                continue
            if want is None and wanted.backend == "auto":
                continue  # it was large, and is searched well
            verify_anew(part.segment)
            made = (
                None if want is None else self._structure(part.segment, generation, total, lambda count: None)
            )
            row = Row(
                part.number,
                part.file,
                part.segment.head_sum,
                part.count,
                None if made is None else made.text(),
            )
            self._load(row, part.segment, generation)
            with self._writer.turn, self._writer.transaction(segments=True) as (connection, _):
                connection.execute(
                    "update segments set structure = ? where s = ?", (made and made.text(), part.number)
                )
                there = connection.changes() > 0  # the generation may have been dropped meanwhile
            old = {name for name, _ in said.files} if said else set()
            new = {name for name, _ in made.files} if made else set()
            self._home.renew()
            remove_files(self._home.folder, old - new if there else new)
            return True
        return False

    def _sound(self, said: Structure) -> bool:
        """Whether a structure's files are what was written; looked at once, since reading them takes long."""
        key = said.text()
        if key not in self._looked:
            folder = self._home.folder / SEGMENTS
            if any(not is_whole(folder / name, sum_) for name, sum_ in said.files):
                return False
            self._looked.add(key)
        return True


def pause_after(faults: int) -> float:
    """Return how many seconds pass before what has failed is tried again, after so many faults before it."""
    return float(min(_LONGEST, _PAUSE * 2 ** min(faults, 30)))


def _choose(parts: Sequence[_Part]) -> list[_Part]:
    """Return which segments are to become one: `_FAN` of about one size, smallest first, or one with many deleted items."""
    sizes: dict[int, list[_Part]] = {}
    for part in parts:
        sizes.setdefault(
            int(np.log(max(1, part.alive) / FLUSH_ROWS) // np.log(_FAN)) if part.alive > FLUSH_ROWS else 0, []
        ).append(part)
    for size in sorted(sizes):
        if len(sizes[size]) >= _FAN:
            return [part for smaller in sorted(sizes) if smaller <= size for part in sizes[smaller]]
    return next(([part] for part in parts if part.dead > _DEAD * part.count), [])
