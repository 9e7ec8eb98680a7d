"""Files of TREC: runs, which rank the hits of queries, and qrels, which grade what is relevant.

A line of a run is "QUERY Q0 ID RANK SCORE TAG", a line of qrels "QUERY 0 ID GRADE". Spaces separate
the words, so spaces and % in a name or id are percent-encoded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from retrieval.base.folder_kinds import StrPath
from retrieval.errors import DataError, refuse

Qrels = Mapping[str, Mapping[str, float]]
"""Grade by id, by the name of the query. A grade of 0 or less means: not relevant."""

Rankings = Mapping[str, Sequence[str]]
"""Ids of hits, best first, by the name of the query."""


def read_qrels(path: Path) -> dict[str, dict[str, float]]:
    """Return the grades in a file of qrels; an error lists the faults of all lines."""
    qrels: dict[str, dict[str, float]] = {}

    def add(words: list[str]) -> None:
        name, _, id, text = words
        grade = number_of(text)
        grades = qrels.setdefault(unquote(name), {})
        if grades.setdefault(unquote(id), grade) != grade:
            raise ValueError(f"{unquote(id)} has another grade before")

    _read_words(path, "QUERY 0 ID GRADE", add)
    return qrels


def read_run(path: Path) -> dict[str, list[str]]:
    """Return the ids of the hits of each query; an error lists the faults of all lines.

    As in `trec_eval`, the scores in single precision order the hits, and the larger id comes first
    in a tie.
    """
    hits: dict[str, dict[str, tuple[float, str]]] = {}

    def add(words: list[str]) -> None:
        name, _, id, _, score, _ = words
        scores = hits.setdefault(unquote(name), {})
        if unquote(id) in scores:
            raise ValueError(f"{unquote(id)} is a hit of this query before")
        scores[unquote(id)] = (float(np.float32(number_of(score))), id)

    _read_words(path, "QUERY Q0 ID RANK SCORE TAG", add)
    return {
        name: sorted(scores, key=scores.__getitem__, reverse=True) for name, scores in hits.items()
    }


def qrels_text(qrels: Qrels) -> str:
    """Return the text of a file of qrels."""
    return "".join(
        f"{_word(name)} 0 {_word(id)} {grade:g}\n"
        for name, grades in qrels.items()
        for id, grade in grades.items()
    )


def run_text(rankings: Rankings) -> str:
    """Return the text of a run.

    The scores count down from the number of hits, not distances: tools sort by the score in single
    precision, where near distances may be equal.
    """
    return "".join(
        f"{_word(name)} Q0 {_word(id)} {rank} {len(ids) - rank + 1} retrieval\n"
        for name, ids in rankings.items()
        for rank, id in enumerate(ids, 1)
    )


def number_of(value: Any) -> float:
    """Return a finite number; raise a ValueError for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def lines_of(path: StrPath) -> list[bytes]:
    """Return the lines of a file."""
    try:
        return Path(path).read_bytes().splitlines()
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror or fault}.") from None


def _read_words(path: Path, form: str, add: Callable[[list[str]], None]) -> None:
    """Pass the words of each line to `add`, which raises a ValueError if they are invalid."""
    faults = []
    for number, line in enumerate(lines_of(path), 1):
        words = line.decode("utf-8", "replace").split()
        try:
            if len(words) == len(form.split()):
                add(words)
            elif words:
                raise ValueError(f"not {form}")
        except ValueError as fault:
            faults.append(f"line {number}: {fault}.")
    if faults:
        refuse(str(path), faults)


def _word(text: str) -> str:
    """Return text without spaces; `unquote` gives it back."""
    return re.sub(r"[\s%]", lambda character: quote(character[0]), text)
