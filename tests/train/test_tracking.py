"""Trackers are told how a run goes, and disturb nobody."""

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
from retrieval.training.trainer import train
from trained_weights import SMALL, lines_of, load, same, same_state, summary

PLUGIN = '''
"""Trackers that write down what they are told, and some that cannot."""
import json
import os
import random
from pathlib import Path
from retrieval.plugin import hookimpl

TOLD = Path(os.environ["TOLD"])


class Notes:
    """Write lines of JSON."""

    def begin(self, run):
        seed = run.configuration.get("seed", 0)
        self.note(hook="begin", name=run.name, group=run.group, key=run.key, seed=seed)
        return run.key or f"key-{run.name}", "a file"

    def note(self, **line):
        random.random()
        with TOLD.open("a") as file:
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
        if epoch == 1:
            raise OSError(28, "No space left on device")

    def end(self, how):
        raise AssertionError("it has failed before")


class Leaves(Notes):
    """End the process, as some libraries do."""
    def begin(self, run):
        raise SystemExit(1)


TRACKERS = {"notes": Notes, "refused": Refused, "full": Full, "leaves": Leaves}
retrieval_trackers = hookimpl(lambda: TRACKERS)
'''


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """The plugin above."""
    monkeypatch.setenv("TOLD", str(tmp_path / "told.jsonl"))
    (tmp_path / "acme.py").write_text(PLUGIN, encoding="utf-8")
    return str(tmp_path / "acme.py")


def told(folder: Path) -> list[dict[str, Any]]:
    return lines_of(folder, "told.jsonl")


def key_of(folder: Path, tracker: str) -> str:
    return json.loads((folder / FILE).read_text())[tracker]["key"]


def fit(made: Recipe, folder: Path, *names: str, tell: Any = print, resume: bool = False) -> None:
    with tracking(names, made, tell):
        train(folder, made, resume=resume)


def test_a_tracker_is_told_the_run_and_changes_nothing(make, acme, tmp_path):
    made = make(plugins=[*make().plugins, acme])
    lines: list[str] = []
    tracked, alone = tmp_path / "tracked", tmp_path / "alone"
    fit(made, tracked, "acme.notes", tell=lines.append)
    fit(made, alone)
    assert same(tracked, alone, "best")
    same_state(load(tracked), load(alone))
    found = told(tmp_path)
    assert [line["hook"] for line in found] == ["begin", "metrics", "metrics", "metrics", "end"]
    begun = {"hook": "begin", "name": "test", "group": None, "key": None, "seed": 0}
    assert begun.items() <= found[0].items()
    for line, record in zip(found[1:3], lines_of(tracked), strict=True):
        assert line["epoch"] == record["epoch"]
        assert line["metrics"].items() <= record.items()
        assert "validation_map_at_r" in line["metrics"]
    best = summary(tracked)["validation"]
    assert found[3]["epoch"] is None
    assert found[3]["metrics"]["best_validation_map_at_r"] == best["map_at_r"]
    assert found[4]["how"] == "finished" and "acme.notes: a file" in lines
    assert not (alone / FILE).exists()


def test_a_run_that_goes_on_is_the_same_one_for_its_tracker(make, acme, tmp_path):
    made = make(plugins=[*make().plugins, acme])

    def stop(line: str) -> None:
        if line.startswith("epoch 1"):
            raise Interrupted("Stopped.")

    with pytest.raises(Interrupted), tracking(["acme.notes"], made, lambda line: None):
        train(tmp_path / "run", made, report=stop)
    assert told(tmp_path)[-1]["how"] == "stopped"
    fit(made, tmp_path / "run", "acme.notes", resume=True)
    found = told(tmp_path)
    begins = [line["key"] for line in found if line["hook"] == "begin"]
    assert begins == [None, "key-test"] and found[-1]["how"] == "finished"
    assert {line["epoch"] for line in found if line["hook"] == "metrics"} == {0, 1, None}
    (tmp_path / "run" / FILE).write_text("{")  # what is damaged is no key, and no fault
    assert Run.open(tmp_path / "run").recipe.name == "test"


def test_no_tracker_stops_a_training(make, acme, tmp_path):
    made = make(plugins=[*make().plugins, acme])
    lines: list[str] = []
    names = ["acme.refused", "acme.full", "acme.leaves", "acme.notes"]
    fit(made, tmp_path / "run", *names, tell=lines.append)
    warnings = [line for line in lines if line.startswith("warning")]
    assert len(warnings) == 3
    for name, why in (
        ("refused", "ConnectionError: nobody listens"),
        ("full", "No space left on device"),
        ("leaves", "tried to end the process"),
    ):
        (warning,) = (line for line in warnings if f"The tracker acme.{name} " in line)
        assert why in warning
    assert told(tmp_path)[-1] == {"hook": "end", "how": "finished"}
    assert (tmp_path / "run" / "summary.json").is_file()
    assert len(failures([tmp_path / "run"])) == 3


def test_what_is_no_tracker_is_refused_before_anything_is_written(make, acme, tmp_path, cli):
    made = make(plugins=[acme, *make().plugins])
    with pytest.raises(PluginError, match=r"no tracker 'acme\.note' .*Did you mean 'acme\.notes'"):
        fit(made, tmp_path / "run", "acme.note")
    with pytest.raises(PluginError, match=r"'acme' matches several trackers: name one of acme\.f"):
        fit(made, tmp_path / "run", "acme")
    digits = Path(__file__).parents[2] / "models" / "digits" / "recipe.toml"
    done = cli("train", digits, "--output", tmp_path / "run", "--track", "tensorbored")
    assert done.code == 2 and "There is no tracker 'tensorbored'" in done.err
    assert "embedding-retrieval[wandb]" in done.err and not (tmp_path / "run").exists()


def test_tensorboard_has_steps_rates_metrics_the_recipe_and_a_sheet(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sampler = {"classes": 3, "items": 4, "batches": 60}
    made = check_recipe({**SMALL, "sampler": sampler, "optimizer": {"lr_factor": {"head": 10.0}}})
    lines: list[str] = []
    folder = tmp_path / "run"
    fit(made, folder, "tensorboard", tell=lines.append)
    fit(made, tmp_path / "alone")
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
    recipe = str(board.summary_metadata["_hparams_/session_start_info"])
    assert "loss.name" in recipe and "pml.contrastive" in recipe


def real(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package of a tracker, which may warn as it pleases."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return pytest.importorskip(name, reason=f"the extra {name} is not installed")


# what these packages leave open, and say of their next versions
KINDS = ["Deprecation", "Future", "Resource", "User", "pytest.PytestUnraisableException"]
real_one = pytest.mark.filterwarnings(*(f"ignore::{kind}Warning" for kind in KINDS))


@real_one
def test_mlflow_has_the_figures_and_goes_on_with_its_run(make, tmp_path, monkeypatch):
    mlflow = real("mlflow", monkeypatch)
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
        train(folder, make(train={"epochs": 3}), resume=True)  # which is not tracked
    fit(make(train={"epochs": 4}), folder, "mlflow", tell=lines.append, resume=True)
    assert key_of(folder, "mlflow.run") == key
    assert {m.step for m in client.get_metric_history(key, "loss")} == {1, 2, 4}
    assert len(client.search_runs([run.info.experiment_id])) == 1
    assert not any("warning" in line for line in lines), lines


def test_a_comparisons_trainings_are_a_group(acme, tmp_path):
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
    found = compare(paths, tmp_path / "digits", track=["acme.notes", "acme.refused"], **options)
    notes = told(tmp_path)
    begins = {line["name"]: line["group"] for line in notes if line["hook"] == "begin"}
    trainings = [f"{path.stem} seed {seed}" for path in paths for seed in (0, 1)]
    assert begins == dict.fromkeys(trainings, "digits")
    final = [line["metrics"] for line in notes if line.get("epoch", 0) is None]
    tested = [metrics["test_map_at_r"] for metrics in final if "test_map_at_r" in metrics]
    recipes = [contestant for contestant in found.contestants if contestant.recipe]
    assert tested == [run["map_at_r"] for recipe in recipes for run in recipe.metrics]
    (line,) = lines
    assert "The tracker acme.refused failed" in line and "4 of 4 runs" in line


@real_one
def test_wandb_has_the_figures_offline_under_one_id(make, tmp_path, monkeypatch):
    real("wandb", monkeypatch)
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


def test_a_learners_run_is_told_too(make, acme, tmp_path):
    parts = dict.fromkeys(("loss", "head", "sampler", "train"))
    learner = {"name": "core.pca", "n_components": 4}
    made = make(**parts, plugins=[*make().plugins, acme], learner=learner)
    fit(made, tmp_path / "run", "acme.notes")
    assert [line["hook"] for line in told(tmp_path)] == ["begin", "metrics", "end"]
