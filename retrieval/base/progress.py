"""Progress of long operations: a bar on a terminal and in a notebook, elsewhere log lines."""

from __future__ import annotations

import functools
import inspect
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeAlias, TypeVar, cast

from retrieval.errors import printable

Progress: TypeAlias = bool | Callable[[str, int, int], None]
"""Argument `progress`: True shows a bar or log lines, False shows neither.

A function is called instead, with (what, done, total): the name of the work, the number of units
done, and the number of all units.
"""

P = ParamSpec("P")
R = TypeVar("R")

_progress: ContextVar[Progress] = ContextVar("progress", default=True)

REPORT_SECONDS = 10.0
"""Seconds between two log lines; work that takes less time logs nothing."""
_DELAY = 0.5  # seconds before a bar appears, so that an immediate error has no bar above it


@contextmanager
def showing(progress: Progress) -> Iterator[None]:
    """Context manager that applies `progress` to every `Meter` created inside.

    If an outer `showing` has False or a function, an inner one can only set False.
    """
    outer = _progress.get()
    token = _progress.set(progress if outer is True or progress is False else outer)
    try:
        yield
    finally:
        _progress.reset(token)


def shows_progress(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator that applies a function's argument `progress` to every `Meter` in it."""
    default = inspect.signature(function).parameters["progress"].default

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        with showing(cast(Progress, named.get("progress", default))):
            return function(*arguments, **named)

    return call


class Meter:
    """Counts the progress of some work; shows it on standard error unless `showing` changes that.

    Args:
        what: name of the work, such as "encoding".
        total: number of units of the work.
        unit: name of the units in the plural, such as "images".
        done: number of units that an interrupted run has done already.
        show: whether to show anything.
    """

    def __init__(
        self, what: str, total: int, unit: str, *, done: int = 0, show: bool = True
    ) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._before = self._done = done
        self._began = self._last_line = time.monotonic()
        self._bar: Any = None
        if show:
            shows = _progress.get()
        else:
            shows = False
        self._tell = shows if callable(shows) else None
        self._shows = shows is True
        self._lines = self._shows and not (_is_terminal() or _in_notebook())
        if self._shows and not self._lines:
            self._bar = _bar_class()(
                desc=what,
                total=total,
                initial=done,
                unit=f" {unit}",
                delay=_DELAY,
                leave=False,
                file=sys.stderr,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, count: int = 1, **metrics: str) -> None:
        """Add to the number of units done.

        Args:
            count: number of further units.
            metrics: further values to show, by name.
        """
        self._done += count
        if self._tell is not None:
            self._tell(self._what, self._done, self._total)
        elif self._bar is not None:
            if metrics:
                self._bar.set_postfix(metrics, refresh=False)
            self._bar.update(count)
        elif self._lines and time.monotonic() - self._last_line >= REPORT_SECONDS:
            from tqdm import tqdm

            self._last_line = time.monotonic()
            line = tqdm.format_meter(
                self._done,
                self._total,
                self._last_line - self._began,
                prefix=self._what,
                unit=f" {self._unit}",
                initial=self._before,
                postfix=", ".join(f"{name} {value}" for name, value in metrics.items()),
                bar_format="{desc}: {n_fmt} of {total_fmt}{unit} ({percentage:.0f} %),"
                " {rate_noinv_fmt}, {remaining} left{postfix}",
            )
            print(line, file=sys.stderr, flush=True)

    def reach(self, done: int, total: int, what: str) -> None:
        """Set the progress to `done` of `total`, and the name of the work."""
        self._what = what
        self._total = total
        if self._bar is not None:
            self._bar.total = total
            if (widgets := getattr(self._bar, "container", None)) is not None:
                widgets.children[1].max = total
            self._bar.set_description(what, refresh=False)
        self.update(done - self._done)

    def say(self, line: str) -> None:
        """With `progress=True`, write a permanent line, above the bar if there is one.

        Control characters are escaped, because the line may contain untrusted names.
        """
        if not self._shows:
            return
        line = printable(line)
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _in_notebook() -> bool:
    """Return whether this is a Jupyter kernel, whose standard error is no terminal."""
    if (module := sys.modules.get("IPython")) is None:
        return False
    shell = module.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _bar_class() -> Any:
    """Return tqdm's bar: a widget in a notebook with ipywidgets, else text."""
    if not _in_notebook():
        from tqdm import tqdm

        return tqdm
    with warnings.catch_warnings():
        # The warning would be tqdm's advice to install ipywidgets.
        warnings.simplefilter("ignore")
        from tqdm.auto import tqdm as notebook_tqdm
    return notebook_tqdm
