"""README: two commands to set up, and a loss that works as it is printed."""

from __future__ import annotations

import configparser
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from retrieval.run.open import Run


def test_set_up_is_two_lines_that_name_real_extras(root: Path, blocks: Callable[..., Any]) -> None:
    shell = [block for block in blocks(root / "README.md") if block.language == "sh"]
    assert len(shell) == 2, "README has exactly two commands to set up"
    settings = configparser.ConfigParser()
    settings.read(root / "setup.cfg")
    for block, last in zip(shell, ("retrieval demo", "pytest -n auto"), strict=True):
        (line,) = block.body.splitlines()
        steps = line.split(" && ")
        assert steps[:2] == ["python3 -m venv .venv", ". .venv/bin/activate"] and steps[-1] == last
        extras = re.fullmatch(r"\.\[(.*)\]", shlex.split(steps[2])[-1])
        assert extras and set(extras[1].split(",")) <= set(settings["options.extras_require"])
    assert shell[1].before == "<!-- test command -->"


def test_the_loss_has_under_twenty_lines_and_trains(
    root: Path,
    blocks: Callable[..., Any],
    commands_in: Callable[[str], list[str]],
    reader: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (
        (root / "README.md")
        .read_text(encoding="utf-8")
        .partition("## A loss in a single file")[2]
        .partition("\n## ")[0]
    )
    files = {block.file: block.body for block in blocks(root / "README.md") if block.file}
    assert set(files) == {"my_loss.py", "my_recipe.toml"}
    assert len(files["my_loss.py"].splitlines()) < 20
    for name, body in files.items():
        (reader.folder / name).write_text(body, encoding="utf-8")
    monkeypatch.chdir(reader.folder)
    (line,) = commands_in(text)
    assert "--plugin my_loss.py" in line
    reader.call(shlex.split(line), "README.md")
    run = Run.open(Path("runs", "margin"))
    assert (
        run.recipe.loss
        and run.recipe.loss.table == {"name": "my_loss.margin", "gap": 0.3}
        and run.recipe.train.epochs == 1
    )
    shown = reader.call(
        ["plugins", "show", "my_loss.margin", "--plugin", "my_loss.py"], "README.md"
    )
    assert "half the margin's width" in shown and "gap = 0.2" in shown


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(root: Path, name: str) -> None:
    text = (root / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("https://") or (root / target).exists(), f"{name} links {target}"


def test_what_the_documentation_includes_links_no_neighbour(root: Path) -> None:
    """Sphinx looks for a relative link beside the page that includes the text, where its target is
    not.
    """
    for page in [root / "CHANGELOG.md", *(root / "benchmarks" / "results").glob("*.md")]:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith(("https://", "#")), f"{page.name} links {target}"


def test_the_changelog_has_this_version_and_the_licence_is_what_setup_says(root: Path) -> None:
    settings = configparser.ConfigParser()
    settings.read(root / "setup.cfg")
    assert re.search(
        rf"^## {re.escape(settings['metadata']['version'])} \(",
        (root / "CHANGELOG.md").read_text(encoding="utf-8"),
        re.M,
    )
    licence = (root / "LICENSE").read_text(encoding="utf-8")
    assert settings["metadata"]["license"] == "Apache-2.0"
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence
