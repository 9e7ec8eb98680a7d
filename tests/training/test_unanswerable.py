"""A score that cannot be measured is refused before training, and is never the best score."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import retrieval
from comparing import go
from PIL import Image
from refusals import refusal
from retrieval.errors import DataError, Interrupted
from retrieval.recipe.read import check_recipe, to_toml
from retrieval.run.resume import Position
from retrieval.training.check import run_one_batch
from retrieval.training.process import Monitor
from retrieval.training.trainer import Trainer, train_run
from trained_weights import SMALL, log, same, summary

PARTS = {
    "net": {"loss": {"name": "pml.contrastive"}},
    "frozen": {"backbone": {"name": "core.pixels", "size": 8}, "loss": {"name": "pml.contrastive"}},
    "learner": {
        "learner": {"name": "core.lda"},
        "sampler": None,
        "head": None,
        "loss": None,
        "train": {"device": "cpu"},
    },
}


def items(folder: Path, **sides: list[int]) -> Path:
    """A table of random photos: `train=[4, 4]` has two classes of four photos, by two cameras."""
    random = np.random.default_rng(0)
    rows = ["path,label,split,camera,genus"]
    for side, counts in sides.items():
        for number, count in enumerate(counts):
            for photo in range(count):
                name = f"{side}-{number}-{photo}.png"
                pixels = random.integers(0, 255, (8, 8)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / name)
                rows.append(f"{name},{side} {number},{side},{photo % 2},genus")
    (folder / "items.csv").write_text("\n".join(rows) + "\n")
    return folder / "items.csv"


def recipe(table: Path, kind: str = "net", **tables: Any) -> Any:
    """A recipe over the items of a table."""
    data = {"name": "core.csv", "manifest": str(table)}
    merged = {**SMALL, "split": {"by": "given"}, **PARTS[kind], "data": data, **tables}
    return check_recipe({k: v for k, v in merged.items() if v is not None})


@pytest.mark.parametrize("kind", PARTS)
def test_a_validation_side_without_pairs_is_refused_before_training(kind, tmp_path):
    table = items(tmp_path, train=[4, 4, 4, 4], validation=[1, 1, 1], test=[4, 4])
    for call in (lambda r: train_run(tmp_path / "run", r), run_one_batch):
        said = refusal(DataError, call, recipe(table, kind))
        assert said.startswith("No item of the validation side has another of its class to find")
        assert "or train without a validation side" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("evaluate", "counts", "said"),
    [
        ({"exclude": "genus"}, [4, 4], "as [evaluate] exclude = 'genus' hides the others"),
        ({"exclude": "genus", "gallery_items": 1}, [4, 4], "exclude = 'genus' hides the others"),
        ({"exclude": "camera", "levels": ["genus"]}, [1, 1, 2, 1], None),
        ({"exclude": "genus", "levels": ["genus"]}, [4, 4], "exclude = 'genus' hides the others"),
        ({"open_set": [0.1]}, [4, 4], "open_set: no query is unknown"),
    ],
)
def test_a_protocol_that_hides_every_right_answer_is_refused_before_training(
    evaluate, counts, said, tmp_path
):
    table = items(tmp_path, train=[4, 4, 4, 4], test=counts)
    checked = recipe(table, evaluate=evaluate, split={"by": "given", "validation": 0.0})
    if said is None:
        run = train_run(tmp_path / "run", checked)
        assert retrieval.load(run.path).evaluate(progress=False).queries == 2
    else:
        assert said in refusal(DataError, train_run, tmp_path / "run", checked)
        assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_be_measured_is_a_sentence(tmp_path):
    table = items(tmp_path, train=[4, 4, 4, 4], test=[4, 4])
    none = {"by": "given", "validation": 0.0}
    folder = train_run(tmp_path / "run", recipe(table, split=none)).path
    written = (folder / "recipe.toml").read_text()
    changed = written.replace("[evaluate]\n", "")
    (folder / "recipe.toml").write_text(f'{changed}\n[evaluate]\nexclude = "genus"\n')
    said = refusal(DataError, retrieval.load(folder).evaluate, progress=False)
    assert "No item of the test side has another of its class to find" in said
    assert not (folder / "evaluation-test.json").exists()


def test_a_fold_that_cannot_be_measured_is_refused_before_any_fold_is_trained(tmp_path):
    table = items(tmp_path, train=[8, 8, 8, 8, 1, 1], test=[4, 4])
    tables = {"search": {"optimizer": {"lr": {"low": 1e-4, "high": 1e-2}}}}
    source = tmp_path / "hunt.toml"
    source.write_text(to_toml(recipe(table, name="hunt", **tables)))
    said = refusal(DataError, go, [source], tmp_path / "out", folds=3, repeats=6)
    assert said.startswith("hunt, in the search, where fold ")
    assert "no test class has two items" in said and "fold_by=item" in said
    assert not list((tmp_path / "out").rglob("fold-*"))


@pytest.mark.parametrize("metric", ["recall_at_1", "map_at_r"])
def test_nan_is_never_the_best(metric):
    monitor = Monitor(check_recipe({**SMALL, "train": {"monitor": metric}}))
    progress = Position(total=4)
    assert not monitor.note(progress, {metric: math.nan}, True)
    assert progress.best is None and progress.with_trained is None
    assert monitor.note(progress, {metric: 0.3}, True)
    assert not monitor.note(progress, {metric: math.nan}, True)
    assert progress.best == progress.with_trained == 0.3


SCRIPT = """
from pathlib import Path
import numpy as np
from retrieval.plugin import hookimpl

class Scripted:
    depth = 1

    def __init__(self, values):
        self.values = list(map(float, values))

    def __call__(self, matches, relevant):
        # the calls are counted in a file, as a resumed run builds the metric again
        with Path("calls").open("a") as file:
            file.write(".")
        calls = len(Path("calls").read_text())
        return np.full(len(relevant), self.values[min(calls, len(self.values)) - 1])

@hookimpl
def retrieval_metrics():
    return {"scripted": Scripted}

@hookimpl
def retrieval_epoch_end(run, epoch, metrics):
    assert "validation_map_at_r" in metrics
    print("hook of epoch", epoch)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script with hooks of its own, which runs in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    main = ModuleType("__main__")
    exec(SCRIPT, vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)


def scripted(values: list[float], **settings: Any) -> dict[str, Any]:
    """A recipe whose monitored metric has these values at the start and after each epoch."""
    metric = {"name": "__main__.scripted", "values": list(map(str, values))}
    settings = {"device": "cpu", "epochs": len(values) - 1, **settings}
    return SMALL | {"plugins": ["__main__"], "train": {"monitor": metric, **settings}}


def test_the_hooks_of_a_script_are_a_plugin(script, capsys):
    run = retrieval.train(scripted([0.1, 0.2]) | {"plugins": []}, "run", plugins=["__main__"])
    assert "hook of epoch 1" in capsys.readouterr().out
    assert retrieval.load("run").recipe.plugins == run.recipe.plugins == ["__main__"]


@pytest.mark.parametrize(
    ("values", "settings", "best", "unmeasured"),
    [
        ([0.1, 0.3, math.nan, 0.2], {}, 1, [2]),
        ([math.nan, 0.3, 0.9], {}, 2, [0]),
        ([math.inf, 0.3, math.nan, math.nan, 0.4], {"patience": 2}, 4, [0, 2, 3]),
        ([math.nan, math.nan, -math.inf], {"patience": 1}, 2, [0, 1, 2]),
    ],
)
def test_an_epoch_that_cannot_be_measured_is_said_and_has_no_score(
    values, settings, best, unmeasured, script, tmp_path
):
    lines: list[str] = []
    run = retrieval.train(scripted(values, **settings), "run", report=lines.append, progress=False)
    warnings = [line for line in lines if "NaN" in line]
    assert len(warnings) == len(unmeasured)
    for epoch, line in zip(unmeasured, warnings, strict=True):
        assert line.startswith(f"warning: in epoch {epoch}, the metric __main__.scripted")
    (name,) = [key for key in run.history[-1] | run.history[0] if "scripted" in key] or [""]
    scores = [row.get(name) for row in log(Path("run"))]
    measured = [value if math.isfinite(value) else None for value in values]
    assert scores == pytest.approx(measured[1:])
    ended = summary(Path("run"))
    assert (ended["best_epoch"], ended["start"]) == (best, pytest.approx(measured[0]))
    assert 0 < ended["validation"]["map_at_r"] <= 1
    (said,) = [line for line in lines if line.startswith("Kept: ")]
    if len(unmeasured) == len(values):
        assert said.startswith(f"Kept: the last epoch ({best}), because validation __main__")
        assert same(Path("run"), Path("run"), "best")
    else:
        assert said.startswith(f"Kept: epoch {best}, ")


def test_a_run_resumes_after_an_epoch_that_cannot_be_measured(script, tmp_path, monkeypatch):
    recipe = scripted([math.nan] * 3)
    retrieval.train(recipe, "whole", progress=False)
    real = Trainer._train_batch

    def stop(self: Any, *arguments: Any) -> Any:
        if self.progress.total == 6:
            raise KeyboardInterrupt
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_batch", stop)
        refusal(Interrupted, retrieval.train, recipe, "run", progress=False)
    assert retrieval.load("run").path == Path("run")
    retrieval.train(recipe, "run", resume=True, progress=False)
    for file in ("last", "best"):
        assert same(Path("run"), Path("whole"), file)


def test_a_learner_is_fitted_if_a_metric_cannot_be_measured(script, tmp_path):
    table = items(tmp_path, train=[4, 4, 4, 4], validation=[4, 4], test=[4, 4])
    lines: list[str] = []
    metrics = [{"name": "__main__.scripted", "values": ["nan"]}, "map_at_r"]
    checked = recipe(table, "learner", plugins=["__main__"], evaluate={"metrics": metrics})
    train_run(tmp_path / "run", checked, report=lines.append)
    assert any("warning: the metric __main__.scripted" in line for line in lines)
    assert list(summary(tmp_path / "run")["validation"]) == ["map_at_r"]


def test_a_group_without_an_answerable_query_has_no_means():
    codes, labels = np.eye(4, 2), ["a", "a", "b", "c"]
    groups = retrieval.evaluate(codes, labels, by=["x", "x", "y", "y"]).groups
    assert groups["y"] == {"queries": 0.0}
    json.dumps(groups, allow_nan=False)
