"""`retrieval plugins new` creates a plugin's repository: one part, its test, a recipe and CI."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import tomli_w

from retrieval.errors import PluginError
from retrieval.host.factory import COMPONENTS, KINDS
from retrieval.host.files import whole_folder
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


def package_files(name: str, kind: str = "loss") -> dict[str, str]:
    """Return the files of a plugin's package: their text by path."""
    package = f"retrieval_{name}"
    templates = {
        "pyproject.toml": "pyproject.toml",
        f"{package}/__init__.py": "init.py",
        f"{package}/{kind}.py": f"{kind}.py",
        f"tests/test_{name}.py": f"{kind}_test.py",
        ".github/workflows/tests.yaml": "ci.yaml",
    }
    if kind == "store":
        templates[f"{package}/lines.py"] = "store_lines.py"
    contents = {path: _filled(template, name, kind) for path, template in templates.items()}
    if kind not in ("index", "store"):
        contents["recipe.toml"] = tomli_w.dumps(_recipe(name, kind))
    return contents


def _recipe(name: str, kind: str) -> dict[str, Any]:
    """Return a recipe that trains with the new part."""
    part = f"{name}.{EXAMPLES[kind][1]}"
    recipe: dict[str, Any] = {"name": name, **_RECIPE}
    if kind == "metric":
        return recipe | {"evaluate": {"metrics": [part, "map_at_r"]}}
    if kind == "learner":
        recipe = {key: recipe[key] for key in ("name", "data", "split")}
        recipe["backbone"] = {"name": "core.pixels", "size": 8, "frozen": True}
    table = next(t for t, k in COMPONENTS.items() if KINDS[k] == kind)
    batch_size = recipe["sampler"] if kind == "sampler" else {}
    return recipe | {table: {"name": part, **batch_size}}


def _filled(template: str, name: str, kind: str) -> str:
    text = (resources("retrieval.host") / "scaffolds" / f"{template}.in").read_text("utf-8")
    make, part = EXAMPLES[kind]
    hook = next(plural for plural, word in KINDS.items() if word == kind)
    words = {"MAKE": make, "PART": part, "KINDS": hook, "KIND": kind, "acme": name}
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def write_package(name: str, output: Path | None = None, kind: str = "loss") -> Path:
    """Write a plugin's package atomically and return its folder, by default `retrieval-NAME`.

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
            for path, text in package_files(name, kind).items():
                file = temporary / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PluginError(f"{folder} cannot be written: {error.strerror or error}.") from error
    return folder
