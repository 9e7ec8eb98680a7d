"""Every command on a page or in `--help` is valid; README's setup and loss work."""

import configparser
import contextlib
import re
import shlex
from pathlib import Path

import click
import pytest
from retrieval.cli.app import COMMANDS, app
from retrieval.cli.index import index as index_group
from retrieval.run.open import Run

from retrieval_engines import testing

LEAVES = [
    *(name for name in COMMANDS if name not in ("plugins", "index", "keys", "data")),
    *("plugins list", "plugins show", "plugins new"),
    *(f"index {verb}" for verb in index_group.commands),
    *("keys add", "keys list", "keys remove"),
    *("data show", "data check"),
]


def parse(arguments: list[str]) -> click.Context:
    """Parse a command line without running it; click raises an error if it is not valid."""
    command: click.Command = app
    context = app.make_context("retrieval", [], resilient_parsing=True)
    while isinstance(command, click.Group):
        name, child, arguments = command.resolve_command(context, arguments)
        assert child is not None and name is not None
        command, context = child, click.Context(child, parent=context, info_name=name)
    return command.make_context(context.info_name, list(arguments), parent=context.parent)


def test_the_limits_on_the_operators_page_are_the_defaults(root):
    defaults = {option.opts[0]: option.default for option in leaf("serve").params}
    text = (root / "docs" / "operator.md").read_text(encoding="utf-8").partition("\n## Limits\n")[2]
    cells = r"(?m)^\|[^|]*\| (\d[\d,]*)(?: (MB|megapixels))?\b[^|]* \| `(--[\w-]+)` \|"
    rows = re.findall(cells, text)
    assert len(rows) >= 4
    for number, unit, option in rows:
        assert int(number.replace(",", "")) * (1_000_000 if unit else 1) == defaults[option], option


def test_commands_in_blocks_parse(command):
    parse(shlex.split(command, comments=True))


def test_commands_in_sentences_parse(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for arguments in re.findall(r"`retrieval\s+([^`]+)`", text):
        words = [word for word in shlex.split(arguments) if word not in ("…", "--help")]
        with contextlib.suppress(click.MissingParameter):  # a sentence may leave out arguments
            parse(words or ["plugins", "list"])  # `retrieval --help` names no command


@pytest.mark.parametrize("name", LEAVES)
def test_help_shows_an_example_that_parses(name, cli, commands_in):
    shown = cli(*name.split(), "--help")
    assert shown.code == 0 and not shown.err
    assert "Example" in shown.out
    command = leaf(name)
    text = f"{command.help or ''}\n{command.epilog or ''}"
    # Remove `Example:` or another label before the command.
    examples = commands_in(re.sub(r"^\s*[A-Z][\w ]*:\s+", "", text, flags=re.M))
    assert any(example.startswith(f"{name} ") for example in examples), f"{name}: {text}"
    for example in examples:
        words = example.split()
        named = next(known for known in (" ".join(words[:2]), words[0]) if known in LEAVES)
        assert parse(shlex.split(example)).command is leaf(named)


def leaf(name: str) -> click.Command:
    """Return a command by its name, such as "index create"."""
    command: click.Command | None = app
    for word in name.split():
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None
    return command


def test_every_command_is_in_the_documentation(root, commands_in):
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    lines = [line for page in pages for line in commands_in(page.read_text(encoding="utf-8"))]
    text = " ".join(" ".join(page.read_text(encoding="utf-8").split()) for page in pages)
    for name in LEAVES:
        assert any(line.startswith(name) for line in lines) or f"`retrieval {name} " in text, (
            f"{name} is in no page"
        )


def test_the_page_of_stores_names_existing_tests(root):
    page = (root / "docs" / "stores.md").read_text(encoding="utf-8")
    files = [*root.glob("tests/store/test_*.py"), *root.glob("tests/server/test_*.py")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    tests = {*re.findall(r"^ *(?:async )?def (test_\w+)", text, re.M), *dir(testing.StoreSuite)}
    rows = re.findall(r"^\|.*\| ([^|]+) \|$", page[page.index("Qdrant | test |") :], re.M)[1:]
    assert len(rows) >= 14
    for row in rows:
        names = re.findall(r"`([\w./]*test_[\w./]+)`", row)
        assert names, f"no test shows: {row}"
        for name in names:
            assert (root / name).is_file() or name in tests, f"there is no {name}"


def test_setup_is_two_lines_with_existing_extras(root, blocks):
    shell = [block for block in blocks(root / "README.md") if block.language == "sh"]
    assert len(shell) == 2
    settings = configparser.ConfigParser()
    settings.read(root / "setup.cfg")
    for block, last in zip(shell, ("retrieval demo", "pytest -n auto"), strict=True):
        (line,) = block.body.splitlines()
        steps = line.split(" && ")
        assert steps[:2] == ["python3 -m venv .venv", ". .venv/bin/activate"] and steps[-1] == last
        extras = re.fullmatch(r"\.\[(.*)\]", shlex.split(steps[2])[-1])
        assert extras and set(extras[1].split(",")) <= set(settings["options.extras_require"])
    assert shell[1].before == "<!-- test command -->"


def test_the_loss_has_under_twenty_lines_and_trains(root, blocks, commands_in, reader, monkeypatch):
    text = (root / "README.md").read_text(encoding="utf-8").partition("## A loss in a single")[2]
    files = {block.file: block for block in blocks(root / "README.md") if block.file}
    assert set(files) == {"my_loss.py", "my_recipe.toml"}
    assert len(files["my_loss.py"].body.splitlines()) < 20
    for block in files.values():
        reader.do(block)
    monkeypatch.chdir(reader.folder)
    (line,) = commands_in(text.partition("\n## ")[0])
    assert "--plugin my_loss.py" in line
    reader.call(shlex.split(line), "README.md")
    recipe = Run.open(Path("runs", "margin")).recipe
    assert recipe.loss and recipe.loss.table == {"name": "my_loss.margin", "gap": 0.3}
    assert recipe.train.epochs == 1
    words = ["plugins", "show", "my_loss.margin", "--plugin", "my_loss.py"]
    shown = reader.call(words, "README.md")
    assert "half the margin's width" in shown and "gap = 0.2" in shown


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_are_not_broken(root, name):
    text = (root / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("https://") or (root / target).exists(), f"{name} links {target}"


def test_changelog_and_licence_match_setup(root):
    settings = configparser.ConfigParser()
    settings.read(root / "setup.cfg")
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {settings['metadata']['version']} (" in changes
    licence = (root / "LICENSE").read_text(encoding="utf-8")
    assert settings["metadata"]["license"] == "Apache-2.0"
    assert "Apache License" in licence and "END OF TERMS AND CONDITIONS" in licence
