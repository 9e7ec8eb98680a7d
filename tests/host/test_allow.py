"""A plugin file of somebody else's recipe or run runs only if the user allows it."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from retrieval.errors import PluginError
from retrieval.host.importing import answering
from retrieval.recipe.read import read_recipe

PLUGIN = """
import pathlib
from retrieval.plugin import hookimpl

pathlib.Path(__file__).with_name("ran").touch()

class Mean:
    def __call__(self, embeddings, labels):
        return embeddings.square().mean()

retrieval_losses = hookimpl(lambda: {"mean": Mean})
"""
RECIPE = """
plugins = ["theirs.py"]
data.name = "core.digits"
split.by = "class"
sampler = { classes = 3, items = 4, batches = 1 }
backbone = { name = "core.pixels", size = 8 }
head.embedding_size = 8
loss.name = "theirs.mean"
train.epochs = 1
"""


@pytest.fixture(autouse=True)
def stranger(tmp_path, monkeypatch):
    """A user who allows nothing yet, in a folder with a stranger's recipe."""
    monkeypatch.delenv("RETRIEVAL_ALLOW_PLUGINS")
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "theirs.py").write_text(PLUGIN)
    (folder / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return folder


def refused(outcome: Any, *files: Path) -> None:
    assert (outcome.code, outcome.out) == (2, ""), outcome
    (line,) = outcome.err.splitlines()
    assert line.startswith("Error: ") and "--allow-plugins" in line
    assert all(str(file) in line for file in files)


def test_every_command_refuses_and_the_flag_lets_it_run(stranger, cli):
    recipe, plugin, ran = stranger / "recipe.toml", stranger / "theirs.py", stranger / "ran"
    refused(cli("check", recipe), plugin)
    refused(cli("train", recipe, "--output", "run"), plugin)
    assert not ran.exists() and not Path("run").exists()
    assert cli("train", recipe, "--output", "run", "--allow-plugins").code == 0
    assert ran.exists()
    refused(cli("check", recipe), plugin)  # the flag holds for one command

    copy = Path("run/plugins/theirs.py").resolve()
    (copy.parent / "ran").unlink(missing_ok=True)
    refused(cli("evaluate", "run"), copy)
    refused(cli("export", "run"), copy)
    assert not (copy.parent / "ran").exists()
    assert cli("evaluate", "run", "--allow-plugins").code == 0 and (copy.parent / "ran").exists()


def test_plugins_that_the_user_names_need_no_permission(stranger, cli):
    recipe, plugin = stranger / "recipe.toml", stranger / "theirs.py"
    assert cli("plugins", "show", "theirs.mean", "--plugin", plugin).code == 0
    assert cli("check", recipe, "--plugin", plugin).code == 0
    refused(cli("check", recipe), plugin)


def test_python_asks_once_or_names_the_environment_variable(stranger, monkeypatch):
    advice = "in Python with RETRIEVAL_ALLOW_PLUGINS=1 in the environment"
    with pytest.raises(PluginError, match=advice):
        read_recipe(stranger / "recipe.toml")
    questions: list[str] = []
    with answering(lambda brings: not questions.append(brings)):
        assert read_recipe(stranger / "recipe.toml") and read_recipe(stranger / "recipe.toml")
    assert len(questions) == 1
    monkeypatch.setenv("RETRIEVAL_ALLOW_PLUGINS", "1")
    assert read_recipe(stranger / "recipe.toml")


def test_a_module_beside_the_recipe_needs_permission(stranger, cli, monkeypatch):
    package = stranger / "their_package"
    package.mkdir()
    (package / "__init__.py").write_text(PLUGIN)
    recipe = stranger / "recipe.toml"
    recipe.write_text(RECIPE.replace("theirs.py", "theirs").replace("theirs", "their_package"))
    monkeypatch.syspath_prepend(stranger)
    refused(cli("check", recipe), package / "__init__.py")
    assert "their_package" not in sys.modules
    assert cli("check", recipe, "--allow-plugins").code == 0


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 2), (b"y\n", 0)])
def test_a_terminal_asks_the_user(stranger, answer, code):
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "retrieval.cli", "check", "recipe.toml"]
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
    with subprocess.Popen(command, **ends, cwd=stranger) as running:
        os.close(slave)
        seen = b""
        while b"Run these files?" not in seen:
            seen += os.read(master, 1000)
        assert not (stranger / "ran").exists()
        os.write(master, answer)
        with suppress(OSError):  # reading fails when the process has ended
            while block := os.read(master, 1000):
                seen += block
        assert running.wait(60) == code, seen
    os.close(master)
    assert (stranger / "ran").exists() == (code == 0)


def test_escape_codes_in_names_never_reach_a_terminal(stranger, cli):
    evil = stranger / "\x1b[2J\x1b]0;owned\x07\u202e.toml"
    shutil.copy(stranger / "recipe.toml", evil)
    outcome = cli("check", evil)
    assert outcome.code == 2 and "\\x1b[2J\\x1b]0;owned\\x07\\u202e" in outcome.err
    assert not set("\x1b\x07\u202e") & set(outcome.err)
