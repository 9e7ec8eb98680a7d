"""The command line: exit codes, one sentence for each mistake, commands of plugins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
from retrieval.cli.app import COMMANDS

COMMAND = '''
import os, signal, time
import click
from retrieval.plugin import hookimpl

@hookimpl
def retrieval_commands(app):
    assert isinstance(app, click.Group) and app.name == "app", app

    @app.command()
    @click.argument("word")
    def shout(word):
        """Say WORD loudly."""
        print(word.upper(), flush=True)

    @app.command()
    def flood():
        """Print more than a pipe holds."""
        for i in range(100_000):
            click.echo(f"{i} … ä")

    @app.command()
    def wait():
        """Wait to be interrupted."""
        print("waiting", flush=True)
        time.sleep(60)

    @app.command()
    def fail():
        """Fail in every way."""
        how = os.environ["HOW"]
        if how == "space":
            raise OSError(28, "No space left on device", "run/x")
        if how == "permission":
            open("/proc/1/mem", "w") if os.geteuid() else os.makedirs("/proc/new")
        if how == "module":
            raise ModuleNotFoundError("No module named 'faiss'", name="faiss")
        if how == "old":
            import pluggy.sooner
        if how == "error":
            from retrieval.errors import DataError
            raise DataError("The data are wrong.")
        raise KeyError("a bug")
'''


def sentence(outcome: Any) -> str:
    """Return the last line on stderr of a command that failed by a user's mistake."""
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.err and outcome.out == ""
    last = outcome.err.strip().splitlines()[-1]
    assert last.startswith(("Error: ", "  - "))
    return str(last)


@pytest.fixture
def shout(tmp_path, install):
    """A folder in which a plugin of commands is installed."""
    site = tmp_path / "site"
    install(site, "retrieval-shout", "shout", "host_shout", COMMAND)
    return site


@pytest.fixture
def command(shout, process):
    return partial(process, "-m", "retrieval.cli", path=shout)


def test_a_plugin_adds_commands(command):
    done = command("shout", "hello")
    assert (done.code, done.out, done.err) == (0, "HELLO\n", "")
    listed = command("--help")
    assert listed.code == 0 and "Say WORD loudly." in listed.out
    assert listed.out.index("serve") < listed.out.index("shout")
    assert "Did you mean 'shout'?" in sentence(command("shuot"))
    blocked = command("shout", "hello", RETRIEVAL_BLOCK="shout")
    assert "There is no command 'shout'." in sentence(blocked)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("space", "Error: run/x cannot be used: No space left on device."),
        ("permission", "cannot be used: "),
        ("module", "needs faiss, which is not installed. Install it: pip install"),
        ("old", "needs pluggy.sooner, which the installed pluggy lacks"),
        ("error", "Error: The data are wrong."),
    ],
)
def test_each_kind_of_mistake_is_one_sentence_and_exit_code_2(command, how, words):
    assert words in sentence(command("fail", HOW=how))


def test_a_bug_shows_its_traceback_and_exits_1(command):
    done = command("fail", HOW="bug")
    assert done.code == 1 and "KeyError" in done.err and "Traceback" in done.err


def test_ctrl_c_exits_130(shout):
    env = {**os.environ, "PYTHONPATH": str(shout)}
    command = [sys.executable, "-m", "retrieval.cli", "wait"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=env) as running:
        assert running.stdout.readline() == "waiting\n"
        running.send_signal(signal.SIGINT)
        assert running.wait(timeout=30) == 130
        assert running.stderr.read().strip() == "Interrupted."


def test_a_closed_pipe_is_no_error(shout):
    pipe = f"{sys.executable} -m retrieval.cli flood | head -n 1"
    env = {**os.environ, "PYTHONPATH": str(shout)}
    options = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(["bash", "-c", pipe], **options, env=env)
    assert (done.stdout.splitlines(), done.stderr) == (["0 … ä"], "")


def test_a_terminal_without_a_character_shows_a_question_mark(command):
    done = command("flood", PYTHONIOENCODING="latin-1")
    assert done.code == 0 and done.out.startswith("0 ? ") and done.err == ""


HOOK = """
import click
from retrieval.plugin import hookimpl
@hookimpl
def retrieval_commands(app):
    {}
"""
ADD = "app.add_command(click.Command('{}', callback=retrieval_commands))"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (ADD.format("train"), "host_bad adds the command 'train', which is built in"),
        ("1 / 0", "A plugin's retrieval_commands failed: ZeroDivisionError: division by zero"),
    ],
)
def test_a_broken_plugin_command_does_not_break_help(tmp_path, install, process, body, words):
    install(tmp_path, "retrieval-bad", "bad", "host_bad", HOOK.format(body))
    helped = process("-m", "retrieval.cli", "--help", path=tmp_path)
    assert helped.code == 0 and words in helped.err and helped.err.startswith("Note: ")
    assert all(name in helped.out for name in COMMANDS)
    assert words in sentence(process("-m", "retrieval.cli", "anything", path=tmp_path))


def test_a_bundled_command_starts_beside_a_broken_plugin(tmp_path, install, process):
    install(tmp_path, "retrieval-bad", "bad", "host_bad", "1 / 0")
    done = process("-m", "retrieval.cli", "keys", "list", "gone.jsonl", path=tmp_path)
    assert "There is no file of keys gone.jsonl." in sentence(done)


def test_two_plugins_cannot_add_the_same_command(tmp_path, install, process):
    for name in ("acme", "zeta"):
        code = HOOK.format(ADD.format("extra"))
        install(tmp_path, f"retrieval-{name}", name, f"host_{name}", code)
    done = process("-m", "retrieval.cli", "extra", path=tmp_path)
    assert "adds the command 'extra', as host_" in sentence(done)
    assert "host_acme" in done.err and "host_zeta" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "There is no command 'trian'. Did you mean 'train'?"),
        (["plugins", "show"], "Missing argument 'NAME'"),
        (["plugins", "list", "--kid", "losses"], "--kind"),
        (["evaluate", "gone", "--protocol", "verifcation"], "Did you mean 'verification'?"),
        (["export", "gone", "--tolerance", "nan"], "'nan' is not a finite number."),
        (["check", "gone.toml"], "it cannot be read: No such file or directory."),
        (["check", "gone.toml", "--set"], "requires an argument"),
        (["evaluate", "gone"], "gone is not a run"),
        (["plugins", "new", "My-Plugin"], "'My-Plugin' cannot be a plugin's name"),
        (["plugins", "new", "core"], "A plugin 'core' is installed already"),
        (["plugins", "new", "acme", "--kind", "reducer"], "'reducer' is not one of 'loss',"),
    ],
)
def test_mistakes_on_the_command_line(cli, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert words in sentence(cli(*arguments))
    assert not list(tmp_path.iterdir())


def test_a_wrong_recipe_prints_every_problem_and_exits_2(cli, tmp_path):
    path = tmp_path / "recipe.toml"
    names = {"data": "core.digts", "backbone": "core.convnet", "loss": "pml.circl"}
    path.write_text("".join(f'{part}.name = "{name}"\n' for part, name in names.items()))
    done = cli("check", path, "--set", "head.embedding_size=0")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[0] == f"Error: {path} has 3 problems:"
    assert len(done.err.splitlines()) == 4 and "Did you mean 'core.digits'?" in done.err
    assert "write it as table.key=value" in sentence(cli("check", path, "--set", "seed"))


def test_the_version_of_an_installation_and_of_a_source_tree(cli, monkeypatch):
    def lacking(name: str) -> str:
        raise PackageNotFoundError(name)

    assert cli("--version").out == f"retrieval, version {version('embedding-retrieval')}\n"
    monkeypatch.setattr("retrieval.base.runtime.version", lacking)
    monkeypatch.setattr("importlib.metadata.version", lacking)
    assert cli("--version").out == "retrieval, version 0\n"
