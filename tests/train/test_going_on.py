"""Going on with a run: changed plugins, more epochs, the weights of another run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from retrieval.cli.app import app
from retrieval.errors import RetrievalError
from retrieval.run import checkpoint

RECIPE = """
name = "small"
plugins = ["mine/"]
[data]
name = "core.digits"
[split]
by = "class"
[sampler]
classes = 4
items = 4
batches = 4
[backbone]
name = "core.convnet"
size = 8
width = 2
depth = 2
[head]
embedding_size = 4
[loss]
name = "mine.scaled"
[train]
epochs = 2
device = "cpu"
"""
PLUGIN = '''
"""A loss and its neighbour."""
from pytorch_metric_learning import losses
from retrieval.plugin import hookimpl
from .factors import FACTOR


class Scaled(losses.ContrastiveLoss):
    """The contrastive loss, scaled."""

    def __init__(self, margin: float = 1.0) -> None:
        """Build.

        Args:
            margin: distance beyond which negatives are far enough.
        """
        super().__init__(neg_margin=margin)

    def forward(self, *given, **named):
        return FACTOR * super().forward(*given, **named)


@hookimpl
def retrieval_losses():
    return {"scaled": Scaled}
'''


def retrieval(*words: object) -> Any:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, RetrievalError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def train(folder: Path, name: str, *words: object) -> str:
    output: str = retrieval(
        "train", folder / "recipe.toml", "--output", folder / name, *words
    ).output
    return output


def load(folder: Path, name: str = "last") -> Any:
    return checkpoint.load(folder / "checkpoints" / f"{name}.safetensors")


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def log(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in lines]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A folder with a recipe, and its plugin of two modules."""
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text(PLUGIN)
    (tmp_path / "mine" / "factors.py").write_text("FACTOR = 2.0\n")
    return tmp_path


# --- plugins
# -------------------------------------------------------------------------------------------------


def test_a_changed_plugin_is_said_and_the_runs_own_copy_goes_on(mine: Path) -> None:
    train(mine, "run", "--set", "train.epochs=1")
    train(mine, "whole")
    (mine / "mine" / "factors.py").write_text("FACTOR = 3.0\n")
    said = train(mine, "run", "--resume")
    assert (
        "The plugin 'mine' has changed since the run was started (factors.py); the run continues"
        " with its own copies" in said
    )
    assert "--replace-plugins" in said
    assert same(load(mine / "run")["model"], load(mine / "whole")["model"])
    (mine / "mine" / "__init__.py").write_text(
        "def broken(:\n"
    )  # on the way to the next experiment
    assert "__init__.py" in train(mine, "run", "--resume", "--set", "train.epochs=3")
    shutil.rmtree(mine / "run" / "plugins" / "mine" / "__pycache__", ignore_errors=True)
    shutil.rmtree(mine / "mine")
    assert "does not exist" in train(mine, "run", "--resume", "--set", "train.epochs=4")
    assert len(log(mine / "run")) == 4
    retrieval("evaluate", mine / "run")


LATE = """
class Late:
    uses = 0

    def __mul__(self, loss):
        self.uses += 1
        return loss * (2.0 if self.uses < 2 else float("nan"))

FACTOR = Late()
"""
"""Right in the look ahead, which would refuse to begin, and NaN in training."""


def test_replace_plugins_goes_on_with_the_mended_files(mine: Path) -> None:
    train(mine, "whole")
    (mine / "mine" / "factors.py").write_text(LATE)
    with pytest.raises(RetrievalError, match="loss is nan"):
        train(mine, "run")
    (mine / "mine" / "factors.py").write_text("FACTOR = 2.0\n")
    with pytest.raises(
        RetrievalError, match="loss is nan"
    ):  # as it was told: with the run's own copy
        train(mine, "run", "--resume")
    train(mine, "run", "--resume", "--replace-plugins")
    assert same(load(mine / "run")["model"], load(mine / "whole")["model"])
    assert (mine / "run" / "plugins" / "mine" / "factors.py").read_text() == "FACTOR = 2.0\n"
    changed = json.loads((mine / "run" / "run.json").read_text())["changes"]
    assert changed == [{"step": 0, "what": ["the plugins were replaced"]}]
    assert "has changed" not in train(mine, "run", "--resume")
    assert (
        "Leave --replace-plugins out without --resume"
        in CliRunner().invoke(app, ["train", "x.toml", "--replace-plugins"]).output
    )


# --- more epochs
# ---------------------------------------------------------------------------------------------


def test_trained_longer_it_ends_as_if_it_had_been_as_long_from_the_start(mine: Path) -> None:
    step = "schedule.options={step_size=1, gamma=0.5}"
    schedule = ("--set", "schedule.name=StepLR", "--set", step)
    train(mine, "whole", *schedule, "--set", "train.epochs=4")
    train(mine, "run", *schedule)
    assert "is complete already" in train(mine, "run", *schedule, "--resume")
    retrieval("evaluate", mine / "run")
    said = train(mine, "run", *schedule, "--resume", "--set", "train.epochs=4")
    assert "train.epochs: 2 → 4" in said and "epoch 3" in said and "epoch 2:" not in said
    for name in ("last", "best"):
        assert same(load(mine / "run", name)["model"], load(mine / "whole", name)["model"])
    assert log(mine / "run") == log(mine / "whole")
    assert (mine / "run" / "summary.json").read_text() == (
        mine / "whole" / "summary.json"
    ).read_text()
    assert "epochs = 4" in (mine / "run" / "recipe.toml").read_text()
    assert not (mine / "run" / "evaluation-test.json").exists()  # it was of other weights
    assert json.loads((mine / "run" / "run.json").read_text())["changes"] == [
        {"step": 8, "what": ["train.epochs: 2 → 4"]}
    ]


def test_the_last_phase_can_be_longer_and_one_that_is_over_cannot(mine: Path) -> None:
    with (mine / "recipe.toml").open("a") as file:
        file.write(
            '[[phase]]\nname = "head"\nepochs = 1\ntrain = ["head"]\n[[phase]]\nname ='
            ' "all"\nepochs = 1\n'
        )
    train(mine, "whole", "--set", "phase.1.epochs=2")
    train(mine, "run")
    for changed, said in (
        ("phase.0.epochs=2", r"the phase 'head' has ended after 1 epochs"),
        (
            "train.epochs=5",
            r"train\.epochs has no effect in a recipe with \[\[phase\]\]\. Set .*phase\.1\.epochs",
        ),
    ):
        with pytest.raises(RetrievalError, match=said):
            train(mine, "run", "--resume", "--set", changed)
    train(mine, "run", "--resume", "--set", "phase.1.epochs=2")
    assert same(load(mine / "run")["model"], load(mine / "whole")["model"])


def test_what_else_differs_is_refused_by_name_and_nothing_is_touched(mine: Path) -> None:
    train(mine, "run")
    before = {path: path.read_bytes() for path in (mine / "run").rglob("*") if path.is_file()}
    for changes, said in (
        (
            ["optimizer.lr=0.5"],
            (
                r"\[optimizer\] differs \(optimizer\.lr was 0\.001, and is 0\.5\).*Only these may"
                r" change: train\.epochs"
            ),
        ),
        (
            ["optimizer.lr=0.5", "train.epochs=9", "loss.margin=2.0"],
            r"\[optimizer\], \[loss\] differ \(.*loss\.margin was not set, and is 2\.0",
        ),
        (["train.epochs=1"], r"has already begun epoch 2 of the phase 'train'"),
    ):
        words = [word for change in changes for word in ("--set", change)]
        with pytest.raises(RetrievalError, match=said):
            train(mine, "run", "--resume", *words)
    after = {path: path.read_bytes() for path in (mine / "run").rglob("*") if path.is_file()}
    assert {path for path in after if "__pycache__" not in path.parts} == {
        path for path in before if "__pycache__" not in path.parts
    }
    assert all(after[path] == content for path, content in before.items())


def test_a_run_that_stopped_early_needs_more_patience_too(mine: Path) -> None:
    early = ["--set", "train.epochs=9", "--set", "optimizer.lr=1e-9"]
    train(mine, "run", *early, "--set", "train.patience=1")
    done = len(log(mine / "run"))
    assert done < 9
    longer = ["--resume", "--set", "optimizer.lr=1e-9", "--set", "train.epochs=12", "--set"]
    with pytest.raises(
        RetrievalError, match=r"stopped early, after 1 validations.*Set train\.patience above 1 too"
    ):
        train(mine, "run", *longer, "train.patience=1")
    train(mine, "run", *longer, "train.patience=20")
    assert len(log(mine / "run")) == 12


def test_a_learner_has_no_epochs_to_add(mine: Path) -> None:
    learner = ["--set", 'learner.name="core.lda"']
    text = (mine / "recipe.toml").read_text().replace('[loss]\nname = "mine.scaled"\n', "")
    (mine / "recipe.toml").write_text(text)
    train(mine, "run", *learner)
    with pytest.raises(RetrievalError, match=r"a \[learner\] is fitted once"):
        train(mine, "run", *learner, "--resume", "--set", "train.epochs=4")


# --- the weights of another run
# ------------------------------------------------------------------------------


def test_training_starts_from_the_weights_of_another_run(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(mine)
    train(mine, "a")
    still = [
        "--set",
        "optimizer.lr=1e-12",
        "--set",
        "optimizer.options={weight_decay=0.0}",
        "--set",
        "seed=5",
    ]
    train(mine, "b", *still, "--set", "train.start_from=a")
    one, other = load(mine / "a", "best")["model"], load(mine / "b")["model"]
    for name, value in one.items():
        if value.is_floating_point() and "running" not in name:
            torch.testing.assert_close(other[name], value, atol=1e-6, rtol=1e-6)
    assert f'start_from = "{mine / "a"}"' in (mine / "b" / "recipe.toml").read_text()
    shutil.rmtree(mine / "a")  # a run that began needs it no more
    train(mine, "b", *still, "--set", "train.start_from=a", "--resume", "--set", "train.epochs=3")
    retrieval("evaluate", mine / "b")
    with pytest.raises(RetrievalError, match=r"start_from: .*a is neither a checkpoint nor a run"):
        train(mine, "c", "--set", "train.start_from=a")
    assert not (mine / "c").exists()


def test_weights_that_do_not_fit_are_refused_by_name_and_shape(mine: Path) -> None:
    train(mine, "a")
    wider = ["--set", "head.embedding_size=6", "--set", f"train.start_from={mine / 'a'}"]
    with pytest.raises(RetrievalError) as refused:
        train(mine, "b", *wider)
    said = str(refused.value)
    assert "head.0.weight has shape (4, 4) in that run, but (6, 4) here" in said
    assert "head.0.bias has shape (4,) in that run, but (6,) here" in said
    assert 'Load only the parts that match: [train] start_parts = ["backbone", "combiner"].' in said
    train(mine, "b", *wider, "--set", 'train.start_parts=["backbone"]')
    deeper = ["--set", "backbone.depth=3", "--set", f"train.start_from={mine / 'a'}"]
    with pytest.raises(RetrievalError, match=r"that run has no backbone\.\S+ \("):
        train(mine, "c", *deeper)


def test_a_frozen_backbone_of_another_run_keeps_its_weights_also_when_resumed(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRIEVAL_CACHE", str(mine / "cache"))
    train(mine, "a")
    frozen = ["--set", "backbone.frozen=true", "--set", f"train.start_from={mine / 'a'}"]
    train(mine, "whole", *frozen, "--set", "train.epochs=3")
    train(mine, "run", *frozen)
    train(mine, "run", *frozen, "--resume", "--set", "train.epochs=3")
    assert same(load(mine / "run")["model"], load(mine / "whole")["model"])
    theirs = load(mine / "a", "best")["model"]
    ours = load(mine / "run")["model"]
    assert all(
        torch.equal(ours[name], value)
        for name, value in theirs.items()
        if name.startswith("backbone.")
    )
    learner = (
        (mine / "recipe.toml")
        .read_text()
        .replace('[loss]\nname = "mine.scaled"\n', '[learner]\nname = "core.lda"\n')
    )
    (mine / "recipe.toml").write_text(learner)
    train(mine, "learned", "--set", f"train.start_from={mine / 'a'}")
    learned = load(mine / "learned", "best")["model"]
    assert all(
        torch.equal(learned[name], value)
        for name, value in theirs.items()
        if name.startswith("backbone.")
    )
