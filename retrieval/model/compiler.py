"""torch's compiler, not loaded where nothing is compiled: its optimisers load it to say that they
are not, which takes as long as torch itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from retrieval.host.lazy import kept_out

_kept_out = False


def keep_compiler_out() -> None:
    """From now on keep it out wherever `optimizing`, until somebody loads it.

    For a process of our own: a user's may compile in another thread.
    """
    global _kept_out
    _kept_out = True


def load_compiler() -> None:
    """Load it where something will be compiled, before the first optimiser is made: what is loaded
    is not kept out.
    """
    import torch._dynamo  # noqa: F401


@contextmanager
def optimizing() -> Iterator[None]:
    """Make optimisers and have them step inside, and nothing else.

    Where nothing is compiled there is no graph to break, and a function that is not to be compiled
    is that function.
    """
    if not _kept_out:
        yield
        return
    with kept_out("torch._dynamo", graph_break=lambda *_, **__: None, disable=_as_is):
        yield


def _as_is(function: Any, *_: object, **__: object) -> Any:
    return function
