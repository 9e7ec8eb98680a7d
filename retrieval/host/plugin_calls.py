"""Whatever a plugin's part raises becomes one sentence, which names the part and the place.

Needs no torch: serving uses it too.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from retrieval.errors import DataError, PluginError, RetrievalError

LONGEST_REASON = 300
"""Characters of a foreign error's text that a sentence repeats."""
SMALLER_BATCH = "Make it smaller, or the batch: [sampler] classes × items, [evaluate] batch."
"""What helps training where memory runs out."""


@contextlib.contextmanager
def calling(what: str, smaller: str = SMALLER_BATCH) -> Iterator[None]:
    """Turn whatever a plugin raises inside into one sentence.

    Args:
        what: who is called, as a sentence begins: "The loss acme.margin".
        smaller: what to do where it runs out of memory.

    Raises:
        PluginError: the plugin raised anything but an error of this package.
        DataError: the plugin ran out of memory.
    """
    try:
        yield
    except (RetrievalError, OSError, ImportError):
        raise  # sentences already, and what the command line has a sentence for
    except Exception as error:
        if _is_out_of_memory(error):
            raise DataError(f"{what} ran out of memory. {smaller}") from error
        raise PluginError(
            f"{failure(what, error)}. The traceback: retrieval --debug …, or __cause__ in Python."
        ) from error


def failure(what: str, error: Exception) -> str:
    """Return who failed, how and where in the plugin: "The loss acme.margin failed: …"."""
    reason = " ".join(str(error).split())[:LONGEST_REASON].rstrip(".")
    if isinstance(error, NotImplementedError) and "forward" in reason:
        reason = "it defines no forward"
    kind = type(error).__name__
    return f"{what} failed: {f'{kind}: {reason}' if reason else kind}{_place(error)}"


def _is_out_of_memory(error: Exception) -> bool:
    if (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    ):  # torch's, on a GPU
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)  # torch's, on a CPU


def _place(error: BaseException) -> str:
    """Where in the plugin it happened: the last frame that is neither ours nor a library's."""
    package = str(Path(__file__).parents[1])
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename
        and not frame.filename.startswith(("<", package))
        and "/lib/python" not in frame.filename
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
