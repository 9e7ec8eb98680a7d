"""Turn an error that a plugin's part raises into one sentence that names the part and the line.

This module does not import torch, because serving uses it too.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from retrieval.errors import DataError, PluginError, RetrievalError

LONGEST_REASON = 300
"""Largest number of characters quoted from a plugin's error."""
SMALLER_BATCH = (
    "Make it smaller, or shrink the batch: [sampler] classes × items, [evaluate] batch_size."
)
"""Advice after a sentence such as "The loss acme.margin ran out of memory."."""


@contextlib.contextmanager
def calling(
    what: str, smaller: str = SMALLER_BATCH, hint: Callable[[], str] = str
) -> Iterator[None]:
    """Context manager that turns an error of a plugin's part into one sentence.

    A RetrievalError, OSError or ImportError passes unchanged.

    Args:
        what: the part, as the beginning of a sentence: "The loss acme.margin".
        smaller: advice if the part runs out of memory.
        hint: returns a further sentence of the message, with a space before it, or "".
    """
    try:
        yield
    except (RetrievalError, OSError, ImportError):
        raise  # the command line has a message for these
    except Exception as error:
        if _is_out_of_memory(error):
            raise DataError(f"{what} ran out of memory. {smaller}") from error
        raise PluginError(
            f"{failure(what, error)}.{hint()} For the traceback, run retrieval --debug … or, in"
            " Python, see __cause__."
        ) from error


def failure(what: str, error: Exception) -> str:
    """Return which part failed, why and where: "The loss acme.margin failed: …"."""
    reason = " ".join(str(error).split())[:LONGEST_REASON].rstrip(".")
    if isinstance(error, NotImplementedError) and "forward" in reason:
        reason = "it defines no forward"
    kind = type(error).__name__
    return f"{what} failed: {f'{kind}: {reason}' if reason else kind}{_place(error)}"


def _is_out_of_memory(error: Exception) -> bool:
    # torch raises OutOfMemoryError on a GPU, and a RuntimeError on a CPU.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def _place(error: BaseException) -> str:
    """Return file and line of the last frame outside this package and installed libraries."""
    package = f"{Path(__file__).parents[1]}{os.sep}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and not frame.filename.startswith(("<", package))
        and "/lib/python" not in frame.filename
    ]
    if frames:
        return f" ({frames[-1].filename}, line {frames[-1].lineno})"
    return ""
