"""`retrieval demo`: its files and output, and the next commands that it suggests."""

from __future__ import annotations

import re
import shlex
from functools import partial

from PIL import Image
from retrieval.cli.demo import CONTENT


def test_the_demo_leaves_what_it_says_and_its_next_commands_work(tmp_path, shown, process):
    settings = {"RETRIEVAL_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "2"}
    run = partial(process, "-m", "retrieval.cli", cwd=tmp_path, seconds=600, **settings)
    done = run("demo")
    assert done.code == 0, done.err
    demo = tmp_path / "demo"
    for file in ("run/summary.json", "bundle/manifest.json", "bundle/encoder.onnx"):
        assert (demo / file).is_file(), file
    assert (demo / "index/index.json").is_file()
    with Image.open(demo / "neighbours.png") as picture:
        # Ten rows, each a query and its ten neighbours.
        assert picture.height > picture.width > 800
    shown(demo / "neighbours.png", "neighbours.png", 30)
    left = {folder.name: len(list(folder.iterdir())) for folder in (demo / "queries").iterdir()}
    assert left == {str(digit): 1 for digit in range(10)}
    queries = re.findall(r"^   a (\d) finds (?:\d ?){10}$", done.out, re.MULTILINE)
    assert queries == [*"0123456789"]
    row = r"^ +(recall_at_1|map_at_r) +([\d.]+ +[\d.]+)$"
    figures = dict(re.findall(row, done.out, re.MULTILINE))
    trained, raw = map(float, figures["map_at_r"].split())
    assert trained > raw + 0.2
    assert "raw pixels" in done.out
    commands = re.findall(r"^  (retrieval .+)$", done.out, re.MULTILINE)
    assert [shlex.split(c)[1] for c in commands] == ["serve", "search", "train"]
    search = run(*shlex.split(commands[1])[1:])
    assert search.code == 0, search.err
    assert search.out.count("images/") + search.out.count(".png") >= 10
    again = run(*shlex.split(commands[2])[1:], "--set", "train.epochs=1")
    assert again.code == 0, again.err
    assert (demo / "second-run" / "summary.json").is_file()
    assert {path.name for path in demo.iterdir() if path.name[0] != "."} == CONTENT

    second = run("demo")
    assert second.code == 2
    assert "exists already" in second.err and "Traceback" not in second.err
