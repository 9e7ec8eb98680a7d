"""The command that runs, to be typed once more."""

from __future__ import annotations

import shlex
import sys


def this_command(*further: str) -> str:
    """Return this process's command line as a shell takes it.

    Args:
        further: options to put at its end, where they are not in it.
    """
    words = sys.argv[1:]
    return shlex.join(["retrieval", *words, *(word for word in further if word not in words)])
