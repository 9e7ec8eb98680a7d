"""Resume a run with changed plugins or more epochs, and start from the weights of another run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refusal
from retrieval.errors import RetrievalError
from trained_weights import load, log, ran, retrieval, same, summary

RECIPE = """
name = "small"
plugins = ["mine/"]
data.name = "core.digits"
split.by = "class"
sampler = { classes = 4, items = 4, batches = 4 }
backbone = { name = "core.convnet", size = 8, width = 2, depth = 2 }
head.embedding_size = 4
loss.name = "mine.scaled"
train = { epochs = 2, device = "cpu" }
"""
PLUGIN = '''
"""A loss that uses another module of its package."""
from pytorch_metric_learning import losses
from retrieval.plugin import hookimpl
from .factors import FACTOR


class Scaled(losses.ContrastiveLoss):
    """The contrastive loss, scaled."""

    def __init__(self, margin: float = 1.0):
        super().__init__(neg_margin=margin)

    def forward(self, *given, **named):
        return FACTOR * super().forward(*given, **named)


retrieval_losses = hookimpl(lambda: {"scaled": Scaled})
'''


def train(folder: Path, name: str, *words: str) -> str:
    """Run `retrieval train` with options and changes (KEY=VALUE), and return its output."""
    options = [x for word in words for x in ([] if word.startswith("--") else ["--set"]) + [word]]
    return ran("train", folder / "recipe.toml", "--output", folder / name, *options)


def refused(folder: Path, name: str, *words: str, says: str) -> None:
    with pytest.raises(RetrievalError, match=says):
        train(folder, name, *words)


def changes(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())["changes"]


@pytest.fixture
def mine(tmp_path):
    """A folder with a recipe, and its plugin of two modules."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text(PLUGIN)
    (tmp_path / "mine" / "factors.py").write_text("FACTOR = 2.0\n")
    return tmp_path


def test_a_run_continues_with_its_own_copy_of_a_changed_or_missing_plugin(mine):
    train(mine, "run", "train.epochs=1")
    train(mine, "whole")
    (mine / "mine" / "factors.py").write_text("FACTOR = 3.0\n")
    output = train(mine, "run", "--resume")
    says = "The plugin 'mine' has changed since the run was started (factors.py); the run continues"
    assert says in output
    assert "with its own copies" in output and "--replace-plugins" in output
    assert same(mine / "run", mine / "whole")
    (mine / "mine" / "__init__.py").write_text("def broken(:\n")
    assert "__init__.py" in train(mine, "run", "--resume", "train.epochs=3")
    shutil.rmtree(mine / "run" / "plugins" / "mine" / "__pycache__", ignore_errors=True)
    shutil.rmtree(mine / "mine")
    assert "does not exist" in train(mine, "run", "--resume", "train.epochs=4")
    assert len(log(mine / "run")) == 4
    ran("evaluate", mine / "run")


# The factor is 2 in the trial batch that precedes training, and NaN in all later batches.
LATE = """
class Late:
    uses = 0

    def __mul__(self, loss):
        self.uses += 1
        return loss * (2.0 if self.uses < 2 else float("nan"))

FACTOR = Late()
"""


def test_replace_plugins_resumes_with_the_corrected_files(mine):
    train(mine, "whole")
    (mine / "mine" / "factors.py").write_text(LATE)
    refused(mine, "run", says="loss is nan")
    (mine / "mine" / "factors.py").write_text("FACTOR = 2.0\n")
    refused(mine, "run", "--resume", says="loss is nan")  # with the run's own copy
    train(mine, "run", "--resume", "--replace-plugins")
    assert same(mine / "run", mine / "whole")
    assert (mine / "run" / "plugins" / "mine" / "factors.py").read_text() == "FACTOR = 2.0\n"
    assert changes(mine / "run") == [{"step": 0, "what": ["the plugins were replaced"]}]
    assert "has changed" not in train(mine, "run", "--resume")
    alone = retrieval("train", "x.toml", "--replace-plugins").output
    assert "Leave --replace-plugins out without --resume" in alone


def test_a_run_that_is_extended_ends_like_one_that_was_as_long_from_the_start(mine):
    schedule = ("schedule.name=StepLR", "schedule.options={step_size=1, gamma=0.5}")
    train(mine, "whole", *schedule, "train.epochs=4")
    train(mine, "run", *schedule)
    assert "is complete already" in train(mine, "run", *schedule, "--resume")
    ran("evaluate", mine / "run")
    output = train(mine, "run", *schedule, "--resume", "train.epochs=4")
    assert "train.epochs: 2 → 4" in output and "epoch 3" in output and "epoch 2:" not in output
    run, whole = mine / "run", mine / "whole"
    assert same(run, whole) and same(run, whole, "best")
    assert log(run) == log(whole) and summary(run) == summary(whole)
    assert "epochs = 4" in (run / "recipe.toml").read_text()
    assert not (run / "evaluation-test.json").exists()  # it measured other weights
    assert changes(run) == [{"step": 8, "what": ["train.epochs: 2 → 4"]}]


def test_only_the_last_phase_can_be_extended(mine):
    phases = '[[phase]]\nname = "head"\nepochs = 1\ntrain = ["head"]\n'
    phases += '[[phase]]\nname = "all"\nepochs = 1\n'
    (mine / "recipe.toml").write_text(RECIPE + phases)
    train(mine, "whole", "phase.1.epochs=2")
    train(mine, "run")
    for change, says in (
        ("phase.0.epochs=2", "begun epoch 1 of the phase 'head', which is over"),
        ("train.epochs=5", r"no effect in a recipe with \[\[phase\]\]\. Set .*phase\.1\.epochs"),
    ):
        refused(mine, "run", "--resume", change, says=says)
    train(mine, "run", "--resume", "phase.1.epochs=2")
    assert same(mine / "run", mine / "whole")


def files(folder: Path) -> dict[Path, bytes]:
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {path: path.read_bytes() for path in paths if path.is_file()}


def test_other_changes_are_refused_by_name_and_no_file_changes(mine):
    train(mine, "run")
    before = files(mine / "run")
    rate = r"optimizer\.lr was 0\.001, and is 0\.5"
    loss = rf"{rate}; .*loss\.margin was not set, and is 2\.0"
    for words, says in (
        (["optimizer.lr=0.5"], rf"{rate}.*Only these may change: train\.epochs"),
        (["optimizer.lr=0.5", "train.epochs=9", "loss.margin=2.0"], loss),
        (["train.epochs=1"], "has already begun epoch 2 of the phase 'train': it cannot have 1"),
    ):
        refused(mine, "run", "--resume", *words, says=says)
    assert files(mine / "run") == before


def test_a_run_that_stopped_early_is_extended_only_with_more_patience(mine):
    train(mine, "run", "train.epochs=9", "optimizer.lr=1e-9", "train.patience=1")
    assert len(log(mine / "run")) < 9
    longer = ["--resume", "optimizer.lr=1e-9", "train.epochs=12"]
    says = r"stopped early, after 1 validation without.*Set train\.patience above 1 too"
    refused(mine, "run", *longer, "train.patience=1", says=says)
    train(mine, "run", *longer, "train.patience=20")
    assert len(log(mine / "run")) == 12


LEARNER = RECIPE.replace("loss.name", "learner.name").replace("mine.scaled", "core.lda")


def test_a_learner_has_no_epochs_to_add(mine):
    (mine / "recipe.toml").write_text(LEARNER)
    train(mine, "run")
    refused(mine, "run", "--resume", "train.epochs=4", says=r"a \[learner\] is fitted once")


def test_training_starts_from_the_weights_of_another_run(mine, monkeypatch):
    monkeypatch.chdir(mine)
    train(mine, "a")
    still = ["optimizer.lr=1e-12", "optimizer.options={weight_decay=0.0}", "seed=5"]
    train(mine, "b", *still, "train.start_from=a")
    source, weights = load(mine / "a", "best")["model"], load(mine / "b")["model"]
    for name, value in source.items():
        if value.is_floating_point() and "running" not in name:
            torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=1e-6)
    assert f'start_from = "{mine / "a"}"' in (mine / "b" / "recipe.toml").read_text()
    shutil.rmtree(mine / "a")  # no longer needed
    train(mine, "b", *still, "train.start_from=a", "--resume", "train.epochs=3")
    ran("evaluate", mine / "b")
    says = "start_from: .*a is neither a checkpoint nor a run with a checkpoint"
    refused(mine, "c", "train.start_from=a", says=says)
    assert not (mine / "c").exists()


def test_weights_that_do_not_fit_are_refused_by_name_and_shape(mine):
    train(mine, "a")
    source = f"train.start_from={mine / 'a'}"
    wider = ["head.embedding_size=6", source]
    text = refusal(RetrievalError, train, mine, "b", *wider)
    for sentence in (
        "head.0.weight has shape (4, 4) in that run, but (6, 4) here",
        "head.0.bias has shape (4,) in that run, but (6,) here",
        'Load only the parts that match: [train] start_parts = ["backbone", "combiner"].',
    ):
        assert sentence in text
    head = [*wider, 'train.start_parts=["head"]']
    refused(mine, "c", *head, says="No part matches. Name a run of the same model")
    train(mine, "b", *wider, 'train.start_parts=["backbone"]')
    says = r"this model has backbone\.\S+ \(.*\), but that run does not"
    refused(mine, "c", "backbone.depth=3", source, says=says)


def test_a_frozen_backbone_of_another_run_keeps_its_weights_also_when_resumed(mine, monkeypatch):
    monkeypatch.setenv("RETRIEVAL_CACHE", str(mine / "cache"))
    train(mine, "a")
    source = f"train.start_from={mine / 'a'}"
    frozen = ["backbone.frozen=true", source]
    train(mine, "whole", *frozen, "train.epochs=3")
    train(mine, "run", *frozen)
    train(mine, "run", *frozen, "--resume", "train.epochs=3")
    assert same(mine / "run", mine / "whole")
    (mine / "recipe.toml").write_text(LEARNER)
    train(mine, "learned", source)
    source_weights = load(mine / "a", "best")["model"].items()
    backbone = {k: v for k, v in source_weights if k.startswith("backbone.")}
    for weights in (load(mine / "run")["model"], load(mine / "learned", "best")["model"]):
        assert backbone and all(torch.equal(weights[k], v) for k, v in backbone.items())
