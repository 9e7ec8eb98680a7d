"""Runs of DAML and DAMML that are killed, or whose generator becomes NaN, and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from daml_recipes import BASE as DAML
from retrieval.errors import DataError
from retrieval.recipe.read import check_recipe, to_toml
from retrieval.training.trainer import all_finite, train_run
from trained_weights import load, log, ran, retrieval, same_state

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
"""Recipes and the steps at which they are killed: within each kind of phase, and between two."""

# Forks of one process, which has imported everything, are killed and resumed.
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
            done = -1000  # look_ahead tries a step on copies, which does not count
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


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder of runs: undisturbed ones, and those that were killed and resumed."""
    folder = tmp_path_factory.mktemp("killed")
    for name, (tables, _) in RUNS.items():
        (folder / f"{name}.toml").write_text(to_toml(check_recipe(BASE | tables)))
    kills = json.dumps({name: steps for name, (_, steps) in RUNS.items()})
    words, environment = [sys.executable, "-c", DRIVER, kills], {"OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"cwd": folder, "env": os.environ | environment, "check": False}
    done = subprocess.run(words, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_killed_in_any_phase_and_resumed_it_ends_the_same_bit_for_bit(killed, name):
    tables, kills = RUNS[name]
    folder = killed / name / "whole"
    whole, best = load(folder), load(folder, "best")
    assert set(whole["optimizers"]) == {"metric", "generator"}
    for optimizer in whole["optimizers"].values():
        assert all(state["exp_avg"].any() for state in optimizer["state"].values())
    assert whole["modules"]["generator"] and any("head" in name for name in whole["model"])
    assert any("combiner.out" in name for name in whole["model"]) == ("combiner" in tables)
    for kill in kills:
        run = killed / name / f"step{kill}"
        same_state(whole, load(run), f"killed at step {kill}")
        same_state(best, load(run, "best"), f"killed at step {kill}")
        assert log(run) == log(folder)


# --- a generator that becomes NaN

FRAGILE = '''
import copy
import os
from retrieval.plugin import hookimpl
from retrieval_daml import HardNegativeGenerator

class Fragile(HardNegativeGenerator):
    """A generator whose output becomes NaN at step NAN_AT."""
    steps = 0

    def __deepcopy__(self, memo):
        """`look_ahead` tries a step on copies, which does not count."""
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
    """NaN in the first step, the first epoch or the second. The resumed run ends as without NaN."""
    (tmp_path / "fragile.py").write_text(FRAGILE)
    tables = {
        "plugins": [str(tmp_path / "fragile.py")],
        "generator": {"name": "fragile.hard"},
        "combiner": BOTH_ALGORITHMS["combiner"],
        "phase": [{"name": "both", "epochs": 2}],
    }
    (tmp_path / "recipe.toml").write_text(to_toml(check_recipe(BASE | tables)))
    words, run = ["train", tmp_path / "recipe.toml", "--output"], tmp_path / "run"
    ran(*words, tmp_path / "whole")
    monkeypatch.setenv("NAN_AT", str(stop))
    stopped = retrieval(*words, run)
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
    kept = load(run)
    assert kept["progress"]["total"] == (stop - 1) // 2 * 2
    assert all_finite([*kept["model"].values(), *kept["modules"]["generator"].values()])
    assert "recall_at_1" in ran("evaluate", run)
    ran("report", run, "--output", tmp_path / "r.html")
    ran(*words, run, "--resume")
    same_state(load(tmp_path / "whole"), load(run))


def test_nan_weights_of_a_generator_stop_the_training(tmp_path):
    tables = {
        "miner": None,
        "generator": {"name": "daml.hard_negative", "residual": False, "normalise": False},
        "generator_optimizer": {"name": "SGD", "lr": 1e38},
        "schedule": {},
        "train": {"epochs": 3, "device": "cpu", "checkpoint_every": 1},
    }
    recipe = check_recipe({k: v for k, v in (BASE | tables).items() if v is not None})
    says = r"stopped at step 1 \(epoch 1\): weights of the generator became NaN.*last good checkp"
    with pytest.raises(DataError, match=says):
        train_run(tmp_path / "run", recipe)
    kept = load(tmp_path / "run")
    assert all_finite([*kept["model"].values(), *kept["modules"]["generator"].values()])
