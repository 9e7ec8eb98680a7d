"""Every `retrieval …` that the pages or `--help` show is one that the command line takes."""

import configparser
import re
import shlex
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from retrieval.cli.app import COMMANDS, app
from retrieval.cli.index import index as index_group
from retrieval.plugin import testing
from retrieval.run.open import Run

LEAVES = [
    *(name for name in COMMANDS if name not in ("plugins", "index", "keys", "data")),
    *("plugins list", "plugins show", "plugins new"),
    *(f"index {verb}" for verb in index_group.commands),
    *("keys add", "keys list", "keys remove"),
    *("data show", "data check"),
]


def parse(arguments: list[str]) -> click.Context:
    """Parse a command line, whatever subcommand it names, without running it.

    Raises:
        click.ClickException: it is none.
    """
    group: click.Command = app
    context = app.make_context("retrieval", [], resilient_parsing=True)
    while isinstance(group, click.Group):
        name, found, arguments = group.resolve_command(context, arguments)
        assert found is not None and name is not None
        if not isinstance(found, click.Group):
            return found.make_context(name, list(arguments), parent=context)
        group, context = found, click.Context(found, parent=context, info_name=name)
    raise AssertionError


def test_the_limits_on_the_operators_page_are_the_defaults(root):
    from retrieval.cli.serving import serve_command

    defaults = {each.opts[0]: each.default for each in serve_command.params}
    text = (root / "docs" / "operator.md").read_text(encoding="utf-8").partition("\n## Limits\n")[2]
    rows = re.findall(
        r"(?m)^\|[^|]*\| (\d[\d,]*)(?: (MB|megapixels))?\b[^|]* \| `(--[\w-]+)` \|", text
    )
    assert len(rows) >= 4
    for number, unit, option in rows:
        assert int(number.replace(",", "")) * (1_000_000 if unit else 1) == defaults[option], option


def test_commands_in_blocks_parse(command):
    parse(shlex.split(command, comments=True))


def test_commands_in_sentences_parse(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for found in re.findall(r"`retrieval\s+([^`]+)`", text):
        words = [
            word for word in shlex.split(" ".join(found.split())) if word not in ("…", "--help")
        ]
        try:
            parse(words or ["plugins", "list"])  # `retrieval --help` names no command
        except click.MissingParameter:  # a sentence need not say it all
            continue


@pytest.mark.parametrize("name", LEAVES)
def test_help_shows_an_example_that_parses(name, cli, commands_in):
    shown = cli(*name.split(), "--help")
    assert shown.code == 0 and not shown.err
    assert "Example" in shown.out
    command = leaf(name)
    text = (command.help or "") + "\n" + (command.epilog or "")
    examples = list(in_example(text, commands_in))
    assert any(example.startswith(f"{name} ") for example in examples), (
        f"no example of {name}: {text}"
    )
    for example in examples:
        words = example.split()
        named = next(one for one in (" ".join(words[:2]), words[0]) if one in LEAVES)
        assert parse(shlex.split(example)).command is leaf(named)


def leaf(name: str) -> click.Command:
    """Return a command by its words."""
    group: click.Command = app
    for word in name.split():
        assert isinstance(group, click.Group)
        found = group.get_command(click.Context(group), word)
        assert found is not None
        group = found
    return group


def in_example(text: str, commands_in: Callable[[str], list[str]]) -> Iterator[str]:
    """Give the command lines after `Example:` or another label, and those that stand alone."""
    for line in text.splitlines():
        yield from commands_in(re.sub(r"^\s*[A-Z][\w ]*:\s+", "", line))


def test_every_command_is_in_the_documentation(root, commands_in):
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    lines = [line for page in pages for line in commands_in(page.read_text(encoding="utf-8"))]
    text = " ".join(" ".join(page.read_text(encoding="utf-8").split()) for page in pages)
    for name in LEAVES:
        assert any(line.startswith(name) for line in lines) or f"`retrieval {name} " in text, (
            f"{name} is in no page"
        )


# What the page of stores says of them is shown by tests that there are, and with the versions that
# it names.

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "stores.md").read_text(encoding="utf-8")


def test_every_line_of_the_table_names_tests_that_are_there():
    files = [*ROOT.glob("tests/stores/test_*.py"), *ROOT.glob("tests/serving/test_*.py")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    tests = {*re.findall(r"^ *(?:async )?def (test_\w+)", text, re.M), *dir(testing.StoreSuite)}
    rows = re.findall(r"^\|.*\| ([^|]+) \|$", PAGE[PAGE.index("Qdrant | test |") :], re.M)[1:]
    assert len(rows) >= 14
    for row in rows:
        names = re.findall(r"`([\w./]*test_[\w./]+)`", row)
        assert names, f"no test shows: {row}"
        for name in names:
            assert (ROOT / name).is_file() or name in tests, f"there is no {name}"


@pytest.mark.parametrize(
    ("package", "said"),
    [("milvus", "Milvus {}"), ("pymilvus", "pymilvus {}"), ("qdrant-client", "qdrant-client {}")],
)
def test_the_versions_are_those_that_are_tested(package, said):
    pytest.importorskip({"qdrant-client": "qdrant_client"}.get(package, package))
    major, minor, *_ = version(package).split(".")
    assert re.search(re.escape(said.format(f"{major}.{minor}")) + r"\b", PAGE), version(package)


# README: two commands to set up, and a loss that works as it is printed.


def test_set_up_is_two_lines_that_name_real_extras(root, blocks):
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


def test_the_loss_has_under_twenty_lines_and_trains(root, blocks, commands_in, reader, monkeypatch):
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
def test_links_lead_somewhere(root, name):
    text = (root / name).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("https://") or (root / target).exists(), f"{name} links {target}"


def test_what_the_documentation_includes_links_no_neighbour(root):
    """Sphinx looks for a relative link beside the page that includes the text."""
    for page in [root / "CHANGELOG.md", *(root / "benchmarks" / "results").glob("*.md")]:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            picture = target.endswith(".png") and (page.parent / target).is_file()
            assert picture or target.startswith(("https://", "#")), f"{page.name} links {target}"


def test_the_changelog_has_this_version_and_the_licence_is_what_setup_says(root):
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
