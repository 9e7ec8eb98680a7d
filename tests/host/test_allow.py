"""A stranger's recipe or run runs no plugin of its own before the user says so; what they said is remembered by contents."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from retrieval.errors import PluginError
from retrieval.host.trust import answering, digest, read_record, record_file, remember, trust
from retrieval.recipe.read import read_recipe

PLUGIN = """
import pathlib
from retrieval import hookimpl

pathlib.Path(__file__).with_name("ran").touch()

class Mean:
    def __call__(self, embeddings, labels):
        return embeddings.square().mean()

@hookimpl
def retrieval_losses():
    return {"mean": Mean}
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
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who trusts nothing yet, in a folder with a stranger's recipe."""
    monkeypatch.setenv("RETRIEVAL_DATA", str(tmp_path / "data"))
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "theirs.py").write_text(PLUGIN)
    (folder / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return folder


def refused(outcome: Any, *files: Path) -> None:
    assert (outcome.code, outcome.out) == (2, ""), outcome
    (line,) = outcome.err.splitlines()
    assert line.startswith("Error: ") and "--trust" in line and "retrieval plugins trust FOLDER" in line
    for file in files:
        assert f"{file} (SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()[:16]}…)" in line


def test_every_command_refuses_and_trust_lets_it_run(stranger: Path, cli: Callable[..., Any]) -> None:
    recipe, plugin, ran = stranger / "recipe.toml", stranger / "theirs.py", stranger / "ran"
    refused(cli("check", recipe), plugin)
    refused(cli("train", recipe, "--output", "run"), plugin)
    assert not ran.exists() and not Path("run").exists()
    assert cli("train", recipe, "--output", "run", "--trust").code == 0
    assert ran.exists() and cli("check", recipe).code == 0  # remembered

    # the run is this user's; for another one on another machine it is a stranger's
    assert cli("evaluate", "run").code == 0
    shutil.rmtree(record_file().parent)
    shutil.copytree("run", "theirs")
    copy = Path("theirs/plugins/theirs.py").resolve()
    (copy.parent / "ran").unlink(missing_ok=True)
    refused(cli("evaluate", "theirs"), copy)
    refused(cli("export", "theirs"), copy)
    assert not (copy.parent / "ran").exists()
    assert cli("evaluate", "theirs", "--trust").code == 0 and (copy.parent / "ran").exists()


def test_what_the_user_names_is_the_users_word_and_is_remembered_by_contents(
    stranger: Path, cli: Callable[..., Any]
) -> None:
    recipe, plugin = stranger / "recipe.toml", stranger / "theirs.py"
    assert cli("plugins", "show", "theirs.mean", "--plugin", plugin).code == 0
    assert cli("check", recipe).code == 0
    plugin.write_text(PLUGIN + "\n# changed\n")
    refused(cli("check", recipe), plugin)
    assert cli("check", recipe, "--plugin", plugin).code == 0
    shutil.copytree(stranger, "moved")
    assert cli("check", "moved/recipe.toml").code == 0


def test_files_in_a_folder_of_ones_own_may_change(stranger: Path, cli: Callable[..., Any]) -> None:
    recipe, plugin = stranger / "recipe.toml", stranger / "theirs.py"
    assert cli("plugins", "trust", stranger).code == 0
    assert cli("check", recipe).code == 0
    plugin.write_text(PLUGIN + "\n# edited\n")
    assert cli("train", recipe, "--output", "run").code == 0
    listed = cli("plugins", "trust").out
    assert f"folder {stranger}\n" in listed and digest(plugin) in listed
    assert cli("plugins", "trust", "--forget", stranger, plugin).code == 0
    assert cli("evaluate", "run").code == 2  # forgotten here is forgotten there
    refused(cli("check", recipe), plugin)
    assert cli("plugins", "trust", "nowhere").err == "Error: nowhere does not exist.\n"


def test_bytecode_beside_the_file_never_runs(stranger: Path, cli: Callable[..., Any]) -> None:
    plugin = stranger / "theirs.py"
    evil = stranger / "evil.py"
    evil.write_text(PLUGIN.replace('"ran"', '"evil"'))
    import importlib.util
    import py_compile

    py_compile.compile(
        str(evil),
        importlib.util.cache_from_source(str(plugin)),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    assert cli("check", stranger / "recipe.toml", "--trust").code == 0
    assert (stranger / "ran").exists() and not (stranger / "evil").exists()


def test_a_module_beside_the_recipe_is_no_installed_one(
    stranger: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = stranger / "their_package"
    package.mkdir()
    (package / "__init__.py").write_text(PLUGIN)
    (package / "more.py").write_text("")
    recipe = stranger / "recipe.toml"
    recipe.write_text(
        RECIPE.replace("theirs.py", "their_package").replace("theirs.mean", "their_package.mean")
    )
    monkeypatch.syspath_prepend(stranger)
    refused(cli("check", recipe), package / "__init__.py", package / "more.py")
    assert "their_package" not in sys.modules
    assert cli("check", recipe, "--trust").code == 0


def test_a_damaged_record_or_one_of_others_is_not_believed_and_mended(stranger: Path) -> None:
    plugin, recipe = stranger / "theirs.py", stranger / "recipe.toml"
    trust([plugin])
    file = record_file()
    assert file.stat().st_mode & 0o777 == 0o600
    good = file.read_bytes()
    for bad in (
        b"",
        b"{",
        b"[]",
        b'{"files": []}',
        b'{"files": {"a": 1}, "folders": []}',
        b"[" * 100_000,
        good[:-9],
    ):
        file.write_bytes(bad)
        with pytest.raises(PluginError, match="is damaged, so it is not believed"):
            read_recipe(recipe)
    assert remember({plugin: digest(plugin)}) and read_recipe(recipe)
    assert file.with_suffix(".damaged").read_bytes() == good[:-9]
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o666)
    with pytest.raises(PluginError, match="can be written by others"):
        read_recipe(recipe)


def test_a_home_that_cannot_be_written_does_not_stop_what_is_allowed(
    stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRIEVAL_DATA", "/dev/null/data")
    with answering(lambda _: True):
        assert read_recipe(stranger / "recipe.toml")
    with pytest.raises(PluginError, match="cannot be written"):
        trust([stranger])


def test_files_that_are_no_programs(stranger: Path) -> None:
    plugin = stranger / "theirs.py"
    plugin.unlink()
    os.mkfifo(plugin)
    with pytest.raises(PluginError, match="is not a regular file"):
        digest(plugin)
    plugin.unlink()
    plugin.write_bytes(b"#" * 4_000_001)
    with pytest.raises(PluginError, match="larger than 4,000,000 bytes"):
        read_recipe(stranger / "recipe.toml")


def test_many_processes_at_once_lose_nothing(stranger: Path) -> None:
    code = "import sys; from pathlib import Path; from retrieval.host.trust import remember\n" + (
        "for i in range(20): remember({Path(f'/{sys.argv[1]}/{i}'): f'{sys.argv[1]}-{i}'})"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(n)]) for n in range(3)]
    assert [each.wait(60) for each in running] == [0, 0, 0]
    assert len(read_record().files) == 60


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 2), (b"y\n", 0)])
def test_on_a_terminal_it_asks(stranger: Path, answer: bytes, code: int) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "retrieval.cli", "check", "recipe.toml"]
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=stranger) as running:
        os.close(slave)
        seen = b""
        while b"Run what is in there?" not in seen:
            seen += os.read(master, 1000)
        assert not (stranger / "ran").exists()
        os.write(master, answer)
        try:
            while block := os.read(master, 1000):
                seen += block
        except OSError:  # the terminal of a process that ended
            pass
        assert running.wait(60) == code, seen
    os.close(master)
    assert (stranger / "ran").exists() == (code == 0)
    if code == 0:
        assert digest(stranger / "theirs.py") in json.loads(record_file().read_text())["files"]


def test_escape_codes_in_names_never_reach_a_terminal(stranger: Path, cli: Callable[..., Any]) -> None:
    evil = stranger / "\x1b[2J\x1b]0;owned\x07\u202e.toml"
    shutil.copy(stranger / "recipe.toml", evil)
    outcome = cli("check", evil)
    assert outcome.code == 2 and "\\x1b[2J\\x1b]0;owned\\x07\\u202e" in outcome.err
    assert not set("\x1b\x07\u202e") & set(outcome.err)
