"""Triplets from a click log: what was chosen is like the query, what was shown and passed over is
not.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import TextIO

from retrieval.errors import DataError

from retrieval_oahu.closure import Triplet

COLUMNS = ("query", "shown", "chosen", "time")


class ClickLog:
    """A CSV file with one search per line, read as a stream and never held: query, shown, chosen,
    time.

    `shown` and `chosen` are ids with `|` between them, `time` is ISO 8601 or seconds. Each chosen
    item with each one that was shown and not chosen gives a triplet (query, chosen, not chosen), in
    the order of the file.

    Args:
        path: the file, UTF-8, with a header.
        ids: which row of the features each id is.
        follow: whether to wait for more at the end of the file, as a server goes on writing it:
            then the stream never ends.
        poll: seconds between two looks.

    Attributes:
        lines: how many searches were read.
        unknown: ids that `ids` does not have; each is left out.
        unusable: searches that gave no triplet: no choice, nothing passed over, or the query itself
            was chosen.
        late: searches that lie before the one above them in time.
        malformed: lines that were left out because a column is missing or the time is none.
    """

    def __init__(
        self, path: str | Path, ids: Mapping[str, int], *, follow: bool = False, poll: float = 1.0
    ) -> None:
        self.path, self.ids, self.follow, self.poll = Path(path), ids, follow, poll
        self.lines = self.unknown = self.unusable = self.late = self.malformed = 0

    def __iter__(self) -> Iterator[Triplet]:
        """Return the triplets, from the file's first line.

        Raises:
            DataError: the file cannot be read, or lacks a column.
        """
        try:
            with self.path.open(encoding="utf-8", newline="") as file:
                yield from self._read(file)
        except (OSError, UnicodeDecodeError, csv.Error) as fault:
            reason = getattr(fault, "strerror", None) or str(fault)
            raise DataError(f"{self.path} cannot be read as a click log: {reason}.") from fault

    def _read(self, file: TextIO) -> Iterator[Triplet]:
        header = [name.strip() for name in next(csv.reader([next(self._text(file), "")]), [])]
        missing = [name for name in COLUMNS if name not in header]
        if missing:
            raise DataError(
                f"{self.path} has no column {', '.join(missing)}; a click log has"
                f" {', '.join(COLUMNS)}."
            )
        places = [header.index(name) for name in COLUMNS]
        before = -math.inf
        for row in csv.reader(self._text(file)):
            if not row:
                continue
            when = _seconds(row[places[3]]) if len(row) == len(header) else None
            if when is None:
                self.malformed += 1
                continue
            self.lines += 1
            self.late += when < before
            before = max(before, when)
            yield from self._triplets(*(row[place] for place in places[:3]))

    def _triplets(self, query: str, shown: str, chosen: str) -> Iterator[Triplet]:
        picked, seen = self._rows(chosen), self._rows(shown)
        asked = self._rows(query)
        passed = [row for row in seen if row not in picked and row not in asked]
        picked = [row for row in picked if row not in asked]
        if not (asked and picked and passed):
            self.unusable += 1
            return
        for positive in picked:
            for negative in passed:
                yield Triplet(asked[0], positive, negative)

    def _rows(self, text: str) -> list[int]:
        """Return the rows of ids, each once; unknown ones are counted."""
        found: dict[int, None] = {}
        for name in filter(None, map(str.strip, text.split("|"))):
            row = self.ids.get(name)
            if row is None:
                self.unknown += 1
            else:
                found[row] = None
        return list(found)

    def _text(self, file: TextIO) -> Iterator[str]:
        """Return whole lines; with `follow` wait for more, and for the end of a line that is being
        written.
        """
        part = ""
        while True:
            line = file.readline()
            part += line
            if part.endswith("\n"):
                yield part
                part = ""
            elif not line:
                if not self.follow:
                    if part:
                        yield part
                    return
                time.sleep(self.poll)


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        try:
            return datetime.fromisoformat(text.strip()).timestamp()
        except ValueError:
            return None
    return value if math.isfinite(value) else None
