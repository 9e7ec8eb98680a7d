"""Errors whose messages tell the user what is wrong, where, and what to do.

The command line prints them without a traceback and exits with code 2.
"""

from __future__ import annotations

import difflib
import json
import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn


class RetrievalError(Exception):
    """Base class of all errors that this package raises on purpose.

    Attributes:
        exit_code: exit code of the command line.
    """

    exit_code = 2


class PluginError(RetrievalError):
    """A plugin clashes with another, cannot be imported, or breaks a contract of hooks or parts."""


class RecipeError(RetrievalError):
    """A recipe is invalid; the error holds all problems, not only the first.

    Args:
        problems: one sentence per problem; a string is a single problem.
        where: path of the recipe if it came from a file.
    """

    def __init__(self, problems: str | Iterable[str], where: str | None = None) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.where = where
        head = f"{where or 'The recipe'} has {quantity(len(self.problems), 'problem')}:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))


class DataError(RetrievalError):
    """Items, labels, images or splits cannot be used as they are."""


class BelowTarget(RetrievalError):
    """A metric is below the smallest value that the user accepts."""

    exit_code = 1


class Diverged(DataError):
    """The loss or the weights became NaN or infinite; the last good checkpoint is kept."""


class Interrupted(RetrievalError):
    """Training was interrupted; it can resume from the last checkpoint.

    Attributes:
        begun: whether there is a run to resume. A run that `replace` has not replaced yet is none.
    """

    exit_code = 130
    begun = True


class BundleError(RetrievalError):
    """A bundle is missing, altered, incomplete or of another format, or an export failed."""


class StoreError(RetrievalError):
    """An index folder is missing, altered or damaged, or cannot be written."""


class MissingDependency(RetrievalError):
    """A required package is not installed, or two installed packages conflict."""


@contextmanager
def needing(problem: str, extra: str) -> Iterator[None]:
    """Context manager for the import of an optional package.

    Args:
        problem: what is wrong without the package, such as "Parquet tables need pyarrow".
        extra: the extra of this package that installs it.

    Raises:
        MissingDependency: the package cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        raise MissingDependency(
            f"{problem}. Install it: pip install 'embedding-retrieval[{extra}]'"
        ) from error


class ServerError(RetrievalError):
    """A search server refused a request, failed, or could not be reached; or a storage of photos.

    Args:
        sentence: the error message, including the server's.
        status: HTTP status code; `None` if there was no response.
        request_id: identifies the request in the server's log.
        detail: the server's message alone.
    """

    def __init__(
        self,
        sentence: str,
        status: int | None = None,
        request_id: str | None = None,
        detail: str | None = None,
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.request_id = request_id
        self.detail = detail


def printable(text: str) -> str:
    """Escape the non-printable characters of untrusted text, except line breaks and tabs.

    On a terminal, control characters could move the cursor or type for the user, and direction
    marks could reorder text.
    """

    def shown(c: str) -> str:
        if c.isprintable() or c in "\n\t":
            return c
        if ord(c) < 256:
            return f"\\x{ord(c):02x}"
        return f"\\u{ord(c):04x}"

    return "".join(map(shown, text))


def one_line(text: str) -> str:
    """Escape all non-printable characters of untrusted text, also line breaks and tabs."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def first_line(error: Exception) -> str:
    """Return the first line of another library's error, or its type, without a period."""
    message = str(error).strip() or type(error).__name__
    return message.split("\n")[0].rstrip(".")


def valid_text(text: str) -> str:
    """Return text that can be encoded; bytes of a file name that are not UTF-8 are escaped."""
    if text.isascii():
        return text
    text = re.sub("[\udc80-\udcff]", lambda byte: f"\\x{ord(byte[0]) - 0xDC00:02x}", text)
    return text.encode("utf-8", "backslashreplace").decode()


def printable_json(value: object, **format: Any) -> str:
    """Return JSON with the non-printable characters of untrusted text escaped; see `printable`."""

    def escaped(match: re.Match[str]) -> str:
        if match[0].isprintable():
            return match[0]
        return json.dumps(match[0])[1:-1].replace("\x7f", "\\u007f")  # JSON does not escape DEL

    return re.sub(r"[^\n -~]", escaped, json.dumps(value, ensure_ascii=False, **format))


def quantity(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 item`, `1,000 items`; `plural` adds an s by default."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(
    what: str,
    problems: Sequence[str],
    shown: int = 10,
) -> str:
    """Return a single problem as one sentence, or several as a list of the first `shown`.

    Args:
        what: subject of the problems, such as "manifest.csv".
        problems: one sentence per problem.
        shown: how many problems to list.
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


def refuse(where: str, problems: Iterable[str]) -> NoReturn:
    """Raise a `DataError` on `where`, such as "manifest.csv", that lists the first ten problems."""
    raise DataError(listed(where, list(problems)))


def some(names: Sequence[object], shown: int = 5) -> str:
    """Return the first names; if there are more, also their number: `a, b, … (12 in all)`."""
    text = ", ".join(str(name) for name in names[:shown])
    return text + (f", … ({len(names):,} in all)" if len(names) > shown else "")


_SYNONYMS = {"gpu": "cuda"}
"""Words that users write, and the known words that they mean."""


def at_least_one(what: str, value: object) -> int:
    """Return a count as an int; `what` names it in the error message.

    Raises:
        DataError: the value is not a whole number, or is below 1.
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

    For `PLUGIN.NAME`, names of the same plugin come first, then those of other plugins.
    """
    known = list(known)
    if _SYNONYMS.get(word.lower()) in known:
        return f" Did you mean '{_SYNONYMS[word.lower()]}'?"
    plugin, dot, name = word.rpartition(".")
    same = {k.rpartition(".")[2].lower(): k for k in known if dot and k.startswith(f"{plugin}.")}
    other = {k.lower(): k for k in known if k not in same.values()}
    close = (
        [same[k] for k in difflib.get_close_matches(name.lower(), same, n=1)]
        or [k for k in other.values() if k.rpartition(".")[2] == name]
        or [other[k] for k in difflib.get_close_matches(word.lower(), other, n=1)]
    )
    if close:
        return f" Did you mean '{close[0]}'?"
    return ""
