"""Every command of a benchmark on a page is valid."""

import argparse
import ast
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"python benchmarks/(\w+)\.py([^\n`#;|)]*)")
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "models/*/README.md",
    "benchmarks/*.py",
    "benchmarks/results/*.md",
)
EXAMPLES = {"NAME": "digits", "CHECKOUT": ".", "FOLDER": "."}
"""Values of words that a reader replaces."""


class ParsedError(Exception):
    """Raised instead of running a script, once it has read its command line."""


def commands() -> Iterator[tuple[str, str, str]]:
    """Yield every different command: page, script, and arguments as text."""
    seen = set()
    for pattern in PAGES:
        for page in sorted(ROOT.glob(pattern)):
            text = page.read_text(encoding="utf-8")
            if page.suffix == ".py":
                text = ast.get_docstring(ast.parse(text)) or ""
            for script, words in COMMAND.findall(text):
                command = (script, words.strip().rstrip(".,:"))
                if command not in seen:
                    seen.add(command)
                    yield (page.name, *command)


def parse(monkeypatch: pytest.MonkeyPatch, script: str, words: str) -> None:
    """Have a script read a command line, without running it."""
    whole = argparse.ArgumentParser.parse_args

    def parse_args(self, *values):
        whole(self, *values)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    line = [EXAMPLES.get(word, word) for word in shlex.split(words)]
    monkeypatch.setattr(sys, "argv", [script, *line])
    module = importlib.import_module(script)
    with pytest.raises(ParsedError):
        module.main()


@pytest.mark.parametrize(("page", "script", "words"), list(commands()))
def test_the_script_accepts_the_command(page, script, words, monkeypatch):
    source = (ROOT / "benchmarks" / f"{script}.py").read_text(encoding="utf-8")
    # `bench.icon_options` reads the command line for the scripts that draw icons.
    if ".parse_args(" in source or "icon_options(" in source:
        parse(monkeypatch, script, words)
    else:
        assert not words, f"{script}.py takes no options"
