"""A run that is killed at any step and resumed ends with the same weights, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from retrieval.run import checkpoint

TOOLBOX = Path(__file__).with_name("toolbox.py")
RECIPE = f"""
name = "killed"
plugins = ["{TOOLBOX}"]
[data]
name = "toolbox.digits"
[split]
by = "class"
[sampler]
classes = 4
items = 4
batches = 6
[augmentation]
crop_scale = [0.6, 1.0]
horizontal_flip = 0.5
transforms = ["RandAugment", "RandomErasing"]
[backbone]
name = "toolbox.net"
[combiner]
name = "toolbox.local"
[generator]
name = "toolbox.mover"
[loss]
name = "toolbox.deadly"
[schedule]
name = "cosine"
warmup = 0.1
[train]
checkpoint_every = 2
clip_norm = 1.0
real_weight = 0.5
[[phase]]
name = "metric"
epochs = 2
train = ["backbone", "head", "combiner", "loss"]
synthetic = false
[[phase]]
name = "both"
epochs = 2
"""
STEPS = 24
# one process imports torch; each run is a fork of it, so that ten kills cost seconds
DRIVER = """
import json, os, sys, time, signal, random
import torch, torch._dynamo, sklearn.datasets, torch.utils.tensorboard, torchvision.transforms.v2  # once, not in every fork
torch.set_num_threads(1)
from pathlib import Path
from retrieval.recipe.read import read_recipe
from retrieval.training.trainer import train

read_recipe(Path(sys.argv[1]))  # finds and imports the plugins once, not in every fork

def child(folder, resume, kill_at=0):
    pid = os.fork()
    if pid == 0:
        os.environ["KILL_AT"] = str(kill_at)
        try:
            made = read_recipe(Path(folder) / "recipe.toml" if resume else Path(sys.argv[1]))
            train(Path(folder), made, resume=resume)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return pid

def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

base = Path(sys.argv[2])
began = time.time()
assert wait(child(base / "whole", False)) == 0
took = time.time() - began
random.seed(int(sys.argv[3]))
for i, kill_at in enumerate(json.loads(sys.argv[4])):
    folder = base / f"step{i}"
    assert wait(child(folder, False, kill_at)) == -9, "was not killed"
    assert wait(child(folder, True)) == 0
for i in range(int(sys.argv[5])):
    folder = base / f"time{i}"
    pid = child(folder, False)
    while not (folder / "checkpoints" / "last.safetensors").exists():
        time.sleep(0.001)
    time.sleep(random.random() * took * 0.7)
    os.kill(pid, signal.SIGKILL)
    wait(pid)
    assert wait(child(folder, True)) == 0
"""  # noqa: E501


def test_killed_at_ten_random_steps_and_three_random_moments(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    seed = 20261121
    kills = random.Random(seed).sample(range(1, STEPS + 1), 10)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RETRIEVAL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            DRIVER,
            str(tmp_path / "recipe.toml"),
            str(tmp_path),
            str(seed),
            json.dumps(kills),
            "3",
        ],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    whole = checkpoint.load(tmp_path / "whole" / "checkpoints" / "last.safetensors")
    log = _figures(tmp_path / "whole")
    assert len(log) == 4
    names = [f"step{i}" for i in range(10)] + [f"time{i}" for i in range(3)]
    for name in names:
        again = checkpoint.load(tmp_path / name / "checkpoints" / "last.safetensors")
        for part in ("model", "modules", "optimizers", "random"):
            _same(whole[part], again[part], f"{name} {part}")
        assert again["progress"] == whole["progress"]
        assert _figures(tmp_path / name) == log
        assert (tmp_path / name / "summary.json").read_text() == (
            tmp_path / "whole" / "summary.json"
        ).read_text()


def _figures(folder: Path) -> list[dict[str, float]]:
    """The log without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in lines]


def _same(one: object, other: object, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert isinstance(other, dict)
        assert one.keys() == other.keys(), where
        for key in one:
            _same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert isinstance(other, list | tuple)
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            _same(a, b, f"{where}/{i}")
    else:
        assert one == other, where


def test_a_signal_stops_after_the_step_with_a_checkpoint(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("epochs = 2", "epochs = 2000"))
    command = [
        sys.executable,
        "-m",
        "retrieval.cli",
        "train",
        str(tmp_path / "recipe.toml"),
        "--output",
        str(tmp_path / "run"),
    ]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        last = tmp_path / "run" / "checkpoints" / "last.safetensors"
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not metrics.exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "--resume" in stderr
    assert "Traceback" not in stderr
    stopped = checkpoint.load(last)["progress"]["total"]
    assert f"after step {stopped}" in stderr
