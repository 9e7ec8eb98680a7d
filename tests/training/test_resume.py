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

from trained_weights import load, log, same_state, summary

TOOLBOX = Path(__file__).with_name("toolbox.py")
RECIPE = f"""
name = "killed"
plugins = ["{TOOLBOX}"]
data.name = "toolbox.digits"
split.by = "class"
sampler = {{ classes = 4, items = 4, batches = 6 }}
backbone.name = "toolbox.net"
combiner.name = "toolbox.local"
generator.name = "toolbox.mover"
loss.name = "toolbox.deadly"
schedule = {{ name = "cosine", warmup = 0.1 }}
train = {{ checkpoint_every = 2, clip_norm = 1.0, real_weight = 0.5 }}
[augmentation]
crop_scale = [0.6, 1.0]
horizontal_flip = 0.5
transforms = ["RandAugment", "RandomErasing"]
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
# Every run is a fork of one process, which imports all modules and plugins, so that a kill costs
# seconds.
DRIVER = """
import json, os, random, signal, sys, time
import sklearn.datasets, torch, torch._dynamo, torch.utils.tensorboard, torchvision.transforms.v2
torch.set_num_threads(1)
from pathlib import Path
from retrieval.recipe.read import read_recipe
from retrieval.training.trainer import train_run

read_recipe(Path(sys.argv[1]))

def start(folder, resume=False, kill_at=0):
    pid = os.fork()
    if pid == 0:
        os.environ["KILL_AT"] = str(kill_at)
        try:
            recipe = read_recipe(Path(folder) / "recipe.toml" if resume else Path(sys.argv[1]))
            train_run(Path(folder), recipe, resume=resume)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return pid

def wait(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

base = Path(sys.argv[2])
began = time.time()
assert wait(start(base / "whole")) == 0
seconds = time.time() - began
random.seed(int(sys.argv[3]))
for i, kill_at in enumerate(json.loads(sys.argv[4])):
    folder = base / f"step{i}"
    assert wait(start(folder, kill_at=kill_at)) == -9, "was not killed"
    assert wait(start(folder, resume=True)) == 0
for i in range(int(sys.argv[5])):
    folder = base / f"time{i}"
    pid = start(folder)
    while not (folder / "checkpoints" / "last.safetensors").exists():
        time.sleep(0.001)
    time.sleep(random.random() * seconds * 0.7)
    os.kill(pid, signal.SIGKILL)
    wait(pid)
    assert wait(start(folder, resume=True)) == 0
"""


def test_killed_at_ten_random_steps_and_three_random_moments(tmp_path, process):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    seed = 20261121
    kills = json.dumps(random.Random(seed).sample(range(1, STEPS + 1), 10))
    settings = {"OMP_NUM_THREADS": "1", "RETRIEVAL_CACHE": str(tmp_path / "cache")}
    arguments = [tmp_path / "recipe.toml", tmp_path, str(seed), kills, "3"]
    outcome = process("-c", DRIVER, *arguments, seconds=600, **settings)
    assert outcome.code == 0, outcome.err
    whole = load(tmp_path / "whole")
    assert len(log(tmp_path / "whole")) == 4
    for name in [*(f"step{i}" for i in range(10)), *(f"time{i}" for i in range(3))]:
        same_state(whole, load(tmp_path / name), name)
        for read in (log, summary):
            assert read(tmp_path / name) == read(tmp_path / "whole")


def test_a_signal_stops_after_the_step_with_a_checkpoint(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("epochs = 2", "epochs = 2000"))
    run = tmp_path / "run"
    command = [sys.executable, "-m", "retrieval.cli", "train", tmp_path / "recipe.toml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "--output", run], **pipes, env=environment) as process:
        while not (run / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "--resume" in stderr and "Traceback" not in stderr
    assert f"after step {load(run)['progress']['total']}" in stderr
