"""Runs of DAML and DAMML that are killed, or whose generator becomes NaN: what is kept, and what
they end as when resumed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from daml_recipes import BASE as DAML
from retrieval.cli.app import app
from retrieval.errors import DataError
from retrieval.recipe.read import check_recipe, to_toml
from retrieval.run import checkpoint
from retrieval.training.trainer import train

BASE: dict[str, Any] = {
    **DAML,
    "name": "killed",
    "miner": {"name": "daml.semi_hard"},
    "optimizer": {"lr_factor": {"head": 10.0}},
    "generator_optimizer": {"name": "Adam", "lr": 3e-4},
    "schedule": {"name": "cosine", "warmup": 0.2},
    "train": {
        "device": "cpu",
        "checkpoint_every": 2,
        "real_weight": 0.5,
        "mine": "after",
        "clip_norm": 1.0,
    },
}
METRIC = ["backbone", "head", "loss"]
ALGORITHM_1: dict[str, Any] = {
    "phase": [
        {"name": "metric", "epochs": 1, "train": METRIC, "synthetic": False},
        {"name": "generator", "epochs": 1, "train": ["generator"]},
        {"name": "both", "epochs": 1, "lr": 5e-4, "generator_lr": 1e-4},
    ]
}
BOTH_ALGORITHMS: dict[str, Any] = {
    "combiner": {"name": "daml.discriminator", "metrics": 4, "hidden": 8, "start": 0.5},
    "phase": [
        {"name": "metric", "epochs": 1, "train": METRIC, "synthetic": False},
        {"name": "adversaries", "epochs": 1, "train": ["generator", "combiner"]},
        {"name": "all", "epochs": 2},
    ],
}
RUNS = {"generator": (ALGORITHM_1, [5, 7]), "discriminator": (BOTH_ALGORITHMS, [3, 7, 15])}
"""Recipes and the steps at which they are killed: amid each kind of phase, and at a border."""

# one process imports everything and runs undisturbed; each `retrieval train` that is killed or
# resumed is a fork of it
DRIVER = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
from retrieval.cli.app import app
from retrieval.training import trainer
from retrieval.training.step import Step

def retrieval(*arguments, kill_at=0):
    pid = os.fork()
    if pid == 0:
        done = 0
        call, ahead = Step.__call__, trainer.look_ahead
        def not_counted(*args):
            nonlocal done
            done = -1000  # what is tried on copies is not a step
            seen, done = ahead(*args), 0
            return seen
        trainer.look_ahead = not_counted
        def counted(self, *args):
            nonlocal done
            done += 1
            if done == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(self, *args)
        Step.__call__ = counted
        try:
            app(arguments, standalone_mode=False)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for recipe, kills in json.loads(sys.argv[1]).items():
    app(["train", f"{recipe}.toml", "--output", f"{recipe}/whole"], standalone_mode=False)
    for step in kills:
        run = f"{recipe}/step{step}"
        code = retrieval("train", f"{recipe}.toml", "--output", run, kill_at=step)
        assert code == -9, "was not killed"
        assert retrieval("train", f"{recipe}.toml", "--output", run, "--resume") == 0
"""


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def figures(folder: Path) -> list[dict[str, Any]]:
    """The log without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in lines]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder of runs: undisturbed ones, and those that were killed and resumed."""
    folder = tmp_path_factory.mktemp("killed")
    for name, (tables, _) in RUNS.items():
        (folder / f"{name}.toml").write_text(to_toml(check_recipe(BASE | tables)))
    kills = json.dumps({name: steps for name, (_, steps) in RUNS.items()})
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, kills],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_killed_in_any_phase_and_resumed_it_ends_the_same_bit_for_bit(killed, name):
    tables, kills = RUNS[name]
    whole = checkpoint.load(killed / name / "whole" / "checkpoints" / "last.safetensors")
    assert set(whole["optimizers"]) == {"metric", "generator"}
    for optimizer in whole["optimizers"].values():
        assert all(state["exp_avg"].any() for state in optimizer["state"].values())
    assert whole["modules"]["generator"] and any("head" in name for name in whole["model"])
    assert any("combiner.out" in name for name in whole["model"]) == ("combiner" in tables)
    best = checkpoint.load(killed / name / "whole" / "checkpoints" / "best.safetensors")
    for kill in kills:
        run = killed / name / f"step{kill}"
        again = checkpoint.load(run / "checkpoints" / "last.safetensors")
        for part in ("model", "modules", "optimizers", "schedules", "random", "progress"):
            assert same(whole[part], again[part]), f"{part} after a kill at step {kill}"
        assert same(best, checkpoint.load(run / "checkpoints" / "best.safetensors"))
        assert figures(run) == figures(killed / name / "whole")


# --- a generator that becomes NaN

FRAGILE = '''
import copy
import os
from retrieval.plugin import hookimpl
from retrieval_daml import HardNegativeGenerator

class Fragile(HardNegativeGenerator):
    """A generator whose output becomes NaN at the step that NAN_AT says."""
    steps = 0

    def __deepcopy__(self, memo):
        """A copy is made to look ahead, which is not a step."""
        made = self.__class__.__new__(self.__class__)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo), steps=-1000)
        return made

    def forward(self, anchor, positive, negative):
        self.steps += 1
        made = super().forward(anchor, positive, negative)
        return made * float("nan") if self.steps == int(os.environ.get("NAN_AT", "0")) else made

@hookimpl
def retrieval_generators():
    return {"hard": Fragile}
'''


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_what_a_nan_leaves_is_evaluated_reported_and_resumed(tmp_path, monkeypatch, stop):
    """In the first step, the first epoch and the second; resumed, it ends as the run that never had
    one.
    """
    (tmp_path / "fragile.py").write_text(FRAGILE)
    tables = {
        "plugins": [str(tmp_path / "fragile.py")],
        "generator": {"name": "fragile.hard"},
        "combiner": BOTH_ALGORITHMS["combiner"],
        "phase": [{"name": "both", "epochs": 2}],
    }
    (tmp_path / "recipe.toml").write_text(to_toml(check_recipe(BASE | tables)))

    def retrieval(*arguments: str) -> Any:
        return CliRunner().invoke(app, list(arguments))

    train = ["train", str(tmp_path / "recipe.toml"), "--output"]
    assert retrieval(*train, str(tmp_path / "whole")).exit_code == 0
    monkeypatch.setenv("NAN_AT", str(stop))
    run = tmp_path / "run"
    stopped = retrieval(*train, str(run))
    assert isinstance(stopped.exception, DataError)
    epoch = 1 + (stop - 1) // 4
    assert (
        str(stopped.exception)
        == f"Training stopped at step {stop} (epoch {epoch}): the generator's output became NaN or"
        " infinite (generator fragile.hard). The last good checkpoint is"
        f" {run / 'checkpoints' / 'last.safetensors'}. Try a smaller learning rate, [train]"
        ' clip_norm, or precision = "no".'
    )
    monkeypatch.delenv("NAN_AT")
    kept = checkpoint.load(run / "checkpoints" / "last.safetensors")
    assert kept["progress"]["total"] == (stop - 1) // 2 * 2
    for part in (kept["model"], kept["modules"]["generator"]):
        assert all(torch.isfinite(value).all() for value in part.values())
    done = retrieval("evaluate", str(run))
    assert done.exit_code == 0 and "recall_at_1" in done.output, done.output
    assert retrieval("report", str(run), "--output", str(tmp_path / "r.html")).exit_code == 0
    assert retrieval(*train, str(run), "--resume").exit_code == 0
    whole, again = (
        checkpoint.load(tmp_path / name / "checkpoints" / "last.safetensors")
        for name in ("whole", "run")
    )
    for part in ("model", "modules", "optimizers", "schedules", "random", "progress"):
        assert same(whole[part], again[part]), part


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (1e12, r"step \d+ \(epoch 1\): .*generator"),
        (1e38, r"step 1 \(epoch 1\): weights of the generator became NaN"),
    ],
    ids=["output", "weights"],
)
def test_a_generator_that_becomes_nan_stops_with_the_steps_number(tmp_path, rate, words):
    tables = {
        "miner": None,
        "generator": {"name": "daml.hard_negative", "residual": False, "normalize": False},
        "generator_optimizer": {"name": "SGD", "lr": rate},
        "schedule": {},
        "train": {"epochs": 3, "device": "cpu", "checkpoint_every": 1},
    }
    recipe = check_recipe({k: v for k, v in (BASE | tables).items() if v is not None})
    with pytest.raises(DataError, match=rf"Training stopped at {words}.*last good checkpoint is"):
        train(tmp_path / "run", recipe)
    kept = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.safetensors")
    for part in (kept["model"], kept["modules"]["generator"]):
        assert all(torch.isfinite(value).all() for value in part.values())
