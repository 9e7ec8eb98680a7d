"""The main script, which each process that multiprocessing spawns imports again."""

from __future__ import annotations

import ast
import multiprocessing
import sys
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
        DataError: the script has no guard, or came from standard input.
    """
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
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
        statements = ast.parse(Path(file).read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # not a script, such as an archive
        return
    tests = [statement.test for statement in statements if isinstance(statement, ast.If)]
    if not any("'__name__'" in ast.dump(test) for test in tests):
        raise DataError(f"{file} has no `{GUARD}`. {WHY} {remedy}")
