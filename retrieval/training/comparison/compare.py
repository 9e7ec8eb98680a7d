"""`retrieval compare`: search, train, measure, and write what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from retrieval.errors import DataError, Interrupted
from retrieval.recipe.read import Recipe
from retrieval.serving.files.locks import hold
from retrieval.serving.files.places import StrPath
from retrieval.serving.progress import Meter, Progress, shown
from retrieval.training.comparison import baselines, plan, space
from retrieval.training.comparison.jobs import Figures, Job
from retrieval.training.comparison.on_ray import on_ray
from retrieval.training.comparison.result import Comparison, Contestant
from retrieval.training.comparison.search import Do, Trial, best, require_optuna, search
from retrieval.training.comparison.workers import Workers
from retrieval.training.comparison.written import differences, figures, write
from retrieval.training.process import ending_as_interrupted
from retrieval.training.tracking import Tracking, ending, failures

MOST_WORKERS = 64


@shown
def compare(
    recipes: Sequence[StrPath],
    output: StrPath = "comparison",
    *,
    seeds: int = 5,
    search: int = 0,
    folds: int = 4,
    workers: int = 1,
    ray: str | None = None,
    cpus: int | None = None,
    pretrained: str | None = None,
    allow_different: bool = False,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    track: Sequence[str] = (),
    progress: Progress = True,
    report: Callable[[str], None] | None = None,
) -> Comparison:
    """Compare recipes under one budget, and write the tables into a folder.

    The same call goes on where one was stopped.

    Settings are searched for on the training side alone, its classes divided into folds (Musgrave,
    Belongie & Lim, "A Metric Learning Reality Check", ECCV 2020, §4): no item of the test side is
    within reach. With the best of them each recipe is then trained once for each seed as it says
    itself, and measured on the test side.

    Args:
        recipes: TOML files, two at least.
        output: the comparison's folder.
        seeds: runs of each recipe, 2 at least.
        search: settings to try for each recipe, of its `[search]`; 0: it is taken as it is.
        folds: into how many parts the training classes are divided to judge a setting; each is held
            out once.
        workers: processes that train at the same time.
        ray: a Ray cluster that trains, HOST:PORT of its head, or "auto" on one of its nodes;
            `output` and the data lie where all of its nodes see them.
        cpus: with `ray`, cores of each training; None for 4, or as many as the smallest node has.
        pretrained: the backbone of the row "pretrained, frozen"; "none" for none; None: the
            recipes' own if it has weights, else one that is installed.
        allow_different: compare also what differs in data, backbone or budget, and say so.
        overrides: changes to each recipe, as `"train.epochs=5"`.
        plugins: further plugin files or modules.
        track: trackers that are told of the comparison and of each training with a seed: "wandb",
            "mlflow", or a plugin's.
        progress: True shows a bar, False nothing; a function is told (what, done, total).
        report: is told what trackers say; by default it is printed where bars are shown.

    Returns:
        The figures and what can be said of them.

    Raises:
        DataError: with every problem of the recipes; they differ; the folder holds another
            comparison; a training failed.
        PluginError: there is no such tracker.
        MissingDependency: the search needs Optuna, or a cluster Ray.
        Interrupted: Ctrl-C or SIGTERM; the same call goes on.
    """
    _refuse_numbers(seeds, search, folds, workers)
    if ray is not None and workers != 1:
        raise DataError("--workers are of this machine, and --ray is a cluster: give one of them.")
    if search:
        require_optuna()
    read = plan.read_recipes(recipes, overrides, plugins, bool(search))
    different = plan.refuse_different(read, allow_different)
    backbone, why = baselines.pretrained_backbone(read[0], pretrained)
    tables = {recipe.name: recipe.model_dump(exclude_unset=True) for recipe in read}
    planned = plan.Plan(tables, search, folds, backbone, seeds)
    say = report or (print if progress is True else _nothing)
    told = Tracking(track, read[0].loaded, say)
    folder = Path(output).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        held.enter_context(hold(folder, "comparing into this folder", DataError))
        plan.settle(folder, planned)
        total = len(read) * (search * folds + seeds) + seeds + (backbone is not None)
        meter = held.enter_context(Meter("comparing", total, "runs"))
        held.enter_context(ending(told))
        told.begin(folder, folder.name, asdict(planned))
        jobs = Jobs(read, folder, planned, tuple(track))
        who = (
            Workers(workers, meter)
            if ray is None
            else held.enter_context(on_ray(ray, read[0], cpus, folder, meter))
        )
        try:
            with ending_as_interrupted():
                first, *found = who.all(
                    [jobs.baselines, *(partial(jobs.contestant, recipe) for recipe in read)]
                )
        except (KeyboardInterrupt, Interrupted):
            raise Interrupted(
                "Interrupted; what was done is kept. The same command goes on."
            ) from None
        missing = None if backbone else f"pretrained, frozen: {why}"
        contestants = [*_baselines(first, seeds, bool(backbone)), *found]
        result = Comparison(contestants, seeds, search, folds, different, missing, read[0].name)
        write(folder, result)
        _tell(told, result)
    for sentence in failures([*folder.glob("runs/*/seed-*")]) if track else ():
        say(f"warning: {sentence}")
    return result


@dataclass(frozen=True)
class Jobs:
    """What a comparison does: its tasks, each of which asks for jobs."""

    recipes: list[Recipe]
    folder: Path
    plan: plan.Plan
    track: tuple[str, ...]

    def baselines(self, do: Do) -> list[Figures]:
        """Measure the baselines."""
        first, seeds, backbone = self.recipes[0], self.plan.seeds, self.plan.pretrained
        jobs = [baselines.untrained_job(first, seed, self.folder) for seed in range(seeds)]
        return do(
            [*jobs, *([baselines.frozen_job(first, backbone, self.folder)] if backbone else [])]
        )

    def contestant(self, recipe: Recipe, do: Do) -> Contestant:
        """Search for a recipe's settings, then train it with each seed."""
        tried: list[Trial] = []
        table = space.table_of(recipe)
        if self.plan.trials:
            place = self.folder / "search" / recipe.name
            tried = search(recipe, self.plan.trials, self.plan.folds, place, do)
            table = space.changed(table, best(tried).values)
        jobs = [
            Job(
                "seed",
                _seeded(recipe, table, seed),
                self.folder / "runs" / recipe.name / f"seed-{seed}",
                self.folder / "results" / recipe.name / f"seed-{seed}.json",
                track=self.track,
                group=self.folder.name,
            )
            for seed in range(self.plan.seeds)
        ]
        figures = [found["trained"] for found in do(jobs)]
        return Contestant(recipe.name, True, figures, best(tried).values if tried else {}, tried)


def _tell(told: Tracking, result: Comparison) -> None:
    """Tell trackers the means and the tables."""
    told.figures(
        {
            f"{c.name}/{metric}": result.mean(c, metric).value
            for c in result.contestants
            for metric in result.metrics
        }
    )
    told.table("figures", figures(result))
    told.table("differences", differences(result))
    for each in result.contestants:
        if each.trials:
            keys = list(each.trials[0].values)
            rows = [[*(str(t.values[key]) for key in keys), str(t.score)] for t in each.trials]
            told.table(f"trials of {each.name}", [[*keys, "MAP@R"], *rows])


def _nothing(line: str) -> None:
    """Say nothing."""


def _refuse_numbers(seeds: int, trials: int, folds: int, workers: int) -> None:
    if seeds < 2:
        raise DataError(
            f"A comparison needs two seeds at least, and five to say much: with {seeds} there is no"
            " interval. Give --seeds 5."
        )
    if trials < 0:
        raise DataError("--search is a number of trials: 0 for none, or 1 and more.")
    if folds < 2:
        raise DataError("A search needs two folds at least: some classes train while others judge.")
    if not 1 <= workers <= MOST_WORKERS:
        raise DataError(f"--workers is a number of processes from 1 to {MOST_WORKERS}.")


def _seeded(recipe: Recipe, table: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return a recipe's table with a seed; a learner that draws random numbers has one of its own,
    which is 0 unless it is set.
    """
    made = {**table, "seed": seed}
    if recipe.learner is not None and not {"seed", "random_state"} & set(recipe.learner.parameters):
        factory = recipe.loaded.find("learners", recipe.learner.name)
        if any(each.name == "seed" for each in factory.parameters):
            made["learner"] = {**table["learner"], "seed": seed}
    return made


def _baselines(found: list[Figures], seeds: int, frozen: bool) -> list[Contestant]:
    """Return the baselines: what no seed changes is the same for all of them."""
    raw = next(name for name in found[0] if name != "untrained")
    made = [
        Contestant(raw, False, [found[0][raw]] * seeds),
        Contestant("untrained", False, [each["untrained"] for each in found[:seeds]]),
    ]
    if frozen:
        made.append(
            Contestant("pretrained, frozen", False, [found[-1]["pretrained, frozen"]] * seeds)
        )
    return made
