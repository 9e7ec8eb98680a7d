"""`retrieval plugins new` creates a plugin's repository: parts, their tests, recipes and CI."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import tomli_w

from retrieval.base.files import whole_folder
from retrieval.errors import PluginError
from retrieval.host.factory import COMPONENTS, KINDS
from retrieval.host.plugins import installed_plugins

EXAMPLES = {
    "loss": ("MarginLoss", "margin"),
    "miner": ("Nearest", "nearest"),
    "generator": ("Nearer", "nearer"),
    "combiner": ("SumOfParts", "sum_of_parts"),
    "learner": ("WithinScale", "within_scale"),
    "dataset": ("Digits", "digits"),
    "backbone": ("Small", "small"),
    "sampler": ("Rotating", "rotating"),
    "augmentation": ("Negative", "negative"),
    "metric": ("ReciprocalRank", "reciprocal_rank"),
    "index": ("Matrix", "matrix"),
    "store": ("JournalPlace", "journal"),
}
"""For each kind, the class in the template `scaffolds/KIND.py.in` and the name of the part."""
_RECIPE = {
    "data": {"name": "core.digits"},
    "split": {"by": "class"},
    "sampler": {"classes": 4, "items": 16},
    "backbone": {"name": "core.convnet", "size": 28},
    "loss": {"name": "pml.contrastive"},
    "train": {"epochs": 3},
}


def package_files(name: str, *kinds: str) -> dict[str, str]:
    """Return the text of each file of a plugin's package by path; see `write_package`."""
    kinds = tuple(dict.fromkeys(kinds or ("loss",)))
    package = f"retrieval_{name}"
    alone = len(kinds) == 1
    contents = {
        "pyproject.toml": _filled("pyproject.toml", name, kinds[0]),
        f"{package}/__init__.py": _hooks(name, kinds),
        ".github/workflows/tests.yaml": _filled("ci.yaml", name, kinds[0]),
    }
    for kind in kinds:
        test = f"tests/test_{name if alone else kind}.py"
        contents[f"{package}/{kind}.py"] = _filled(f"{kind}.py", name, kind)
        contents[test] = _filled(f"{kind}_test.py", name, kind)
        if kind == "store":
            contents[f"{package}/lines.py"] = _filled("store_lines.py", name, kind)
        # A command names an index or a store, not a recipe.
        if kind not in ("index", "store"):
            recipe = _recipe(name, kind) | {"name": name if alone else f"{name}_{kind}"}
            contents["recipe.toml" if alone else f"{kind}.toml"] = tomli_w.dumps(recipe)
    return contents


def _hooks(name: str, kinds: Sequence[str]) -> str:
    """Return the package's `__init__.py`, with a hook of each kind."""
    parts = [_filled("init.py", name, kind).partition("@hookimpl") for kind in kinds]
    return parts[0][0] + "\n\n".join(sign + hook for _, sign, hook in parts)


def _recipe(name: str, kind: str) -> dict[str, Any]:
    """Return a recipe that trains with the new part."""
    part = f"{name}.{EXAMPLES[kind][1]}"
    recipe: dict[str, Any] = {"name": name, **_RECIPE}
    if kind == "metric":
        return recipe | {"evaluate": {"metrics": [part, "map_at_r"]}}
    # A learner learns from features, so its recipe has neither a loss nor batches.
    if kind == "learner":
        recipe = {key: recipe[key] for key in ("name", "data", "split")}
        recipe["backbone"] = {"name": "core.pixels", "size": 8, "frozen": True}
    if kind == "augmentation":
        return recipe | {"augmentation": {"transforms": [part]}}
    table = next(t for t, k in COMPONENTS.items() if KINDS[k] == kind)
    values = {"name": part}
    # The sampler's table also holds the size of a batch.
    if kind == "sampler":
        values |= recipe["sampler"]
    return recipe | {table: values}


def _filled(template: str, name: str, kind: str) -> str:
    text = (resources("retrieval.host") / "scaffolds" / f"{template}.in").read_text("utf-8")
    make, part = EXAMPLES[kind]
    hook = next(plural for plural, word in KINDS.items() if word == kind)
    # KINDS before KIND, which would replace its beginning.
    words = {"MAKE": make, "PART": part, "KINDS": hook, "KIND": kind, "acme": name}
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def write_package(
    name: str,
    output: Path | None = None,
    *kinds: str,
) -> Path:
    """Write a plugin's package atomically and return its folder, by default `retrieval-NAME`.

    The package offers a part of each kind, by default a loss.

    Raises:
        PluginError: the name is invalid or taken, or the folder exists or cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise PluginError(
            f"'{name}' cannot be a plugin's name: use a Python identifier in lower case, such as"
            " acme."
        )
    if origin := installed_plugins().get(name):
        raise PluginError(
            f"A plugin '{name}' is installed already ({origin}). Choose another name."
        )
    folder = output or Path(f"retrieval-{name}")
    occupied = PluginError(f"{folder} exists already. Remove it, or choose another with --output.")
    if folder.exists() or folder.is_symlink():
        raise occupied
    try:
        with whole_folder(folder, replace=False, exists_error=occupied) as temporary:
            for path, text in package_files(name, *kinds).items():
                file = temporary / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PluginError(f"{folder} cannot be written: {error.strerror or error}.") from error
    return folder
