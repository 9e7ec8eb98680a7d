"""The run's folder: whole or not there, one process at a time, and never a dead end."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from retrieval.cli.app import app
from retrieval.errors import DataError, RecipeError
from retrieval.recipe.read import check_recipe, to_toml
from retrieval.run import checkpoint
from retrieval.training.trainer import train

Make = Callable[..., Any]
TABLE: dict[str, Any] = {
    "name": "small",
    "data": {"name": "core.digits"},
    "split": {"by": "class"},
    "sampler": {"classes": 4, "items": 4, "batches": 4},
    "backbone": {"name": "core.convnet", "size": 8, "width": 2, "depth": 2},
    "head": {"embedding_size": 4},
    "loss": {"name": "pml.contrastive"},
    "train": {"epochs": 2, "device": "cpu"},
}


def retrieval(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def sentence(*words: object) -> str:
    """What a command that fails says."""
    result = retrieval(*words)
    assert result.exit_code and isinstance(result.exception, DataError | RecipeError), result.output
    return str(result.exception)


def weights(folder: Path, name: str = "last") -> Any:
    return checkpoint.load(folder / "checkpoints" / f"{name}.safetensors")["model"]


def same(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe's file; beside it `whole`, the run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "recipe.toml").write_text(to_toml(check_recipe(TABLE)))
    train(folder / "whole", check_recipe(TABLE))
    return folder / "recipe.toml"


# one process imports torch; each run is a fork of it, killed at a chosen call of the training code
# before its first checkpoint is whole. The first one is not killed: it says at which call the
# folder appears, at which its first checkpoint, and how many calls there are
DRIVER = """
import json, os, random, signal, sys
from pathlib import Path
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


def test_killed_before_its_first_checkpoint_a_run_can_be_begun(
    recipe: Path, tmp_path: Path
) -> None:
    """By --resume where there is a folder, by the same command where there is none; both end as if
    nothing had been.
    """
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(recipe), str(tmp_path), "13"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    begun = 0
    for i in range(8):
        folder = tmp_path / str(i)
        if (folder / "checkpoints" / "last.safetensors").is_file():
            assert "a run that was stopped. Resume it" in sentence(
                "train", recipe, "--output", folder
            )
            result = retrieval("train", recipe, "--output", folder, "--resume")
        elif folder.exists():
            begun += 1
            assert "stopped before its first checkpoint. Resume it (--resume" in sentence(
                "train", recipe, "--output", folder
            )
            result = retrieval("train", recipe, "--output", folder, "--resume")
            assert "has no checkpoint yet: training starts from the beginning" in result.output
        else:
            assert "it holds no recipe.toml" in sentence(
                "train", recipe, "--output", folder, "--resume"
            )
            result = retrieval("train", recipe, "--output", folder)
        assert result.exit_code == 0, result.exception
        assert same(folder, recipe.parent / "whole")
        assert not list(tmp_path.glob(f".{i}.*"))
    assert begun >= 3


@pytest.mark.parametrize("room", [0, 200, 2_000, 7_000, 20_000])
def test_on_a_full_disk_nothing_is_half_written_and_the_run_can_be_begun(
    recipe: Path, tmp_path: Path, room: int
) -> None:
    """No file may grow beyond `room`: from the recipe's copy to the first checkpoint, each is
    refused in turn.
    """
    folder = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        said = sentence("train", recipe, "--output", folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be written" in said
    assert [path.name for path in tmp_path.iterdir()] == (["run"] if folder.exists() else [])
    assert folder.exists() == (room > 2_000)
    again = ["train", recipe, "--output", folder, *(["--resume"] if folder.exists() else [])]
    assert retrieval(*again).exit_code == 0
    assert same(folder, recipe.parent / "whole")


def test_two_processes_cannot_train_one_run(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(recipe.parent / "whole", folder)
    (folder / "summary.json").unlink()
    code = (
        "import sys; from pathlib import Path; from retrieval.run.folder import claimed\nwith"
        " claimed(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        for words in (["--resume"], ["--replace"]):
            said = sentence("train", recipe, "--output", folder, *words)
            assert f"Another process is training this run: process {other.pid}" in said
        other.kill()
    assert retrieval("train", recipe, "--output", folder, "--resume").exit_code == 0
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_replace_puts_a_new_run_in_the_place_of_an_old_one_and_of_nothing_else(
    recipe: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(recipe.parent / "whole", folder)
    assert "a complete run, which goes on with a larger train.epochs" in sentence(
        "train", recipe, "--output", folder
    )
    bad = ["--set", "data.name=core.image_folder", "--set", f"data.folder={tmp_path / 'none'}"]
    assert sentence("train", recipe, "--output", folder, "--replace", *bad)
    assert same(folder, recipe.parent / "whole")  # a run that cannot begin replaces nothing
    assert (
        retrieval("train", recipe, "--output", folder, "--replace", "--set", "seed=7").exit_code
        == 0
    )
    assert not same(folder, recipe.parent / "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    for words in ([], ["--replace"]):
        assert "holds no run" in sentence("train", recipe, "--output", tmp_path / "mine", *words)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years"
    assert (
        "Leave --replace out with --resume"
        in retrieval("train", recipe, "--resume", "--replace").output
    )


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../../esc",
        "a/b",
        "/tmp/a",
        "a\\b",
        " a",
        "a ",
        ".hidden",
        "a\nb",
        "\x1b[2Ja",
        "a" * 101,
    ],
)
def test_a_name_that_is_no_folders_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError, match=r"name: .*cannot be a folder's name") as refused:
        check_recipe(TABLE | {"name": name})
    assert "\x1b" not in str(refused.value)
    assert check_recipe(TABLE | {"name": "Ünï Köd – 2.1_b"}).name == "Ünï Köd – 2.1_b"


def test_the_command_to_go_on_with_replaces_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from retrieval.cli.common import this_command
    from retrieval.cli.train import ONCE

    monkeypatch.setattr(
        sys, "argv", ["retrieval", "train", "my recipe.toml", "--replace", "--set", "seed=1"]
    )
    assert (
        this_command("--resume", without=ONCE)
        == "retrieval train 'my recipe.toml' --set seed=1 --resume"
    )
