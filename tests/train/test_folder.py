"""The run's folder: whole or not there, one process at a time, and never a dead end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from limits import files_of_at_most
from retrieval.errors import DataError, RecipeError
from retrieval.recipe.read import check_recipe, to_toml
from retrieval.training.trainer import train
from trained_weights import SMALL, log, retrieval, same


def begin(recipe: Path, folder: Path, *words: str) -> Any:
    return retrieval("train", recipe, "--output", folder, *words)


def refused(recipe: Path, folder: Path, *words: str) -> str:
    """What the command says, which must fail."""
    result = begin(recipe, folder, *words)
    assert result.exit_code and isinstance(result.exception, DataError | RecipeError), result.output
    return str(result.exception)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe's file; beside it `whole`, the run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "recipe.toml").write_text(to_toml(check_recipe(SMALL)))
    train(folder / "whole", check_recipe(SMALL))
    return folder / "recipe.toml"


# one process imports torch; each run is a fork of it, killed at a chosen call of the training code
# before its first checkpoint is whole. The first one is not killed: it says at which call the
# folder appears, at which its first checkpoint, and how many calls there are
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

code, said = run("measured")
assert code == 0, code
appears, kept, ends = json.loads(said)
draw = random.Random(int(seed))
parts = ((1, appears, 3), (appears, kept, 4), (kept, ends, 1))
moments = [call for first, last, count in parts for call in draw.sample(range(first, last), count)]
for i, call in enumerate(moments):
    assert run(str(i), call)[0] == -9
"""


def test_killed_before_its_first_checkpoint_a_run_can_be_begun(recipe, tmp_path, process):
    done = process("-c", DRIVER, recipe, tmp_path, "13", seconds=600, OMP_NUM_THREADS="1")
    assert done.code == 0, done.err
    begun = 0
    for i in range(8):
        folder = tmp_path / str(i)
        if (folder / "checkpoints" / "last.safetensors").is_file():
            assert "a run that was stopped. Resume it" in refused(recipe, folder)
            result = begin(recipe, folder, "--resume")
        elif folder.exists():
            begun += 1
            said = refused(recipe, folder)
            assert "stopped before its first checkpoint. Resume it (--resume" in said
            result = begin(recipe, folder, "--resume")
            assert "has no checkpoint yet: training starts from the beginning" in result.output
        else:
            assert "it holds no recipe.toml" in refused(recipe, folder, "--resume")
            result = begin(recipe, folder)
        assert result.exit_code == 0, result.exception
        assert same(folder, recipe.parent / "whole")
        assert not list(tmp_path.glob(f".{i}.*"))
    assert begun >= 3


@pytest.mark.parametrize("room", [0, 200, 2_000, 7_000, 20_000])
def test_on_a_full_disk_nothing_is_half_written_and_the_run_can_be_begun(recipe, tmp_path, room):
    folder = tmp_path / "run"
    with files_of_at_most(room):  # from the recipe's copy to the first checkpoint
        assert "cannot be written" in refused(recipe, folder)
    assert [path.name for path in tmp_path.iterdir()] == (["run"] if folder.exists() else [])
    assert folder.exists() == (room > 2_000) and not list(folder.rglob("*.tmp"))
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
        for words in (["--resume"], ["--replace"]):
            said = refused(recipe, folder, *words)
            assert f"Another process is training this run: process {other.pid}" in said
        other.kill()
    assert begin(recipe, folder, "--resume").exit_code == 0 and len(log(folder)) == 2


def test_replace_puts_a_new_run_in_the_place_of_an_old_one_and_of_nothing_else(recipe, tmp_path):
    folder, mine = tmp_path / "run", tmp_path / "mine"
    shutil.copytree(recipe.parent / "whole", folder)
    assert "a complete run, which only a larger train.epochs continues" in refused(recipe, folder)
    bad = ["--set", f"data={{name='core.image_folder', folder='{tmp_path / 'none'}'}}"]
    assert refused(recipe, folder, "--replace", *bad)
    assert same(folder, recipe.parent / "whole")  # a run that cannot begin replaces nothing
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


NO_NAMES = ["", ".", "..", "../../esc", "a/b", "/tmp/a", "a\\b", " a", "a ", ".hidden", "a\nb"]


@pytest.mark.parametrize("name", [*NO_NAMES, "\x1b[2Ja", "a" * 101])
def test_a_name_that_is_no_folders_name_is_refused(name):
    with pytest.raises(RecipeError, match=r"name: .*cannot be a folder's name") as refused:
        check_recipe(SMALL | {"name": name})
    assert "\x1b" not in str(refused.value)
    assert check_recipe(SMALL | {"name": "Ünï Köd – 2.1_b"}).name == "Ünï Köd – 2.1_b"


def test_the_command_to_go_on_with_replaces_nothing_again(monkeypatch):
    from retrieval.cli.common import this_command
    from retrieval.cli.train import ONCE

    words = ["retrieval", "train", "my recipe.toml", "--replace", "--set", "seed=1"]
    monkeypatch.setattr(sys, "argv", words)
    again = "retrieval train 'my recipe.toml' --set seed=1 --resume"
    assert this_command("--resume", without=ONCE) == again
