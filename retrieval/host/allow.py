"""Permission to run the plugin files that come with a recipe or a run's folder.

A plugin is a program, so opening somebody's recipe could run their code with the user's rights. The
user allows such plugins with `--allow-plugins`, by an answer on a terminal, or with
RETRIEVAL_ALLOW_PLUGINS=1 in the environment, which child processes inherit. Installed plugins and
plugins passed with `--plugin` need no permission.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

from retrieval.errors import PluginError
from retrieval.host.importing import FilePlugin, is_file_plugin

ALLOW = "RETRIEVAL_ALLOW_PLUGINS"
_YES = "1"

Ask = Callable[[str], bool]
_ask: ContextVar[Ask | None] = ContextVar("ask", default=None)


@contextlib.contextmanager
def answering(ask: Ask | None, allowed: bool = False) -> Iterator[None]:
    """Context manager that sets who decides whether plugins may run.

    Args:
        ask: called with a sentence that names the files; returns whether the files may run.
            `None` refuses them.
        allowed: whether plugins may run without asking.
    """
    token = _ask.set(ask)
    setting = os.environ.get(ALLOW)
    if allowed:
        os.environ[ALLOW] = _YES
    try:
        yield
    finally:
        _ask.reset(token)
        if setting is None:
            os.environ.pop(ALLOW, None)
        else:
            os.environ[ALLOW] = setting


def require_allowed(items: Sequence[str], where: Path) -> None:
    """Raise a `PluginError` unless the user allows the plugin files that a recipe brings."""
    if os.environ.get(ALLOW) == _YES:
        return
    files = dict.fromkeys(file for item in items for file in _sources(item, where.parent))
    if not files:
        return
    plural = len(files) > 1
    brings = (
        f"{where} brings {'plugin files that run' if plural else 'a plugin file that runs'} with"
        f" your rights: {', '.join(map(str, files))}."
    )
    ask = _ask.get()
    if ask is None or not ask(brings):
        raise PluginError(
            f"{brings} Nothing was run. Read {'them' if plural else 'it'}, then repeat the command"
            f" with --allow-plugins (in Python with {ALLOW}=1 in the environment)."
        )
    # Ask once: the answer holds for the command's other recipes and its child processes.
    os.environ[ALLOW] = _YES


def _sources(item: str, recipe_folder: Path) -> list[Path]:
    """Return the files that loading a plugin runs, and a package's folder.

    A module counts only if it lies in the working folder or beside the recipe, not if it is
    installed.
    """
    if is_file_plugin(item):
        if not Path(item).exists():
            return []  # loading it reports the missing file
        return [file for file in FilePlugin.from_name(item).files.values() if file.suffix == ".py"]
    name = item.partition(".")[0]
    if name in sys.modules or not name.isidentifier():
        return []
    try:
        spec = importlib.util.find_spec(name)  # imports nothing, as the name has no dots
    except (ImportError, ValueError):
        return []
    if spec:
        places = [spec.origin, *(spec.submodule_search_locations or ())]
    else:
        places = []
    paths = [Path(place).resolve() for place in places if place and Path(place).exists()]
    local = [Path.cwd().resolve(), recipe_folder.resolve()]
    schemes = ("stdlib", "purelib", "platlib")
    installed = [Path(sysconfig.get_path(scheme)).resolve() for scheme in schemes]
    return [
        path
        for path in paths
        if any(map(path.is_relative_to, local)) and not any(map(path.is_relative_to, installed))
    ]
