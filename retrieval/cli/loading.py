"""Loading what a command needs, without looking through it for garbage meanwhile."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Import inside; what is there at the end stays, and no collection looks through it again.

    torch and its like make a million objects that live as long as the process, and Python would
    look through all of them several times on the way: a sixth of what `retrieval check` costs. For
    commands only, and only where torch is not there yet: a user's own process has garbage of its
    own.
    """
    if not gc.isenabled() or "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        # what is still frozen when Python ends, some libraries (nanobind's) report as leaked
        atexit.register(gc.unfreeze)
