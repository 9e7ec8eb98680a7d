"""Trackers log a run, and never change or stop it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from retrieval.errors import Interrupted, PluginError
from retrieval.recipe.read import Recipe, check_recipe
from retrieval.run.open import Run
from retrieval.training.comparison.compare import compare
from retrieval.training.tracking import FILE, failures, tracking
from retrieval.training.trainer import train_run
from trained_weights import SMALL, lines_of, load, same, same_state, summary

from .conftest import TOOLBOX

PLUGIN = '''
"""A tracker that writes lines of JSON, and trackers that fail."""
import json
import os
import random
from pathlib import Path
from retrieval.plugin import hookimpl

NOTES = Path(os.environ["NOTES"])


class Notes:
    """Write a line of JSON per call, and draw a random number."""

    def begin(self, run):
        seed = run.configuration.get("seed", 0)
        self.note(hook="begin", name=run.name, group=run.group, key=run.key, seed=seed)
        return run.key or f"key-{run.name}", "a file"

    def note(self, **line):
        random.random()
        with NOTES.open("a") as file:
            file.write(json.dumps(line) + "\\n")

    def log(self, metrics, epoch):
        self.note(hook="metrics", epoch=epoch, metrics=dict(metrics))

    def end(self, how):
        self.note(hook="end", how=how)


class Refused(Notes):
    """Fail at once."""
    def begin(self, run):
        raise ConnectionError("nobody listens")


class Full(Notes):
    """Fail at the second epoch."""
    def log(self, metrics, epoch):
        if epoch == 2:
            raise OSError(28, "No space left on device")

    def end(self, how):
        raise AssertionError("called after it failed")


class Leaves(Notes):
    """End the process, as some libraries do."""
    def begin(self, run):
        raise SystemExit(1)


TRACKERS = {"notes": Notes, "refused": Refused, "full": Full, "leaves": Leaves}
retrieval_trackers = hookimpl(lambda: TRACKERS)
'''


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """The file of the plugin above."""
    monkeypatch.setenv("NOTES", str(tmp_path / "notes.jsonl"))
    (tmp_path / "acme.py").write_text(PLUGIN, encoding="utf-8")
    return str(tmp_path / "acme.py")


@pytest.fixture
def recipe(make, acme):
    """A recipe with the plugin above."""
    return make(plugins=[TOOLBOX, acme])


def notes(folder: Path) -> list[dict[str, Any]]:
    return lines_of(folder, "notes.jsonl")


def key_of(folder: Path, tracker: str) -> str:
    return json.loads((folder / FILE).read_text())[tracker]["key"]


def fit(recipe: Recipe, folder: Path, *names: str, tell: Any = print, resume: bool = False) -> None:
    with tracking(names, recipe, tell):
        train_run(folder, recipe, resume=resume)


def test_a_tracker_logs_the_run_and_changes_nothing(recipe, tmp_path):
    lines: list[str] = []
    tracked, alone = tmp_path / "tracked", tmp_path / "alone"
    fit(recipe, tracked, "acme.notes", tell=lines.append)
    fit(recipe, alone)
    assert same(tracked, alone, "best")
    same_state(load(tracked), load(alone))
    begin, *epochs, best, end = notes(tmp_path)
    assert begin == {"hook": "begin", "name": "test", "group": None, "key": None, "seed": 0}
    for line, record in zip(epochs, lines_of(tracked), strict=True):
        assert line["hook"] == "metrics" and line["epoch"] == record["epoch"]
        assert line["metrics"].items() <= record.items()
        assert "validation_map_at_r" in line["metrics"]
    assert best["epoch"] is None
    validation = summary(tracked)["validation"]
    assert best["metrics"]["best_validation_map_at_r"] == validation["map_at_r"]
    assert end == {"hook": "end", "how": "finished"} and "acme.notes: a file" in lines
    assert not (alone / FILE).exists()


def test_a_resumed_run_is_the_same_run_for_its_tracker(recipe, tmp_path):
    def stop(line: str) -> None:
        if line.startswith("epoch 1"):
            raise Interrupted("Stopped.")

    with pytest.raises(Interrupted), tracking(["acme.notes"], recipe, lambda line: None):
        train_run(tmp_path / "run", recipe, report=stop)
    assert notes(tmp_path)[-1]["how"] == "stopped"
    fit(recipe, tmp_path / "run", "acme.notes", resume=True)
    lines = notes(tmp_path)
    keys = [line["key"] for line in lines if line["hook"] == "begin"]
    assert keys == [None, "key-test"] and lines[-1]["how"] == "finished"
    assert {line["epoch"] for line in lines if line["hook"] == "metrics"} == {1, 2, None}
    (tmp_path / "run" / FILE).write_text("{")  # a damaged file has no keys
    assert Run.open(tmp_path / "run").recipe.name == "test"


def test_a_failing_tracker_does_not_stop_the_training(recipe, tmp_path):
    lines: list[str] = []
    names = ["acme.refused", "acme.full", "acme.leaves", "acme.notes"]
    fit(recipe, tmp_path / "run", *names, tell=lines.append)
    warnings = [line for line in lines if line.startswith("warning")]
    assert len(warnings) == 3
    for name, why in (
        ("refused", "ConnectionError: nobody listens"),
        ("full", "No space left on device"),
        ("leaves", "tried to end the process"),
    ):
        (warning,) = (line for line in warnings if f"The tracker acme.{name} " in line)
        assert why in warning
    assert notes(tmp_path)[-1] == {"hook": "end", "how": "finished"}
    assert (tmp_path / "run" / "summary.json").is_file()
    assert len(failures([tmp_path / "run"])) == 3


def test_an_unknown_tracker_is_refused_before_anything_is_written(recipe, tmp_path, cli):
    with pytest.raises(PluginError, match=r"no tracker 'acme\.note' .*Did you mean 'acme\.notes'"):
        fit(recipe, tmp_path / "run", "acme.note")
    with pytest.raises(PluginError, match=r"'acme' matches several trackers: name one of acme\.f"):
        fit(recipe, tmp_path / "run", "acme")
    digits = Path(__file__).parents[2] / "models" / "digits" / "recipe.toml"
    outcome = cli("train", digits, "--output", tmp_path / "run", "--track", "tensorbored")
    assert outcome.code == 2 and "There is no tracker 'tensorbored'" in outcome.err
    assert "embedding-retrieval[wandb]" in outcome.err and not (tmp_path / "run").exists()


def test_tensorboard_has_steps_rates_metrics_the_recipe_and_a_sheet(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sampler = {"classes": 3, "items": 4, "batches": 60}
    recipe = check_recipe({**SMALL, "sampler": sampler, "optimizer": {"lr_factor": {"head": 10.0}}})
    lines: list[str] = []
    folder = tmp_path / "run"
    fit(recipe, folder, "tensorboard", tell=lines.append)
    fit(recipe, tmp_path / "alone")
    assert same(folder, tmp_path / "alone") and not (tmp_path / "alone" / "tensorboard").exists()
    assert lines == [f"core.tensorboard: {folder / 'tensorboard'}"]
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    records = lines_of(folder)
    assert [event.step for event in board.Scalars("steps/lr_head")] == [50, 60, 100, 120]
    rates = [board.Scalars(f"steps/lr_{part}")[0].value for part in ("head", "backbone")]
    assert rates == pytest.approx([0.01, 0.001]) and records[0]["lr"]["head"] == 0.01
    first, rest = (event.value for event in board.Scalars("steps/loss")[:2])
    assert (50 * first + 10 * rest) / 60 == pytest.approx(records[0]["loss"], rel=1e-5)
    shown = [(event.step, event.value) for event in board.Scalars("validation_map_at_r")]
    values = [pytest.approx(record["validation_map_at_r"]) for record in records]
    assert shown == list(zip((1, 2), values, strict=True))
    image = board.Images("validation")[0]
    assert image.encoded_image_string.startswith(b"\x89PNG") and image.width > 900
    parameters = str(board.summary_metadata["_hparams_/session_start_info"])
    assert "loss.name" in parameters and "pml.contrastive" in parameters


# these packages warn of their own future, and leave files open
KINDS = ["Deprecation", "Future", "Resource", "User", "pytest.PytestUnraisableException"]
may_warn = pytest.mark.filterwarnings(*(f"ignore::{kind}Warning" for kind in KINDS))


@may_warn
def test_mlflow_has_the_metrics_and_continues_its_run(make, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    folder = tmp_path / "run"
    fit(make(), folder, "mlflow", tell=lines.append)
    key = key_of(folder, "mlflow.run")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    history = client.get_metric_history(key, "validation_map_at_r")
    scores = [record["validation_map_at_r"] for record in lines_of(folder)]
    assert [(m.step, m.value) for m in history] == list(enumerate(scores, 1))
    run = client.get_run(key)
    assert run.info.status == "FINISHED" and run.info.run_name == "test"
    assert run.data.params["loss.name"] == "toolbox.deadly"
    assert run.data.params["train.epochs"] == "2"
    assert client.get_experiment(run.info.experiment_id).name == "retrieval"
    assert not any("warning" in line for line in lines), lines
    with tracking(["mlflow"], make(train={"epochs": 3}), lines.append):
        train_run(folder, make(train={"epochs": 3}), resume=True)  # another recipe: not tracked
    fit(make(train={"epochs": 4}), folder, "mlflow", tell=lines.append, resume=True)
    assert key_of(folder, "mlflow.run") == key
    assert {m.step for m in client.get_metric_history(key, "loss")} == {1, 2, 4}
    assert len(client.search_runs([run.info.experiment_id])) == 1
    assert not any("warning" in line for line in lines), lines


def test_the_trainings_of_a_comparison_are_a_group(acme, tmp_path):
    small = {**SMALL, "plugins": [acme], "train": {"epochs": 1, "device": "cpu"}}
    paths = []
    for name in ("triplet_margin", "contrastive"):
        paths.append(tmp_path / f"{name}.toml")
        table = {**small, "name": name, "loss": {"name": f"pml.{name}"}}
        paths[-1].write_text(tomli_w.dumps(table), encoding="utf-8")
    lines: list[str] = []
    options = {"seeds": 2, "pretrained": "none", "progress": False, "report": lines.append}
    with pytest.raises(PluginError, match=r"no tracker 'acme\.note'"):
        compare(paths, tmp_path / "digits", track=["acme.note"], **options)
    result = compare(paths, tmp_path / "digits", track=["acme.notes", "acme.refused"], **options)
    logged = notes(tmp_path)
    groups = {line["name"]: line["group"] for line in logged if line["hook"] == "begin"}
    trainings = [f"{path.stem} seed {seed}" for path in paths for seed in (0, 1)]
    assert groups == dict.fromkeys(trainings, "digits")
    final = [line["metrics"] for line in logged if line.get("epoch", 0) is None]
    tested = [metrics["test_map_at_r"] for metrics in final if "test_map_at_r" in metrics]
    recipes = [contestant for contestant in result.contestants if contestant.recipe]
    assert tested == [run["map_at_r"] for recipe in recipes for run in recipe.metrics]
    (line,) = lines
    assert "The tracker acme.refused failed" in line and "4 of 4 runs" in line


@may_warn
def test_wandb_has_the_metrics_offline_under_one_id(make, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    lines: list[str] = []
    folder = tmp_path / "run"
    fit(make(), folder, "wandb", tell=lines.append)
    fit(make(train={"epochs": 3}), folder, "wandb", tell=lines.append, resume=True)
    key = key_of(folder, "wandb.run")
    assert not any("warning" in line for line in lines), lines
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{key}/run-{key}.wandb"))
    assert len(files) == 2 and len(list(tmp_path.glob("wandb/offline-run-*"))) == 2
    parts = [file.read_bytes() for file in files]
    for number, record in enumerate(lines_of(folder)):
        value = json.dumps(record["loss"]).encode()
        assert [value in part for part in parts] == [number < 2, number == 2]
    assert b"toolbox.deadly" in parts[0]


def test_a_learners_run_is_tracked(make, acme, tmp_path):
    parts = dict.fromkeys(("loss", "head", "sampler", "train"))
    learner = {"name": "core.pca", "n_components": 4}
    fit(make(**parts, plugins=[TOOLBOX, acme], learner=learner), tmp_path / "run", "acme.notes")
    assert [line["hook"] for line in notes(tmp_path)] == ["begin", "metrics", "end"]
