"""Ctrl-C before the first checkpoint, resuming what has not begun, and with other threads."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import retrieval
import torch
from refusals import refusal
from retrieval.errors import DataError, Interrupted
from retrieval.recipe.read import check_recipe, to_toml
from retrieval.training import trainer
from retrieval.training.comparison import plan
from retrieval.training.trainer import Trainer, train_run
from trained_weights import SMALL, same


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run of `SMALL`."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train_run(folder, check_recipe(SMALL))
    return folder


def interrupted_in(monkeypatch: Any, target: Any, name: str, call: Any) -> str:
    """Press Ctrl-C in a function of the training, and return what the caller is told."""
    with monkeypatch.context() as patch:

        def press(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(target, name, press)
        return refusal(Interrupted, call)


# before the folder exists, while features are cached, before the start is validated
MOMENTS = [(trainer, "look_ahead"), (Trainer, "_enter_phase"), (Trainer, "_validate_start")]


@pytest.mark.parametrize(("target", "name"), MOMENTS)
def test_in_python_an_early_ctrl_c_says_how_to_go_on(target, name, whole, tmp_path, monkeypatch):
    lines: list[str] = []

    def start(**options: Any) -> Any:
        return retrieval.train(SMALL, tmp_path / "run", progress=False, **options)

    said = interrupted_in(monkeypatch, target, name, start)
    begun = (tmp_path / "run").exists()
    assert said == "Interrupted. " + (
        f"Continue in {tmp_path / 'run'} with resume=True." if begun else "Call it again."
    )
    start(resume=True, report=lines.append)
    assert any("training starts from the beginning" in line for line in lines)
    assert same(tmp_path / "run", whole)


@pytest.mark.parametrize(("target", "name"), MOMENTS)
def test_on_the_command_line_resume_begins(target, name, whole, tmp_path, monkeypatch, cli):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(check_recipe(SMALL)))
    call = ["train", recipe, "--output", tmp_path / "run"]
    monkeypatch.setattr(sys, "argv", ["retrieval", *map(str, call)])
    with monkeypatch.context() as patch:
        patch.setattr(target, name, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt()))
        stopped = cli(*call)
    assert stopped.code == 130 and "Go on with: retrieval train" in stopped.err
    done = cli(*call, "--resume")
    assert done.code == 0 and "training starts from the beginning" in done.out
    assert same(tmp_path / "run", whole)


def test_a_comparison_interrupted_before_its_first_job_says_how_to_go_on(tmp_path, monkeypatch):
    def start() -> Any:
        names = [SMALL | {"name": name} for name in "ab"]
        return retrieval.compare(names, tmp_path / "out", pretrained="none", progress=False)

    for name in ("read_recipes", "settle"):
        said = interrupted_in(monkeypatch, plan, name, start)
        assert said == "Interrupted; finished work is kept. The same command goes on."


def test_an_old_run_that_was_not_replaced_is_not_resumed(whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    train_run(folder, check_recipe(SMALL | {"seed": 1}))

    def replace() -> Any:
        return retrieval.train(SMALL, folder, replace=True, progress=False)

    said = interrupted_in(monkeypatch, trainer, "look_ahead", replace)
    assert said == "Interrupted. Call it again."
    said = interrupted_in(monkeypatch, Trainer, "_validate_start", replace)
    assert "resume=True" in said
    retrieval.train(SMALL, folder, resume=True, progress=False)
    assert same(folder, whole)


def test_resume_takes_no_other_folder(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    said = refusal(DataError, retrieval.train, SMALL, tmp_path, resume=True, progress=False)
    assert "exists already and is not a run" in said


def test_a_resumed_run_keeps_its_number_of_threads(tmp_path, monkeypatch):
    recipe, lines, batches = check_recipe(SMALL), list[str](), itertools.count(1)
    real, before = Trainer._train_batch, torch.get_num_threads()

    def stop(self: Any, *arguments: Any) -> Any:
        if next(batches) == 6:
            raise KeyboardInterrupt
        return real(self, *arguments)

    try:
        torch.set_num_threads(2)
        train_run(tmp_path / "two", recipe)
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_train_batch", stop)
            with pytest.raises(KeyboardInterrupt):
                train_run(tmp_path / "run", recipe)
        torch.set_num_threads(1)
        train_run(tmp_path / "one", recipe)
        train_run(tmp_path / "run", recipe, resume=True, report=lines.append)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert "note: the run goes on with 2 threads of torch" in lines[0]
    assert same(tmp_path / "run", tmp_path / "two")
    assert not same(tmp_path / "run", tmp_path / "one")


def test_keywords_replace_the_recipes_values(tmp_path):
    run = retrieval.train(SMALL, tmp_path / "run", epochs=1, seed=4, device="cpu", progress=False)
    assert (run.recipe.train.epochs, run.recipe.seed, len(run.history)) == (1, 4, 1)
    longer = retrieval.train(SMALL, tmp_path / "run", epochs=2, seed=4, resume=True, progress=False)
    assert len(longer.history) == 2
    phases = SMALL | {"phase": [{"name": "all", "epochs": 1}], "train": {}}
    said = refusal(retrieval.errors.RecipeError, retrieval.train, phases, tmp_path / "x", epochs=3)
    assert "no effect in a recipe with [[phase]]" in said and "phase.0.epochs" in said
    assert Path(tmp_path / "x").exists() is False


STOPPED = """
import signal
import retrieval
from retrieval.training.trainer import Trainer
from trained_weights import SMALL

def test_that_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "_drawn", lambda trainer: signal.raise_signal(signal.SIGTERM))
    retrieval.train(SMALL, tmp_path / "run", progress=False)

def test_after_it():
    pass
"""


def test_a_signal_to_pytest_ends_it_while_a_test_trains(tmp_path, process):
    (tmp_path / "test_stopped.py").write_text(STOPPED)
    tests = Path(__file__).parents[1]
    words = [tmp_path / "test_stopped.py", "-c", tests.parent / "setup.cfg", "-p", "conftest"]
    paths = f"{tests}:{tests / 'helpers'}"
    stopped = process("-m", "pytest", *words, "-p", "no:cacheprovider", PYTHONPATH=paths)
    assert stopped.code == pytest.ExitCode.INTERRUPTED, stopped.out
    assert "a signal stopped the training of" in stopped.out and "passed" not in stopped.out
