"""Error messages for typing mistakes say what to write instead."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from refusals import refusal
from retrieval.base.folder_kinds import instead
from retrieval.cli.common import BYTES, PIXELS
from retrieval.errors import StoreError, did_you_mean

RECIPE = """
data.name = "core.digits"
split.by = "class"
sampler = { classes = 5, batches = 3 }
backbone = { name = "core.convnet", width = 4, depth = 2 }
loss = { name = "pml.contrastive", pos_margin = 0.1 }
miner.name = "pml.multi_similarity"
train.epochs = 1
"""
SIZED = """
from pytorch_metric_learning.losses import ArcFaceLoss
from retrieval.plugin import hookimpl

def arc(size: int, number: int):
    return ArcFaceLoss(num_classes=number, embedding_size=size)

retrieval_losses = hookimpl(lambda: {'arc': arc})
"""


def changed(*changes: str) -> list[str]:
    """Return the arguments that check the recipe with changes."""
    return ["check", "r.toml", *(word for change in changes for word in ("--set", change))]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "r.toml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["train.device=gpu"], "Did you mean 'cuda'?"),
        (["backbone.name=resnet50"], 'name = "core.torchvision", model = "resnet50".'),
        (["optimizer.weight_decay=0.1"], "write options.weight_decay = 0.1 for all"),
        (["schedule.name=StepLR"], "[schedule] options.step_size: is required"),
        (["schedule.name=StepLR", "schedule.step_size=3"], "write options.step_size."),
        (["data.name=core.image_folder", "data.folder="], "[data] folder: is empty; name a file"),
        (["sampler.classes=50"], "takes 50 classes, but only 5 train. Set classes = 5 or fewer."),
        (["sampler.classes=50", "sampler.items=20"], "a batch takes 50 classes, but only 5 train."),
        (["data.name=core.image_folder", "data.folder=gone"], "[data] folder: gone is not a fold"),
        (["backbone.size=2", "backbone.depth=4"], "core.convnet refuses its parameters: size 2"),
    ],
)
def test_the_error_says_how_to_correct_the_recipe(recipe, cli, changes, words):
    done = cli(*changed(*changes))
    assert done.code == 2 and words in done.err and "Traceback" not in done.err, done
    assert done.err.startswith("Error: r.toml")


def test_another_component_drops_the_old_parameters(recipe, cli):
    # A parameter of the same component stays. The order of the changes does not matter.
    assert "pos_margin" in cli(*changed("miner.pos_margin=1")).err
    done = cli(*changed("loss.m=0.3", "loss.name=pml.circle"))
    assert done.code == 0, done.err
    done = cli(*changed("loss=none", "learner.name=core.pca", "learner.n_components=4"))
    assert done.code == 0 and "fitted" in done.out, done.err
    done = cli(*changed("miner=none"))
    assert done.code == 0 and "mined" not in done.out, done.err


def test_none_removes_a_key(recipe, cli):
    done = cli(*changed("sampler.batches=none", "train.epochs=none"))
    assert done.code == 0 and "10 epochs" in done.out and "3 batches" not in done.out, done.err
    assert "[data] must name a dataset" in cli(*changed("data.name=none")).err
    done = cli(*changed("sampler.batchs=none", "trian.epochs=none"))
    assert done.code == 2 and "2 problems" in done.err and "Did you mean 'batches'?" in done.err


def test_the_sizes_of_a_loss_are_checked(recipe, cli):
    Path("sized.py").write_text(SIZED)
    for size, number in ((32, 5), (64, 3)):
        sizes = (f"loss.size={size}", f"loss.number={number}")
        done = cli(*changed("miner=none", "loss.name=sized.arc", *sizes), "--plugin", "sized.py")
        assert done.code == 2 and f"weights have the shape ({size}, {number})" in done.err, done
        assert "5 classes (num_classes)" in done.err
        assert "width 64 (embedding_size)" in done.err


def test_an_output_that_is_a_file_is_refused(recipe, cli, tmp_path):
    from retrieval.export.export_model import refuse_existing as refuse_bundle
    from retrieval.index.creating import refuse_existing_index as refuse_index

    file = tmp_path / "file"
    file.touch()
    for done in (cli("train", "r.toml", "--output", "file"), cli("demo", "--output", "file")):
        assert done.code == 2 and "file is a file, and a" in done.err and "--resume" not in done.err
    with pytest.raises(StoreError, match="is a file, and an index is a folder"):
        refuse_index(file, False)
    with pytest.raises(Exception, match="is a file, and a bundle is a folder"):
        refuse_bundle(file, replace=False)


def test_demo_removes_only_a_demo(cli, tmp_path, monkeypatch):
    from retrieval.cli import demo

    seen = []
    monkeypatch.setattr(demo, "run_demo", lambda output, say: seen.append(output.exists()))
    folder = tmp_path / "mine"
    (folder / "images").mkdir(parents=True)
    replace = ("demo", "--output", folder, "--replace")
    assert "mine is not a demo's folder, so it is not removed." in cli(*replace).err
    (folder / "run").mkdir()
    (folder / "run" / "recipe.toml").touch()
    (folder / "thesis.tex").touch()
    done = cli(*replace)
    assert done.code == 2 and "mine holds thesis.tex, which no demo wrote" in done.err
    assert (folder / "run" / "recipe.toml").exists() and not seen
    (folder / "thesis.tex").unlink()
    assert cli(*replace).code == 0 and seen == [False]


def test_a_folder_of_another_kind_gets_advice(tmp_path):
    for folder, mark in (("run", "recipe.toml"), ("b", "manifest.json"), ("i", "index.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / mark).touch()
    run, bundle, index = (tmp_path / name for name in ("run", "b", "i"))
    export = f"retrieval export {run} (in Python run.export())"
    create = "'retrieval index create' (in Python retrieval.Index.create)."
    for folder, other, message in (
        (run, "bundle", f"It is a run. Create its bundle with: {export}"),
        (bundle, "run", "It is a bundle. Name the run that it was exported from."),
        (bundle, "index", "It is a bundle. Create an index with: retrieval index"),
        (tmp_path, "index", f"Create one with {create}"),
        (index, "run", "It is an index. Name the run that its bundle was exported from."),
    ):
        assert instead(folder, other).startswith(f" {message}")
    (tmp_path / "bundle").symlink_to(bundle)  # as in a demo's folder
    assert instead(tmp_path, "bundle") == f" The bundle in it is {tmp_path / 'bundle'}."
    (run / "bundle").symlink_to(bundle)
    assert instead(run, "bundle") == f" It is a run; the bundle in it is {run / 'bundle'}."


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("10MB", 10_000_000),
        ("1.5 gb", 1_500_000_000),
        ("64KiB", 65_536),
        ("20_000", 20_000),
        ("7B", 7),
    ],
)
def test_sizes(text, number):
    assert BYTES.convert(text, None, None) == number


@pytest.mark.parametrize("text", ["", "MB", "10XB", "-1", "0", "1e6"])
def test_wrong_sizes_are_refused(text):
    with pytest.raises(click.BadParameter):
        BYTES.convert(text, None, None)
    with pytest.raises(click.BadParameter):
        PIXELS.convert("10MB", None, None)


def test_a_wrong_host_and_a_taken_port_get_their_own_advice():
    from retrieval_server.server import listen

    text = refusal(StoreError, listen, "203.0.113.1", 0, "port")
    assert "use 127.0.0.1" in text and "another port" not in text
    message = r"Cannot listen on no\.such\.host\.invalid: .* `host` takes an address"
    with pytest.raises(StoreError, match=message):
        listen("no.such.host.invalid", 0, "port")
    message = "Choose another port with port"
    with listen("127.0.0.1", 0, "port") as listener, pytest.raises(StoreError, match=message):
        listen("127.0.0.1", listener.getsockname()[1], "port")


def test_ctrl_c_prints_the_command_that_resumes(recipe, tmp_path):
    words = ["train", "r.toml", "--set", "train.epochs=1000", "--output", "a run"]
    command = [sys.executable, "-m", "retrieval.cli", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, **pipes, env=environment, cwd=tmp_path) as running:
        assert running.stdout.readline().startswith("epoch 0 ")
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
        last = running.stderr.read().strip().splitlines()[-1]
    assert last.endswith(f" Go on with: {shlex.join(['retrieval', *words, '--resume'])}"), last


@pytest.mark.parametrize("replaced", [False, True])
def test_an_interrupted_replacement_never_resumes_the_old_run(
    recipe, cli, tmp_path, monkeypatch, replaced
):
    from retrieval.run.folder import create_folder
    from retrieval.training import trainer

    def interrupted(folder, checked, *, replace=False, **_):
        if replaced:
            create_folder(folder, checked, replace=replace)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "train_run", interrupted)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "recipe.toml").write_text(RECIPE)
    error = cli("train", "r.toml", "--output", "old", "--replace").err
    assert error.strip().endswith("--output old --resume" if replaced else "--output old --replace")


NAMES = ["pml.contrastive", "pml.margin", "acme.margin", "core.digits", "AdamW", "Adam"]


@pytest.mark.parametrize(
    ("word", "closest"),
    [
        ("pml.contrstive", "pml.contrastive"),
        ("contrastive", "pml.contrastive"),  # without its plugin
        ("acme.contrastive", "pml.contrastive"),  # with another plugin
        ("pnl.margin", "pml.margin"),
        ("pml.digits", "core.digits"),
        ("Adamw", "AdamW"),
        ("pml.zzzzzz", ""),  # the same plugin is not enough
        ("", ""),
    ],
)
def test_the_closest_word(word, closest):
    assert did_you_mean(word, iter(NAMES)) == (f" Did you mean '{closest}'?" if closest else "")
