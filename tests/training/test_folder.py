"""A run's folder is whole or absent, has one process at a time, and can always be resumed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from limits import files_of_at_most
from retrieval.cli.common import this_command
from retrieval.cli.train import ONCE
from retrieval.errors import DataError, RecipeError
from retrieval.recipe.read import check_recipe, to_toml
from retrieval.training.trainer import train_run
from trained_weights import SMALL, log, retrieval, same


def begin(recipe: Path, folder: Path, *words: str) -> Any:
    return retrieval("train", recipe, "--output", folder, *words)


def refused(recipe: Path, folder: Path, *words: str) -> str:
    """The message of `begin`, which must fail."""
    result = begin(recipe, folder, *words)
    assert result.exit_code and isinstance(result.exception, DataError | RecipeError), result.output
    return str(result.exception)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe's file, beside its undisturbed run `whole`."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "recipe.toml").write_text(to_toml(check_recipe(SMALL)))
    train_run(folder / "whole", check_recipe(SMALL))
    return folder / "recipe.toml"


# Every run is a fork of one process, which imports torch. The first run counts the calls of the
# training code until the folder appears, until the first checkpoint appears, and until the first
# epoch begins. The other runs are killed at random calls before these three.
DRIVER = """
import json, os, random, signal, sys
from pathlib import Path
from typing import Any
import torch, torch._dynamo, torch.utils.tensorboard
torch.set_num_threads(1)
from retrieval.cli.app import app
import retrieval.training.trainer

recipe, base, seed = sys.argv[1:4]

def run(name, kill_at=0):
    output = Path(base, name)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        calls = appears = kept = 0
        def count(frame, event, argument):
            nonlocal calls, appears, kept
            if event != "call" or "/retrieval/training/" not in frame.f_code.co_filename:
                return
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if not kill_at and not appears and output.exists():
                appears = calls
            if not kill_at and not kept and (output / "checkpoints/last.safetensors").exists():
                kept = calls
            if frame.f_code.co_name == "_epoch":
                os.write(writing, json.dumps([appears, kept, calls]).encode())
                os._exit(0)
        sys.setprofile(count)
        app(["train", recipe, "--output", str(output)], standalone_mode=False)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(writing)
    with os.fdopen(reading) as file:
        return code, file.read()

code, output = run("measured")
assert code == 0, code
appears, kept, ends = json.loads(output)
draw = random.Random(int(seed))
parts = ((1, appears, 3), (appears, kept, 4), (kept, ends, 1))
moments = [call for first, last, count in parts for call in draw.sample(range(first, last), count)]
for i, call in enumerate(moments):
    assert run(str(i), call)[0] == -9
"""


def test_a_run_killed_before_its_first_checkpoint_can_be_begun_or_resumed(
    recipe, tmp_path, process
):
    outcome = process("-c", DRIVER, recipe, tmp_path, "13", seconds=600, OMP_NUM_THREADS="1")
    assert outcome.code == 0, outcome.err
    begun = 0
    for i in range(8):
        folder = tmp_path / str(i)
        if (folder / "checkpoints" / "last.safetensors").is_file():
            assert "a run that was stopped. Resume it" in refused(recipe, folder)
            result = begin(recipe, folder, "--resume")
        elif folder.exists():
            begun += 1
            message = refused(recipe, folder)
            assert "stopped before its first checkpoint. Resume it (--resume" in message
            result = begin(recipe, folder, "--resume")
            assert "has no checkpoint yet: training starts from the beginning" in result.output
        else:
            result = begin(recipe, folder, "--resume")
            assert "holds no run yet: training starts from the beginning" in result.output
        assert result.exit_code == 0, result.exception
        assert same(folder, recipe.parent / "whole")
        assert not list(tmp_path.glob(f".{i}.*"))
    assert begun >= 3


@pytest.mark.parametrize("size", [0, 200, 2_000, 7_000, 20_000])
def test_on_a_full_disk_nothing_is_half_written_and_the_run_can_be_begun(recipe, tmp_path, size):
    """The disk is full at the recipe's copy, the first checkpoint, or a file in between."""
    folder = tmp_path / "run"
    with files_of_at_most(size):
        assert "cannot be written" in refused(recipe, folder)
    assert [path.name for path in tmp_path.iterdir()] == (["run"] if folder.exists() else [])
    assert folder.exists() == (size > 2_000) and not list(folder.rglob("*.tmp"))
    assert begin(recipe, folder, *(["--resume"] if folder.exists() else [])).exit_code == 0
    assert same(folder, recipe.parent / "whole")


HOLDER = """
import sys; from pathlib import Path; from retrieval.run.folder import claimed
with claimed(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()
"""


def test_two_processes_cannot_train_one_run(recipe, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(recipe.parent / "whole", folder)
    (folder / "summary.json").unlink()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, folder], **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        for option in ("--resume", "--replace"):
            message = refused(recipe, folder, option)
            assert f"Another process is training this run: process {other.pid}" in message
        other.kill()
    assert begin(recipe, folder, "--resume").exit_code == 0 and len(log(folder)) == 2


def test_replace_replaces_a_run_and_no_other_folder(recipe, tmp_path):
    folder, mine = tmp_path / "run", tmp_path / "mine"
    shutil.copytree(recipe.parent / "whole", folder)
    assert "a complete run, which only a larger train.epochs continues" in refused(recipe, folder)
    bad = ["--set", f"data={{name='core.image_folder', folder='{tmp_path / 'none'}'}}"]
    assert refused(recipe, folder, "--replace", *bad)
    assert same(folder, recipe.parent / "whole")  # the new run could not begin
    assert begin(recipe, folder, "--replace", "--set", "seed=7").exit_code == 0
    assert not same(folder, recipe.parent / "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    mine.mkdir()
    (mine / "thesis.tex").write_text("years")
    for words in ([], ["--replace"]):
        assert "exists already and is not a run" in refused(recipe, mine, *words)
    assert [(p.name, p.read_text()) for p in mine.iterdir()] == [("thesis.tex", "years")]
    both = retrieval("train", recipe, "--resume", "--replace")
    assert "Leave --replace out with --resume" in both.output


def test_a_name_that_cannot_be_a_folders_name_is_refused():
    names = ("", "..", "../../esc", "a/b", "a\\b", " a", "a ", ".hidden", "a\nb", "\x1b[2Ja")
    for name in (*names, "a" * 101):
        with pytest.raises(RecipeError, match=r"name: .*cannot be a folder's name") as caught:
            check_recipe(SMALL | {"name": name})
        assert "\x1b" not in str(caught.value)
    assert check_recipe(SMALL | {"name": "Ünï Köd – 2.1_b"}).name == "Ünï Köd – 2.1_b"


def test_the_suggested_command_resumes_without_replace(monkeypatch):
    words = ["retrieval", "train", "my recipe.toml", "--replace", "--set", "seed=1"]
    monkeypatch.setattr(sys, "argv", words)
    command = "retrieval train 'my recipe.toml' --set seed=1 --resume"
    assert this_command("--resume", without=ONCE) == command
