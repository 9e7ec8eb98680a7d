"""The main script, which each process that multiprocessing spawns imports again."""

from __future__ import annotations

import ast
import multiprocessing
import sys
import traceback
from pathlib import Path

from retrieval.errors import DataError

GUARD = 'if __name__ == "__main__":'
WHY = f"Each new process imports the main script, so put the script's calls below `{GUARD}`."


def exit_if_imported() -> None:
    """End a spawned process whose main script trains again while it is imported."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(WHY)


def refuse_unguarded() -> None:
    """Refuse to spawn processes that would run the main script again.

    Raises:
        DataError: the call is not below the script's guard, or the script came from standard input.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    spec = getattr(main, "__spec__", None)
    # Spawned processes import neither a notebook nor a package's `__main__`.
    if file is None or (spec is not None and spec.name.endswith("__main__")):
        return
    remedy = "Or use no further processes: workers = 0 in [train], workers=1 in a comparison."
    if file == "<stdin>":
        raise DataError(
            "A script from standard input cannot start further processes, which import the main"
            f" script. Save it to a file, with its calls below `{GUARD}`. {remedy}"
        )
    try:
        nodes = [*ast.walk(ast.parse(Path(file).read_bytes()))]
    except (OSError, SyntaxError, ValueError):  # not a script, such as an archive
        return
    guards = [n for n in nodes if isinstance(n, ast.If) and "'__name__'" in ast.dump(n.test)]
    # The lines at which the script's code waits for this call, in any thread.
    lines = [
        line
        for bottom in sys._current_frames().values()
        for frame, line in traceback.walk_stack(bottom)
        if frame.f_globals is vars(main)
    ]
    bodies = [range(guard.body[0].lineno, (guard.body[-1].end_lineno or 0) + 1) for guard in guards]
    if lines and not any(line in body for line in lines for body in bodies):
        if guards:
            fault = "calls this outside"
        else:
            fault = "has no"
        raise DataError(f"{file} {fault} `{GUARD}`. {WHY} {remedy}")
