"""The command that runs, to be typed once more."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Container


def this_command(*further: str, without: Container[str] = ()) -> str:
    """Return this process's command line as a shell takes it.

    Args:
        further: options to put at its end, where they are not in it.
        without: options to leave out.
    """
    words = [word for word in sys.argv[1:] if word not in without]
    return shlex.join(["retrieval", *words, *(word for word in further if word not in words)])
