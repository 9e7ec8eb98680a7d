"""`retrieval compare`: what a search may see, resuming, workers, splits, sweeps, refusals."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from comparing import LOSSES, RECIPE, go
from refusals import refusal
from retrieval.base.progress import Meter
from retrieval.errors import DataError, Interrupted, MissingDependency
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.host.importing import ALLOW
from retrieval.recipe.read import check_recipe, read_recipe
from retrieval.recipe.tables import Range, Split
from retrieval.run import checkpoint_format
from retrieval.run.open import Run
from retrieval.training.comparison import plan
from retrieval.training.comparison.jobs import ComparisonJob, drawn_splits, fold_recipe, perform
from retrieval.training.comparison.plan import ComparisonPlan
from retrieval.training.comparison.tuning import Proposals, Trial, Tuning, range_edges, tune
from retrieval.training.comparison.workers import OnCluster, Processes
from scipy.stats import kstest

from retrieval_ray.cluster import RayCluster

SLOW = '''
"""A loss that writes its process's id per call; if a file `slow` exists, it waits for another."""
import os
import time
from collections import Counter
from pathlib import Path
from pytorch_metric_learning.losses import ContrastiveLoss
from retrieval.plugin import hookimpl


HERE = Path(os.environ["NOTED"])
calls = 0


def both_train():
    """Return whether two processes have done some steps."""
    steps = Counter((HERE / "steps").read_text().split())
    return len(steps) == 2 and min(steps.values()) > 2


class Noted(ContrastiveLoss):
    def forward(self, *given, **named):
        global calls
        calls += 1
        with open(HERE / "steps", "a") as file:
            file.write(f"{os.getpid()}\\n")
        if calls > 3 and (HERE / "slow").exists():
            while not both_train():
                time.sleep(0.05)
            time.sleep(1.5)
        return super().forward(*given, **named)


retrieval_losses = hookimpl(lambda: {"noted": Noted})
'''


def test_an_interrupted_comparison_ends_as_the_whole_one(write, tmp_path, monkeypatch):
    monkeypatch.delenv(ALLOW, raising=False)
    paths, allowed = [write("triplet"), write("proxy")], [str(tmp_path / "mine.py")]
    whole = go(paths, tmp_path / "whole", plugins=allowed)
    again = partial(go, paths, tmp_path / "again", plugins=allowed)
    for jobs in (5, 10):

        def stop(what: str, done: int, total: int, last: int = jobs) -> None:
            assert what == "comparing" and total == 2 * (2 * 2 + 2) + 2
            if done == last:
                raise KeyboardInterrupt

        with pytest.raises(Interrupted, match="The same command goes on"):
            again(progress=stop)
    assert again().as_dict() == whole.as_dict()
    for file in tmp_path.glob("again/results/*/*.json"):  # as if killed before measuring
        file.unlink()
    # a run's own copy of an allowed plugin is allowed
    assert again().as_dict() == whole.as_dict()
    for name in ("md", "csv", "tex", "html", "json"):
        text = (tmp_path / "whole" / f"comparison.{name}").read_text()
        assert text == (tmp_path / "again" / f"comparison.{name}").read_text()
        assert "triplet" in text
    assert not list(tmp_path.glob("whole/search/*/*/fold-?/"))  # measured folds are deleted
    rows = json.loads((tmp_path / "whole" / "comparison.json").read_text())["contestants"]
    assert [row["name"] for row in rows] == ["raw pixels", "untrained", "triplet", "proxy"]
    monkeypatch.setenv(ALLOW, "1")
    measured = evaluate(Run.open(tmp_path / "whole/runs/proxy/seed-1"), progress=False)
    assert measured.metrics["trained"]["map_at_r"] == rows[3]["metrics"][1]["map_at_r"]
    (search,) = rows[2]["searches"]
    best = int(np.argmax([trial["score"] for trial in search["trials"]]))
    assert search["values"] == search["trials"][best]["values"]
    # the recipe's own values are tried first
    assert search["trials"][0]["values"] == {"optimizer.lr": 0.003}


def test_a_folder_is_resumed_only_with_its_own_comparison(tmp_path):
    first = ComparisonPlan({"a": {"loss": 1}, "b": {"loss": 2}}, 2, 4, None, 3)
    plan.settle(tmp_path / "c", first)
    plan.settle(
        tmp_path / "c", ComparisonPlan({"a": {"loss": 1}, "third": {"loss": 3}}, 2, 4, None, 5)
    )
    written = json.loads((tmp_path / "c" / "plan.json").read_text())
    assert list(written["recipes"]) == ["a", "b", "third"] and written["seeds"] == 5
    says = r"search was 2 and is 3 now\.(.|\n)*folds was 4(.|\n)*'b' was changed"
    with pytest.raises(DataError, match=says):
        plan.settle(
            tmp_path / "c", ComparisonPlan({"a": {"loss": 1}, "b": {"loss": 9}}, 3, 2, None, 3)
        )
    (tmp_path / "c" / "plan.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="is damaged"):
        plan.settle(tmp_path / "c", first)


@pytest.fixture
def triplet(write, tmp_path):
    """A recipe's tables, without its search."""
    write("triplet")
    table = {**RECIPE, "plugins": [str(tmp_path / "mine.py")], "loss": LOSSES["triplet"]}
    return {k: v for k, v in table.items() if k != "search"}


def test_the_search_does_not_depend_on_test_items(triplet, tmp_path):
    """The second data set has noise for the test side's digits, 6 to 9."""
    scores = []
    for scrambled in (False, True):
        table = {**triplet, "data": {"name": "mine.digits", "scrambled": scrambled}}
        recipe = check_recipe({**table, "search": RECIPE["search"]})
        folder, plan = tmp_path / f"search-{scrambled}", ComparisonPlan({}, 2, 2, None, 2)
        result = tune(recipe, table, plan, folder, lambda jobs: [perform(job) for job in jobs])
        scores.append([trial.score for trial in result.trials])
        held: list[str] = []
        for number in (0, 1):
            fold = fold_recipe(ComparisonJob("fold", table, tmp_path, tmp_path, (number, 2)))
            dataset = fold.objects["data"]
            assert set(dataset.labels) == set("012345") and len(dataset) == 120
            held += fold.split.test
        assert sorted(held) == list("012345"), "a training class is held out once"
    assert scores[0] == scores[1] and all(score is not None for score in scores[0])


def test_a_fold_with_few_classes_keeps_the_size_of_a_batch(triplet, tmp_path):
    def fold(classes: int, batches: int = 2) -> ComparisonJob:
        table = {**triplet, "sampler": {"classes": classes, "items": 4, "batches": batches}}
        return ComparisonJob(
            "fold", table, tmp_path / f"{classes}", tmp_path / f"{classes}.json", (0, 2)
        )

    samplers = [fold_recipe(fold(classes)).sampler for classes in (6, 3, 2)]
    # each of the two folds has three of the six training classes
    sizes = [(sampler.classes, sampler.items, sampler.batches) for sampler in samplers]
    assert sizes == [(3, 8, 2), (3, 4, 2), (2, 4, 2)]
    assert perform(fold(6, batches=1))["trained"]
    views = {"views": 2, "positives": "item", "horizontal_flip": 0.5}
    sampler = {"classes": 12, "items": 1, "batches": 2}
    table = {**triplet, "augmentation": views, "sampler": sampler}
    unlabelled = fold_recipe(ComparisonJob("fold", table, tmp_path, tmp_path, (0, 2))).sampler
    assert (unlabelled.classes, unlabelled.items) == (12, 1), "each item is a class"


def test_a_learner_that_draws_random_numbers_gets_the_seeds_of_the_comparison(write, tmp_path):
    own = dict.fromkeys(("loss", "sampler", "head", "optimizer"))
    own |= {"train": {"device": "cpu"}, "backbone": {"name": "core.pixels", "size": 8}}
    sizes = {"depth": 1, "hidden": 8, "embedding": 8, "seeds": 60}
    oahu = {"name": "oahu.oahu", **sizes, "closure": 0, "learning_rate": 0.1}
    paths = [
        write("drawn", **own, learner=oahu),
        write("its own", **own, learner={**oahu, "seed": 7}),
        write("closed form", **own, learner={"name": "aml.gmml", "regularization": 0.1}),
    ]
    metrics = {row.name: row.metrics for row in go(paths, tmp_path / "c", search=0).contestants}
    assert metrics["drawn"][0] != metrics["drawn"][1]
    assert metrics["its own"][0] == metrics["its own"][1], "the recipe sets the seed"
    assert metrics["closed form"][0] == metrics["closed form"][1], "nothing is random"


def check_same(actual: Any, expected: Any) -> None:
    """Check that two comparisons have the same metrics, apart from rounding."""
    for row, reference in zip(actual.contestants, expected.contestants, strict=True):
        for metrics, values in zip(row.metrics, reference.metrics, strict=True):
            assert metrics == pytest.approx(values, abs=1e-6), row.name


def test_workers_give_the_same_result(write, tmp_path):
    paths = [write("triplet"), write("proxy")]
    parallel = go(paths, tmp_path / "parallel", search=0, workers=2)
    check_same(parallel, go(paths, tmp_path / "alone", search=0))
    assert "Nothing was tuned" in parallel.notes[1]


def test_stopped_workers_exit_and_the_comparison_resumes(write, tmp_path, monkeypatch, cli):
    monkeypatch.setenv("NOTED", str(tmp_path))
    (tmp_path / "noted.py").write_text(SLOW, encoding="utf-8")
    tables = {"plugins": ["mine.py", "noted.py"], "loss": {"name": "noted.noted"}}
    tables["train"] = {"epochs": 3, "device": "cpu"}
    paths = [write("one", **tables), write("two", **tables, optimizer={"lr": 0.01})]
    steps, slow, out = tmp_path / "steps", tmp_path / "slow", tmp_path / "out"
    whole = go(paths, tmp_path / "whole", search=0)
    all_steps = len(steps.read_text().split())
    slow.touch()
    finished: dict[Path, int] = {}
    reached: dict[Path, int] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        steps.unlink()
        threading.Thread(target=_signal_once_two_train, args=(steps, number), daemon=True).start()
        options = ["--seeds", 2, "--folds", 2, "--pretrained", "none", "--workers", 2]
        outcome = cli("compare", *paths, *options, "--output", out)
        assert outcome.code == 130 and "Traceback" not in outcome.err
        assert "The same command goes on" in outcome.err
        workers = set(map(int, steps.read_text().split()))
        assert len(workers) == 2 and os.getpid() not in workers
        deadline = time.monotonic() + 30
        while multiprocessing.active_children() and time.monotonic() < deadline:
            time.sleep(0.02)
        for worker in workers:
            with pytest.raises(ProcessLookupError):
                os.kill(worker, 0)
        assert all(file.stat().st_mtime_ns == before for file, before in finished.items())
        finished = {file: file.stat().st_mtime_ns for file in out.glob("results/*/*.json")}
        checkpoints = out.glob("runs/*/*/checkpoints/last.safetensors")
        totals = {
            file: checkpoint_format.load_checkpoint(file)["progress"]["total"]
            for file in checkpoints
        }
        assert totals and all(totals[file] >= before for file, before in reached.items())
        reached = totals
    slow.unlink()
    steps.unlink()
    again = go(paths, out, search=0)
    assert len(steps.read_text().split()) <= all_steps - sum(reached.values()), "a step is repeated"
    assert all(file.stat().st_mtime_ns == before for file, before in finished.items())
    check_same(again, whole)


def _signal_once_two_train(steps: Path, number: signal.Signals) -> None:
    """Send this process a signal once two workers have done some steps."""
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline:
        counts = Counter(steps.read_text().split()) if steps.exists() else Counter()
        if len(counts) == 2 and min(counts.values()) > 2:
            os.kill(os.getpid(), number)
            return
        time.sleep(0.02)


def test_a_process_that_dies_is_a_sentence_but_a_bug_is_raised():
    worker = Processes(1, Meter("comparing", 1, "runs"))
    for error, kind in ((BrokenProcessPool("killed"), DataError), (ZeroDivisionError(), None)):
        future: Future[Any] = Future()
        future.set_exception(error)
        with pytest.raises(kind or type(error)):
            worker._result(future)


class DeafRay:
    """A stand-in for the module `ray`, whose only task ends only when it is killed."""

    exceptions = SimpleNamespace(RayError=OSError)

    def __init__(self) -> None:
        self.task: Future[Any] = Future()
        self.reference = SimpleNamespace(future=lambda: self.task)

    def nodes(self) -> list[Any]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}]

    def remote(self, function: Any) -> Any:
        return SimpleNamespace(
            options=lambda **_: SimpleNamespace(remote=lambda *_: self.reference)
        )

    def cancel(self, reference: Any, *, force: bool = False) -> None:
        if force:
            self.task.set_exception(OSError("killed"))

    def wait(self, references: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        return [], references


def test_a_cluster_task_that_does_not_stop_is_killed(tmp_path):
    def training(do: Any) -> None:
        do([ComparisonJob("seed", {}, tmp_path / "run", tmp_path / "run.json")])

    def interrupted(do: Any) -> None:
        while not cluster.running:
            time.sleep(0.01)
        raise KeyboardInterrupt

    cluster = RayCluster("auto")
    cluster.use(DeafRay())
    worker = OnCluster(cluster, "cpu", tmp_path, Meter("comparing", 1, "runs"))
    with pytest.raises(KeyboardInterrupt):
        worker.all([interrupted, training])


RANGES = {
    "loss.margin": Range(low=0.01, high=1.0, log=True),
    "loss.n": Range(low=1, high=9),
    "loss.kind": Range(choices=["a", "b"]),
}


def proposed(proposals: Proposals, scores: Sequence[float | None], known: Any = ()) -> list[Any]:
    """Return the values of trials with these scores; `known` has the values of the first trials."""
    trials = []
    for score, values in itertools.zip_longest(scores, known):
        drawn = proposals.next()
        trials.append(drawn if values is None else values)
        proposals.tell(trials[-1], score)
    return trials


def test_a_resumed_search_continues_as_if_it_had_not_been_interrupted():
    scores: list[float | None] = [None if n == 3 else (n * 7919 % 101) / 100 for n in range(24)]
    whole = proposed(Proposals("a", RANGES, {"loss.margin": 0.5}), scores)
    assert whole[0]["loss.margin"] == 0.5, "the recipe's own values are tried first"
    for values in whole:
        assert 0.01 <= values["loss.margin"] <= 1 and values["loss.n"] in range(1, 10)
        assert values["loss.kind"] in ("a", "b")
    for count in (1, 4, 13, 23):
        again = Proposals("a", RANGES, {"loss.margin": 0.5})
        assert proposed(again, scores, json.loads(json.dumps(whole[:count]))) == whole
    # values that another version of Optuna drew
    other = [{**values, "loss.margin": 0.02} for values in whole[:5]]
    assert proposed(Proposals("a", RANGES, {}), scores, other)[:5] == other


def test_the_points_of_a_search_fill_its_range_and_differ_between_recipes():
    first = set()
    for recipe in range(6):
        random = np.random.default_rng(recipe)
        trials = proposed(Proposals(f"recipe {recipe}", RANGES, {}), random.random(32).tolist())
        places = [np.log10(values["loss.margin"]) / 2 + 1 for values in trials]
        assert kstest(places, "uniform").statistic < 0.4 and len(set(places)) == 32
        first |= set(places[:10])
    assert len(first) == 60


def test_a_search_finds_an_optimum():
    for recipe in range(6):
        proposals, best = Proposals(f"recipe {recipe}", RANGES, {}), -np.inf
        for _ in range(32):
            values = proposals.next()
            score = -(np.log10(values["loss.margin"] / 0.05) ** 2) - (values["loss.kind"] == "a")
            proposals.tell(values, score)
            best = max(best, score)
        assert best > -0.02, "a margin within a seventh of a decade of .05, and kind b"


def test_only_an_optimum_at_the_edge_of_its_range_asks_for_a_wider_range():
    declared = {
        "loss.margin": Range(low=0.1, high=1.1),
        "optimizer.lr": Range(low=1e-4, high=1e-2, log=True),
        "loss.n": Range(low=1, high=9),
        "loss.kind": Range(choices=["a", "b"]),
    }
    edges = range_edges(declared)
    assert edges["loss.margin"] == pytest.approx((0.15, 1.05))
    assert edges["optimizer.lr"] == pytest.approx((10**-3.9, 10**-2.1))
    assert set(edges) == {"loss.margin", "optimizer.lr", "loss.n"}

    def notes(key: str, *tried: float, best: float) -> list[str]:
        trials = [Trial({key: value, "loss.kind": "a"}, 0.5) for value in tried]
        return Tuning({key: best, "loss.kind": "a"}, trials, edges=edges).notes("arc")

    margin = "loss.margin"
    assert not notes(margin, 0.1, 0.2, 0.3, best=0.2) and not notes(margin, 0.1, 0.2, best=0.2)
    (low,), (high,) = (notes(margin, 0.12, 0.2, 0.3, best=best) for best in (0.12, 0.3))
    assert low == "arc was best at the lowest loss.margin tried, 0.12: widen its range."
    assert high == "arc was best at the highest loss.margin tried, 0.3: use more trials."
    assert "widen" in notes(margin, 0.2, 0.3, 1.06, best=1.06)[0]
    assert "widen" in notes("optimizer.lr", 1e-4, 1e-3, 9e-3, best=9e-3)[0]
    assert "more trials" in notes("optimizer.lr", 1e-4, 1e-3, 6e-3, best=6e-3)[0]
    assert "widen" in notes("loss.n", 1, 4, 5, best=1)[0]
    assert "more trials" in notes("loss.n", 2, 4, 5, best=2)[0]


def test_each_random_split_has_a_search(write, tmp_path, monkeypatch):
    paths = [write("triplet"), write("proxy")]
    result = go(paths, tmp_path / "c", seeds=1, splits=2, fold_by="item", repeats=2)
    held = []
    for split in (0, 1):
        recipe = (tmp_path / f"c/runs/triplet/split-{split}-seed-0/recipe.toml").read_text()
        held.append(set(tomllib.loads(recipe)["split"]["test"]))
    assert held[0] != held[1] and all(len(classes) == 4 for classes in held)
    for row in result.contestants:
        assert len(row.metrics) == 2 and len(row.searches) == (2 if row.recipe else 0)
    assert len(result.contestants[-1].searches[0].trials[0].folds) == 4, "two folds, twice"
    given = (None, None, Split(by="given"))
    monkeypatch.setattr("retrieval.training.comparison.jobs._training_items", lambda *_: given)
    with pytest.raises(DataError, match=r"the split of the data\. Use splits=1"):
        drawn_splits(read_recipe(paths[0]), {}, 2)


def test_a_sweep_is_a_comparison_of_settings_that_can_grow(write, tmp_path, cli):
    path, out = write("triplet"), tmp_path / "sweep"
    more = ["--output", out, "--pretrained", "none", "--latex", "map_at_r"]
    first = cli("sweep", path, "loss.margin=0.1,0.2", "seed=0..1", *more)
    assert first.code == 0 and "| margin=0.1 |" in first.out and "| margin=0.2 |" in first.out
    finished = {file: file.stat().st_mtime_ns for file in out.glob("results/*/*.json")}
    assert len(finished) == 4
    second = cli("sweep", path, "loss.margin=0.1,0.2,0.3", "seed=0..1", *more)
    assert second.code == 0 and "| margin=0.3 |" in second.out
    assert all(file.stat().st_mtime_ns == before for file, before in finished.items())
    assert r" & MAP@R \\" in (out / "comparison.tex").read_text()
    for wrong, sentence in (
        ("loss.margin", "give each key once"),
        ("loss.margin=1,1", "give each value once"),
        ("seed=2..4", "seeds count from 0"),
        ("seed=4..2", "write a range"),
    ):
        refused = cli("sweep", path, wrong, "optimizer.lr=0.1", *more)
        assert refused.code == 2 and sentence in refused.err
    both = cli("sweep", path, "loss.margin=0.1", "train.epochs=1,2", "seed=0,1", *more)
    assert "| margin=0.1, epochs=2 |" in both.out


def refused(*recipes: Path, out: Path, says: str, **options: Any) -> None:
    with pytest.raises(DataError, match=says):
        go(list(recipes), out, **options)


def test_one_recipe_needs_no_list(write, tmp_path):
    path = write("a")
    checked = read_recipe(path)
    tables = tomllib.loads(path.read_text()) | {"plugins": [str(tmp_path / "mine.py")]}
    for source in (path, str(path), tables, checked):
        ((recipe,),) = plan.read_recipes(source, [], [], False, {})
        assert recipe.name == checked.name


def test_wrong_recipes_and_options_are_refused_before_anything_runs(write, tmp_path):
    right, out = write("triplet"), tmp_path / "out"
    says = r"a\.toml has 1 problem(.|\n)*No such file(.|\n)*b\.toml has 1 problem"
    refused(tmp_path / "a.toml", right, tmp_path / "b.toml", out=out, says=says)
    bad = [write("one", loss={"name": "pml.tripled"}), write("two", train={"epoch": 1})]
    refused(*bad, out=out, says=r"one\.toml(.|\n)*pml.tripled(.|\n)*two\.toml(.|\n)*epochs")
    for grid in ({"loss.margin": [0.1, 0.1]}, {"train.device": ["a/b", "a:b"]}):
        refused(right, out=out, grid=grid, says=r"grid: two settings are called '.*'\. Give")
    says = r"^\S+triplet\.toml and \S+other\.toml are both called 'triplet'\. "
    says += r"Change the `name` in one of them\.$"
    refused(right, write("triplet", "other"), out=out, says=says)
    for options, says in (
        ({"seeds": 1}, "at least two seeds or two splits"),
        ({"against": "tripled"}, r"Did you mean 'triplet'.*raw pixels, untrained"),
        ({"folds": 1}, "folds is 1, and must be at least 2"),
        ({"workers": 0}, "1 to 64 workers"),
        ({"workers": 65}, "1 to 64 workers"),
    ):
        refused(right, write("proxy"), out=out, says=says, **options)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    refused(right, write("proxy"), out=tmp_path / "full", says="is not a comparison")
    wide = write("wide", sampler={"classes": 99, "items": 2})
    says = r"^wide: \[sampler\] classes: a batch takes 99 classes, but"
    refused(wide, out=out, search=0, says=says)
    assert not out.exists()


def test_a_wrong_search_is_refused_before_anything_runs(write, tmp_path, cli):
    out = tmp_path / "out"
    wrong = {
        "loss.margn": {"low": 0.1, "high": 0.2},
        "sampler.classes": {"low": 2, "high": 4},
        "optimizer.name": {"choices": ["SGD", "Adm"]},
        "optimizer.lr": {"low": 0.0, "high": 0.1},
    }
    paths = [write("triplet", search=wrong), write("proxy", search=None)]
    text = refusal(DataError, go, paths, out)
    same = "sampler.classes: data, split, batches, epochs and backbone must stay the same"
    words = ["margin", same, 'optimizer.name = "Adm"', "optimizer.lr = 0"]
    assert all(word in text for word in (*words, "proxy.toml", "has no [search]")), text
    checked = cli("check", tmp_path / "triplet.toml")
    assert checked.code == 2 and "triplet.toml has 5 problems:" in checked.err
    assert 'optimizer.name = "Adm"' in checked.err
    assert "[search] sampler.classes: data, split" in checked.err
    for margin, says in (
        ({"low": 2, "high": 1}, "low < high"),
        ({"low": 0, "high": 1, "log": True}, "above 0"),
        ({"choices": [1], "low": 0}, "either choices"),
        ({"lo": 1}, "low"),
    ):
        searched = write("triplet", search={"loss.margin": margin})
        refused(searched, write("proxy"), out=out, says=says)
    says = "6 classes, but each of 4 folds needs two"
    refused(write("triplet"), write("proxy"), out=out, says=says, folds=4)


def test_different_budgets_are_named_and_compared_only_with_allow_different(write, tmp_path):
    changes = {
        "train": {"epochs": 2, "device": "cpu"},
        "sampler": {"classes": 2, "items": 4, "batches": 4},
        "backbone": {"name": "core.convnet", "size": 8, "width": 4, "depth": 1},
        "data": {"name": "mine.digits", "scrambled": True},
    }
    paths, out = [write("triplet"), write("proxy", **changes)], tmp_path / "out"
    for says in (
        "the epochs: 1 in triplet, 2 in proxy",
        r"\[sampler\] classes: 3 in triplet, 2 in proxy",
        r"\[backbone\] width: 8 in triplet, 4 in proxy",
        r"\[data\] scrambled: nothing in triplet, true in proxy",
    ):
        refused(*paths, out=out, says=says, search=0)
    result = go(paths, out, search=0, allow_different=True)
    written = (out / "comparison.md").read_text()
    assert "The recipes differ in the epochs: 1 in triplet, 2 in proxy." in written
    assert len(result.different) == 4


def test_a_search_without_optuna_is_refused_in_a_sentence(write, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingDependency, match=r"embedding-retrieval\[compare\]"):
        go([write("triplet"), write("proxy")], tmp_path / "out")
