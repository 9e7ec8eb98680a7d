from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from comparing import LOSSES, PLUGIN, RECIPE as COMPARED
from retrieval.recipe.read import Recipe, check_recipe, to_toml
from retrieval.training.trainer import Trainer, train_run
from torch.distributed import TCPStore
from trained_weights import apart, log, same, weights

TOOLBOX = str(Path(__file__).with_name("toolbox.py"))
BASE: dict[str, Any] = {
    "name": "test",
    "plugins": [TOOLBOX],
    "data": {"name": "toolbox.digits"},
    "split": {"by": "class"},
    "sampler": {"classes": 4, "items": 4, "batches": 5},
    "backbone": {"name": "toolbox.net"},
    "head": {"embedding_size": 16},
    "loss": {"name": "toolbox.deadly"},
    "train": {"epochs": 2},
}


@pytest.fixture
def make(monkeypatch, tmp_path):
    """A function that returns the recipe `BASE` with some tables replaced; `None` removes one."""
    monkeypatch.setenv("RETRIEVAL_CACHE", str(tmp_path / "cache"))

    def build(**tables: Any) -> Recipe:
        return check_recipe({k: v for k, v in {**BASE, **tables}.items() if v is not None})

    return build


@pytest.fixture
def write(tmp_path):
    """A function that writes a recipe for comparisons: `write("triplet", train={…})`."""
    (tmp_path / "mine.py").write_text(PLUGIN, encoding="utf-8")

    def write_recipe(name: str, file: str | None = None, **tables: Any) -> Path:
        path = tmp_path / f"{file or name}.toml"
        table = {"name": name, **COMPARED, "loss": LOSSES.get(name, LOSSES["triplet"]), **tables}
        table = {k: v for k, v in table.items() if v is not None}
        path.write_text(tomli_w.dumps(table), encoding="utf-8")
        return path

    return write_recipe


@pytest.fixture
def resumes(monkeypatch, tmp_path):
    """A function that stops a run before a batch, resumes it, and compares it to a whole run."""

    def check(recipe: Any, batch: int) -> None:
        whole, stopped = tmp_path / "whole", tmp_path / "stopped"
        train_run(whole, recipe)
        real, batches = Trainer._train_batch, itertools.count(1)

        def stop(self: Any, *arguments: Any) -> Any:
            if next(batches) == batch:
                raise KeyboardInterrupt
            return real(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_train_batch", stop)
            with pytest.raises(KeyboardInterrupt):
                train_run(stopped, recipe)
        train_run(stopped, recipe, resume=True)
        assert same(whole, stopped) and log(whole) == log(stopped)

    return check


@pytest.fixture(scope="session")
def forks():
    """A process of forks.py, which has imported torch once for all groups of processes."""
    own = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, str(Path(__file__).with_name("forks.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env={**own, "OMP_NUM_THREADS": "1"}) as process:
        yield process
        process.communicate()  # closes its input, so it ends


@pytest.fixture
def processes(forks, tmp_path):
    """A function that runs a script of this folder in a gloo group: `processes(2, SCRIPT)`.

    It returns the first process's output. If a process fails, the test fails with the output of all
    processes. One process runs without a group.
    """

    def run(world: int, script: str, *arguments: str) -> str:
        # created here, so that no other program takes the port while the processes start
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        files = [[folder / f"{rank}.{name}" for name in ("out", "err")] for rank in range(world)]
        group = {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        members = []
        for rank, pair in enumerate(files):
            environment = {"RETRIEVAL_CACHE": os.environ["RETRIEVAL_CACHE"]}
            if world > 1:
                environment |= {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            members.append({"files": [str(file) for file in pair], "environment": environment})
        words = [str(Path(__file__).with_name(script)), *arguments]
        forks.stdin.write(json.dumps({"arguments": words, "processes": members}) + "\n")
        forks.stdin.flush()
        codes = json.loads(forks.stdout.readline())
        outputs = [file.read_text() for pair in files for file in pair]
        assert codes == [0] * world, f"{codes}\n" + "\n".join(outputs)
        return outputs[0]

    return run


@pytest.fixture
def trains_as_one(processes, tmp_path):
    """A function that trains recipes in several processes and in one, and compares the runs.

    The run of several processes has the recipe's name in `recipes`, the other run `NAME one`. The
    function returns the lines that `train_process.py` printed.
    """

    def check(
        recipes: dict[str, Recipe], world: int = 2, within: float = 2e-5, loss: float = 1e-4
    ) -> list[dict[str, Any]]:
        for name, recipe in recipes.items():
            (tmp_path / f"{name}.toml").write_text(to_toml(recipe))
            train_run(tmp_path / f"{name} one", recipe)
        output = processes(world, "train_process.py", str(tmp_path), *recipes)
        for name in recipes:
            one, several = tmp_path / f"{name} one", tmp_path / name
            assert apart(one, several) < within, name
            for which in ("last", "best"):
                expected, actual = weights(one, which), weights(several, which)
                assert expected.keys() == actual.keys()
                for key, value in expected.items():
                    torch.testing.assert_close(actual[key], value, rtol=1e-4, atol=1e-5)
            for ours, theirs in zip(log(one), log(several), strict=True):
                assert ours["lr"] == theirs["lr"]
                assert ours["loss"] == pytest.approx(theirs["loss"], rel=loss)
        return answers(output)

    return check


def answers(output: str) -> list[dict[str, Any]]:
    """The lines of JSON that `train_process.py` printed."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]
