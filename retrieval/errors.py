"""Errors that are sentences for the person who caused them: what is wrong, where, what to do.

The command line prints them without a traceback and leaves with exit code 2.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Sequence


class RetrievalError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        exit_code: what the command line leaves with.
    """

    exit_code = 2


class PluginError(RetrievalError):
    """A plugin clashes, cannot be imported, misspells a hook, or offers something that breaks its
    contract.
    """


class RecipeError(RetrievalError):
    """A recipe is wrong. Holds every problem found, not only the first.

    Args:
        problems: one sentence each.
        where: the recipe's path, when it came from a file.
    """

    def __init__(self, problems: Iterable[str], where: str | None = None) -> None:
        self.problems, self.where = tuple(problems), where
        head = (
            f"{where or 'The recipe'} has {len(self.problems)}"
            f" problem{'s' if len(self.problems) > 1 else ''}:"
        )
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))


class DataError(RetrievalError):
    """Items, labels, images or splits that cannot be used as they are."""


class Diverged(DataError):
    """The loss or weights became NaN or infinite; the last good checkpoint is kept."""


class Interrupted(RetrievalError):
    """Training was asked to stop; the last checkpoint holds everything."""

    exit_code = 130


class BundleError(RetrievalError):
    """A bundle that is missing, altered, incomplete or from another format version; or an export
    that failed.
    """


class StoreError(RetrievalError):
    """An index folder that is missing, altered or damaged, or cannot be written."""


class MissingDependency(RetrievalError):
    """A package that this call or command needs is not installed, or two that exclude each other
    are.
    """


class ServerError(RetrievalError):
    """A search server refused a request, failed, or could not be reached.

    Args:
        sentence: what happened, with the server's own sentence.
        status: of HTTP; None where there was no answer.
        request_id: by which the server's log knows the request.
        detail: the server's own sentence alone.
    """

    def __init__(
        self,
        sentence: str,
        status: int | None = None,
        request_id: str | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(sentence)
        self.status, self.request_id, self.detail = status, request_id, detail


def printable(text: str) -> str:
    """Return text from outside as a terminal may show it: control characters, which could move its
    cursor, change what it shows or answer for the user, and marks that turn the direction of
    writing, as their escapes; line breaks and tabs as they are.
    """
    return "".join(
        (
            c
            if c.isprintable() or c in "\n\t"
            else f"\\x{ord(c):02x}"
            if ord(c) < 256
            else f"\\u{ord(c):04x}"
        )
        for c in text
    )


def listed(what: str, problems: Sequence[str], shown: int = 10) -> str:
    """Return one sentence for one problem, or a list with the first ones in full.

    Args:
        what: what they are about, as the beginning of a sentence: "manifest.csv".
        problems: one sentence each.
        shown: how many are spelled out.
    """
    if len(problems) == 1:
        return f"{what}: {problems[0]}"
    lines = [
        f"{what} has {len(problems):,} problems:",
        *(f"  - {problem}" for problem in problems[:shown]),
    ]
    if len(problems) > shown:
        lines.append(f"  - … and {len(problems) - shown:,} more.")
    return "\n".join(lines)


_SAME = {"gpu": "cuda"}
"""Words that people use for another one."""


def at_least_one(what: str, value: object) -> int:
    """Return a count as an int.

    Raises:
        DataError: it is no whole number, or below 1.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(f"{what} must be a whole number, not {str(value)[:40]!r}.") from None
    if number < 1:
        raise DataError(f"{what} must be at least 1, not {number}.")
    return number


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the known word closest to `word`, or an empty string.

    Of `PLUGIN.NAME` the name is compared within the same plugin; else a name is looked for in the
    other plugins.
    """
    known = list(known)
    if _SAME.get(word.lower()) in known:
        return f" Did you mean '{_SAME[word.lower()]}'?"
    plugin, dot, name = word.rpartition(".")
    same, other = {}, {}
    for candidate in known:
        if dot and candidate.startswith(f"{plugin}."):
            same[candidate.rpartition(".")[2].lower()] = candidate
        else:
            other[candidate.lower()] = candidate
    close = [same[k] for k in difflib.get_close_matches(name.lower(), same, n=1)]
    close = (
        close
        or [candidate for candidate in other.values() if candidate.rpartition(".")[2] == name][:1]
    )
    close = close or [other[k] for k in difflib.get_close_matches(word.lower(), other, n=1)]
    return f" Did you mean '{close[0]}'?" if close else ""
