"""`retrieval demo`, whole: what it leaves and prints, and that the next commands it names work."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from PIL import Image


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "retrieval.cli", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RETRIEVAL_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "2"},
    )


def test_the_demo_leaves_what_it_says_and_its_next_commands_work(tmp_path, shown):
    done = run("demo", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    demo = tmp_path / "demo"
    for file in (
        "run/summary.json",
        "bundle/manifest.json",
        "bundle/encoder.onnx",
        "index/index.json",
    ):
        assert (demo / file).is_file(), file
    with Image.open(demo / "neighbours.png") as picture:
        # ten rows, each a query with its ten neighbours
        assert picture.height > picture.width > 800
    shown(demo / "neighbours.png", "neighbours.png", 30)  # the one in README and on the front page
    left = {folder.name: len(list(folder.iterdir())) for folder in (demo / "queries").iterdir()}
    assert left == {str(digit): 1 for digit in range(10)}
    assert re.findall(r"^   a (\d) finds (?:\d ?){10}$", done.stdout, re.MULTILINE) == [
        *"0123456789"
    ]
    figures = dict(
        re.findall(r"^ +(recall_at_1|map_at_r) +([\d.]+ +[\d.]+)$", done.stdout, re.MULTILINE)
    )
    trained, raw = map(float, figures["map_at_r"].split())
    assert trained > raw + 0.2
    assert "raw pixels" in done.stdout
    commands = re.findall(r"^  (retrieval .+)$", done.stdout, re.MULTILINE)
    assert [shlex.split(c)[1] for c in commands] == ["serve", "search", "train"]
    search = run(*shlex.split(commands[1])[1:], folder=tmp_path)
    assert search.returncode == 0, search.stderr
    assert search.stdout.count("images/") + search.stdout.count(".png") >= 10
    again = run(*shlex.split(commands[2])[1:], "--set", "train.epochs=1", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (demo / "second-run" / "summary.json").is_file()

    taken = run("demo", folder=tmp_path)
    assert taken.returncode == 2
    assert "exists already" in taken.stderr
    assert "Traceback" not in taken.stderr
