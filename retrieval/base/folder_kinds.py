"""Recognise runs, bundles and indexes, and write errors about the wrong kind of folder."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Literal, TypeAlias

StrPath: TypeAlias = str | os.PathLike[str]
"""A path as text or as a `pathlib.Path`; every public function accepts both."""

Kind = Literal["run", "bundle", "index"]

_MARKER_FILES: dict[Kind, str] = {
    "index": "index.json",
    "run": "recipe.toml",
    "bundle": "manifest.json",
}
_ADVICE = {
    "run": "Name a folder that training wrote.",
    "bundle": "Create one with 'retrieval export' (in Python run.export()).",
    "index": "Create one with 'retrieval index create' (in Python retrieval.Index.create).",
}
"""How to get a folder of each kind."""
_INSTEAD = {
    ("run", "bundle"): "Create its bundle with: retrieval export {0} (in Python run.export())",
    ("run", "index"): (
        "Create its bundle with 'retrieval export {0}', then create an index with that bundle."
    ),
    ("bundle", "index"): (
        "Create an index with: retrieval index create NAME IMAGES --bundle {0} (in Python"
        " retrieval.Index.create)"
    ),
    ("bundle", "run"): "Name the run that it was exported from.",
    ("index", "bundle"): "The bundles that embedded its items lie in {0}/bundles.",
    ("index", "run"): "Name the run that its bundle was exported from.",
}
"""How to get a folder of the second kind from the folder {0}, which is of the first kind."""


def kind_of(path: Path) -> Kind | None:
    """Return the kind of a folder by the file that marks it, or `None`."""
    return next((kind for kind, mark in _MARKER_FILES.items() if (path / mark).is_file()), None)


def instead(path: Path, kind: Kind) -> str:
    """Return advice to append to an error: what `path` is, and how to get a folder of `kind`.

    The advice begins with a space.
    """
    actual = kind_of(path)
    inside = path / kind
    if actual == "index":
        description = f"an {actual}"
    else:
        description = f"a {actual}"
    if kind_of(inside) == kind:
        if actual:
            return f" It is {description}; the {kind} in it is {inside}."
        return f" The {kind} in it is {inside}."
    if actual is None or actual == kind:
        return f" {_ADVICE[kind]}"
    return f" It is {description}. {_INSTEAD[actual, kind].format(shlex.quote(str(path)))}"
