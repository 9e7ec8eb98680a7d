"""`retrieval plugins new` creates a plugin's repository with one part, its test and a CI file."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from importlib.resources import files as resources
from pathlib import Path

from retrieval.errors import PluginError
from retrieval.host.factory import KINDS
from retrieval.host.files import whole_folder
from retrieval.host.plugins import installed_plugins

TRAIN = "retrieval train recipe.toml"


@dataclass(frozen=True)
class Example:
    """An example part: its class, its name in the hook, and a command that uses it."""

    make: str
    part: str
    use: str = TRAIN


EXAMPLES = {
    "loss": Example("MarginLoss", "margin"),
    "miner": Example("Nearest", "nearest"),
    "generator": Example("Nearer", "nearer"),
    "combiner": Example("SumOfParts", "sum_of_parts"),
    "learner": Example("WithinScale", "within_scale"),
    "dataset": Example("Digits", "digits"),
    "backbone": Example("Small", "small"),
    "metric": Example("ReciprocalRank", "reciprocal_rank"),
    "index": Example(
        "Matrix",
        "matrix",
        "retrieval index create items.index IMAGES --bundle BUNDLE --backend acme.matrix",
    ),
    "store": Example(
        "JournalPlace",
        "journal",
        "retrieval index create journal:///tmp/items.journal IMAGES --bundle BUNDLE",
    ),
}
"""Examples by kind. Their templates are in `scaffolds/`, with `acme` as the plugin's name."""


def package_files(name: str, kind: str = "loss") -> dict[str, str]:
    """Return the files of a plugin's package: their text by path."""
    templates = {
        "pyproject.toml": "pyproject.toml",
        "retrieval_acme/__init__.py": "init.py",
        f"retrieval_acme/{kind}.py": f"{kind}/module.py",
        "tests/test_acme.py": f"{kind}/test.py",
        "README.md": "README.md",
        ".github/workflows/tests.yaml": "ci.yaml",
    }
    if kind == "store":
        templates["retrieval_acme/lines.py"] = "store/lines.py"
    if EXAMPLES[kind].use == TRAIN:
        templates["recipe.toml"] = f"{kind}/recipe.toml"
    return {
        place.replace("acme", name): _filled(template, name, kind)
        for place, template in templates.items()
    }


def _filled(template: str, name: str, kind: str) -> str:
    example = EXAMPLES[kind]
    text = (resources("retrieval.host") / "scaffolds" / f"{template}.in").read_text(
        encoding="utf-8"
    )
    hook = next(plural for plural, word in KINDS.items() if word == kind)
    for word, value in (
        ("USE", example.use),
        ("MAKE", example.make),
        ("PART", example.part),
        ("KINDS", hook),
        ("KIND", kind),
        ("acme", name),
    ):
        text = text.replace(word, value)
    return text


def write_package(name: str, output: Path | None = None, kind: str = "loss") -> Path:
    """Write a plugin's package atomically and return its folder.

    Args:
        name: the plugin's name.
        output: the folder to create; the default is `retrieval-NAME`.
        kind: the kind of part, one of `EXAMPLES`.

    Raises:
        PluginError: the name is invalid or taken, or the folder exists or cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise PluginError(
            f"'{name}' cannot be a plugin's name: use a Python identifier in lower case, such as"
            " acme."
        )
    if name in installed_plugins():
        raise PluginError(
            f"A plugin '{name}' is installed already ({installed_plugins()[name]}). Choose another"
            " name."
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
