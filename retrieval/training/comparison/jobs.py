"""Jobs of a comparison: train or measure in this process, in others, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from retrieval.data.datasets import Subset
from retrieval.data.splits import Splits, make_splits
from retrieval.errors import DataError, Diverged, Interrupted, RetrievalError
from retrieval.evaluation.evaluate_run import evaluate
from retrieval.host.allow import answering
from retrieval.host.cores import cores
from retrieval.host.files import write_json
from retrieval.host.lazy import keep_compiler_out
from retrieval.host.python_parts import WORDS, is_object
from retrieval.host.version import installed_version
from retrieval.model.contracts import Dataset
from retrieval.model.model import Model
from retrieval.recipe.read import Recipe, check_recipe, read_table
from retrieval.recipe.tables import Split
from retrieval.run import checkpoint
from retrieval.run.build import build_backbone, build_dataset, build_model
from retrieval.run.folder import create_folder, is_complete, is_run
from retrieval.run.open import Run
from retrieval.run.resume import changed_plugins
from retrieval.serving.embedding.runners import Cluster
from retrieval.serving.progress import Meter, showing
from retrieval.serving.runtime import quiet_threads
from retrieval.training.comparison.plan import PRIMARY
from retrieval.training.tracking import tracking
from retrieval.training.trainer import train

PATIENCE = 30.0
"""Seconds that stopped trainings on a cluster have to write their checkpoints."""
TRIES = 3
"""Number of times that a job is restarted after its node was lost."""
STOPPED = "The comparison was asked to stop."


@dataclass(frozen=True)
class Job:
    """One training or measurement of a comparison.

    Attributes:
        kind: "fold" trains on a part of the training side and measures the rest; "seed" trains and
            measures the test side; "untrained" measures the untrained net; "frozen" measures the
            backbone's features.
        table: the recipe's table.
        folder: the folder of the run, which is deleted afterwards unless the kind is "seed".
        result: the file for the metrics.
        fold: a fold's number, and the number of folds of the training side.
        track: trackers of a job of the kind "seed".
        group: the comparison's name in the trackers.
        objects: the recipe's Python objects, by table.
    """

    kind: Literal["fold", "seed", "untrained", "frozen"]
    table: Mapping[str, Any]
    folder: Path
    result: Path
    fold: tuple[int, int] = (0, 0)
    track: tuple[str, ...] = ()
    group: str | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)


def recipe_of(table: Mapping[str, Any], objects: Mapping[str, Any]) -> Recipe:
    """Return the checked recipe of a table, with those of the objects that it names."""
    named = {part for part in objects if is_object(str(dict(table.get(part, {})).get("name")))}
    return check_recipe(table, objects={part: objects[part] for part in named})


Figures = dict[str, dict[str, float]]
"""Metrics by what was measured, such as "trained"; empty for a fold whose training diverged."""
Do = Callable[[Sequence[Job]], list[Figures]]
"""Runs jobs and returns their metrics in order."""
Answer = tuple[Figures, str, int]
"""A job's metrics, or an error message and exit code, as not every error can be pickled."""


def known(job: Job) -> Figures | None:
    """Return the metrics of a finished job, or `None`.

    Raises:
        DataError: the file of the metrics is damaged.
    """
    try:
        table = json.loads(job.result.read_text(encoding="utf-8"))
        return {
            str(name): {str(metric): float(value) for metric, value in row.items()}
            for name, row in table.items()
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{job.result} is damaged: {error}. Remove it, and the same command measures anew."
        ) from None


def perform(job: Job) -> Figures:
    """Run or resume a job, and write its metrics.

    Raises:
        RetrievalError: the job failed.
        Interrupted: the job was stopped; a training has written its checkpoint.
    """
    before = known(job)
    if before is not None:
        return before
    with showing(False):
        try:
            metrics = _KINDS[job.kind](job)
        except Diverged:
            if job.kind != "fold":
                raise
            metrics = {}
    job.result.parent.mkdir(parents=True, exist_ok=True)
    write_json(job.result, metrics, DataError)
    if job.kind != "seed":
        shutil.rmtree(job.folder, ignore_errors=True)
    return metrics


def training_side(splits: Splits) -> NDArray[np.int64]:
    """Return the training and validation items, the only ones that a search may use."""
    return np.sort(np.concatenate([splits.train, splits.validation]))


def drawn_splits(recipe: Recipe, table: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return `count` `[split]` tables: the recipe's own if `count` is 1, else random ones.

    Raises:
        DataError: the data define their own split.
    """
    own = dict(table.get("split", {}))
    if count == 1:
        return [own]
    _, splits, split = _training_items(table, recipe.objects)
    if split.by == "given":
        raise DataError(
            f'Several splits are drawn, and [split] by = "given" of {recipe.name} takes the data\'s'
            " own. Give splits=1, or set split.by to class."
        )
    if split.by == "item":
        return [{**own, "seed": split.seed + number} for number in range(count)]
    held = len(splits.classes) - len(np.unique(splits.labels[training_side(splits)]))
    draws = [
        np.random.default_rng([split.seed % 2**64, number, *b"splits"]).permutation(splits.classes)
        for number in range(count)
    ]
    return [{**own, "test": sorted(order[:held].tolist())} for order in draws]


def fold_classes(splits: Splits, seed: int, folds: int) -> list[list[str]]:
    """Return the classes of the training side in `folds` parts of about the same size.

    Raises:
        DataError: a part would have fewer than two classes.
    """
    classes = np.unique(splits.labels[training_side(splits)])
    if len(classes) < max(2 * folds, 4):
        raise DataError(
            f"The training side has {len(classes)} classes, and each of {folds} folds needs two:"
            " take fewer folds, or hold out fewer classes for the test."
        )
    order = np.random.default_rng([seed % 2**64, *b"folds"]).permutation(classes)
    return [[splits.classes[i] for i in sorted(part)] for part in np.array_split(order, folds)]


def fold_recipe(job: Job) -> tuple[Recipe, Dataset]:
    """Return a fold's recipe, and its dataset of the training side alone.

    One part of the classes is the test side. If fewer classes remain than a batch needs, the batch
    takes more items of each and keeps about its size.
    """
    inner, splits, split = _training_items(job.table, job.objects)
    number, folds = job.fold
    held = fold_classes(splits, split.seed, folds)[number]
    table = {**job.table, "split": {**split.model_dump(), "by": "class", "test": held}}
    objects = {**job.objects, "data": inner}
    recipe = check_recipe(table, objects=objects)
    sampler = recipe.sampler
    classes = len(np.unique(make_splits(inner, recipe.split).train_labels))
    if recipe.learner is None and sampler.classes > classes:
        items = round(sampler.classes * sampler.items / classes)
        smaller = sampler.model_copy(update={"classes": classes, "items": items})
        table["sampler"] = smaller.model_dump(exclude_none=True)
        recipe = check_recipe(table, objects=objects)
    return recipe, inner


_items: dict[str, tuple[Subset, Splits, Split]] = {}
"""The training side that this process opened last, which all folds of a search share."""


def _training_items(
    table: Mapping[str, Any], objects: Mapping[str, Any]
) -> tuple[Subset, Splits, Split]:
    """Return the items of the training side, all splits, and the `[split]` table."""
    parts = [table.get(name) for name in ("plugins", "data", "split")]
    key = json.dumps([*parts, id(objects.get("data"))], default=str)
    if key not in _items:
        recipe = recipe_of(table, objects)
        dataset = build_dataset(recipe)
        splits = make_splits(dataset, recipe.split)
        _items.clear()
        _items[key] = Subset(dataset, training_side(splits)), splits, recipe.split
    return _items[key]


def _metrics(recipe: Recipe) -> list[str | dict[str, Any]]:
    named = list(recipe.evaluate.metrics)
    return named if PRIMARY in named else [*named, PRIMARY]


def _trained(recipe: Recipe, folder: Path) -> Run:
    if not is_complete(folder):
        return train(folder, recipe, resume=is_run(folder))
    # the run's copies of plugin files are allowed if they are the recipe's own
    own = read_table(folder / "recipe.toml")[0].get("plugins", [])
    with answering(None, allowed=not changed_plugins(recipe.plugins, own)):
        return Run.open(folder, **{WORDS[part]: value for part, value in recipe.objects.items()})


def _fold(job: Job) -> Figures:
    recipe, _ = fold_recipe(job)
    try:
        run = _trained(recipe, job.folder)
        return {"trained": evaluate(run, metrics=_metrics(recipe)).metrics["trained"]}
    except (Diverged, Interrupted):
        raise
    except RetrievalError as error:
        raise DataError(
            f"{recipe.name}, in the search, where one of {job.fold[1]} parts of the training side"
            f" is held out each time: {error}\nMore folds leave more to train on."
        ) from error


def _seed(job: Job) -> Figures:
    recipe = recipe_of(job.table, job.objects)
    called = f"{recipe.name} seed {recipe.seed}"
    # a worker cannot report a tracker's failure; the run's folder records it
    with tracking(job.track, recipe, lambda line: None, name=called, group=job.group) as tracker:
        run = _trained(recipe, job.folder)
        tracker.retrieval_run_start(run)  # for a run that was already trained
        metrics = evaluate(run, metrics=_metrics(recipe)).metrics["trained"]
        tracker.log({f"test_{name}": value for name, value in metrics.items()})
    return {"trained": metrics}


def _measured(job: Job) -> Figures:
    """Measure an untrained net (with seed 0 also the raw items), or a backbone's features."""
    recipe = recipe_of(job.table, job.objects)
    untrained = job.kind == "untrained"
    checkpoint.seed_everything(recipe.seed)
    dataset = build_dataset(recipe)
    splits = make_splits(dataset, recipe.split)
    model = (
        build_model(recipe, dataset)
        if untrained and recipe.learner is None
        else Model(build_backbone(recipe, dataset), nn.Identity())
    )
    shutil.rmtree(job.folder, ignore_errors=True)
    create_folder(job.folder, recipe)
    run = Run(job.folder, recipe, dataset, splits, model.eval())
    raw = untrained and recipe.seed == 0
    rows = evaluate(run, metrics=_metrics(recipe), baseline=raw).metrics
    return {job.kind if name == "trained" else name: values for name, values in rows.items()}


_KINDS = {"fold": _fold, "seed": _seed, "untrained": _measured, "frozen": _measured}


def answer(job: Job) -> Answer:
    """Run a job in another process."""
    try:
        return perform(job), "", 0
    except RetrievalError as error:
        return {}, str(error), error.exit_code


class Workers:
    """Runs jobs in this process, and counts them; subclasses run them elsewhere."""

    def __init__(self, meter: Meter) -> None:
        self._meter, self._lock = meter, threading.Lock()

    def __call__(self, jobs: Sequence[Job]) -> list[Figures]:
        """Return the metrics of jobs, in order; those done before are not done again."""
        return [self._counted(perform(job)) for job in jobs]

    def _counted(self, metrics: Figures) -> Figures:
        with self._lock:
            self._meter.update()
        return metrics

    def all(self, tasks: Sequence[Callable[[Do], Any]]) -> list[Any]:
        """Run tasks, each of which gets these workers for its jobs.

        Raises:
            RetrievalError: the error of the first job that failed.
            KeyboardInterrupt: Ctrl-C; all workers have stopped.
        """
        return [task(self) for task in tasks]


class Elsewhere(Workers):
    """Runs tasks in parallel threads, and their jobs in other processes."""

    def _submit(self, job: Job) -> Future[Answer]:
        raise NotImplementedError

    def _stop(self) -> None:
        """Stop the running jobs; trainings first write their checkpoints."""
        raise NotImplementedError

    def _lost(self, error: Exception) -> Exception:
        """Return the error of a job whose process was lost."""
        raise NotImplementedError

    def __call__(self, jobs: Sequence[Job]) -> list[Figures]:
        """See `Workers`."""
        pending = [(known(job), job) for job in jobs]
        started = [self._submit(job) if before is None else before for before, job in pending]
        return [self._counted(self._result(item)) for item in started]

    def _result(self, item: Figures | Future[Answer]) -> Figures:
        if not isinstance(item, Future):
            return item
        try:
            metrics, sentence, code = item.result()
        except Exception as error:
            raise self._lost(error) from None
        if sentence:
            raise (Interrupted if code == Interrupted.exit_code else DataError)(sentence)
        return metrics

    def all(self, tasks: Sequence[Callable[[Do], Any]]) -> list[Any]:
        """See `Workers`."""
        with ThreadPoolExecutor(len(tasks)) as threads:
            try:
                waiting = [threads.submit(task, self) for task in tasks]
                return [future.result() for future in waiting]
            except BaseException:
                self._stop()
                raise


class Processes(Elsewhere):
    """Runs jobs in processes of this machine, each with its share of the cores."""

    def __init__(self, count: int, meter: Meter) -> None:
        super().__init__(meter)
        self.pool = ProcessPoolExecutor(
            count,
            multiprocessing.get_context("spawn"),
            initializer=_begin_worker,
            initargs=(max(1, cores() // count),),
        )

    def _submit(self, job: Job) -> Future[Answer]:
        return self.pool.submit(_answer_unless_stopped, job)

    def _stop(self) -> None:
        running = list((self.pool._processes or {}).values())
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            if process.is_alive():
                process.terminate()

    def _lost(self, error: Exception) -> Exception:
        if not isinstance(error, BrokenProcessPool):
            return error
        return DataError(
            "A worker process ended before its work was done, perhaps for want of memory. The same"
            " command goes on; fewer workers take less memory."
        )


def _begin_worker(threads: int) -> None:
    """Set up a worker process; it exits when its parent exits."""
    keep_compiler_out()
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # Ctrl-C reaches only the main process, which stops each worker
    quiet_threads()
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)  # safe, because all files are written atomically

    threading.Thread(target=follow, daemon=True).start()


_stopped = False
"""Whether this worker process was stopped."""


def _answer_unless_stopped(job: Job) -> Answer:
    """Run a job in a worker process, which starts no further job once it was stopped."""
    global _stopped
    result: Answer = ({}, STOPPED, Interrupted.exit_code) if _stopped else answer(job)
    _stopped = result[2] == Interrupted.exit_code
    return result


class OnRay(Elsewhere):
    """Runs jobs as tasks of a Ray cluster whose nodes share the comparison's folder."""

    def __init__(self, cluster: Cluster, folder: Path, meter: Meter) -> None:
        super().__init__(meter)
        self._ray, plan = cluster.ray, folder / "plan.json"
        self._stopped, self._running = False, dict[Future[Any], Any]()
        self._arguments = installed_version(), plan, _checksum(plan), cluster.cpus
        self._remote = self._ray.remote(_answer_on_node).options(
            num_cpus=cluster.cpus,
            num_gpus=int(cluster.gpu),
            max_retries=TRIES,
            retry_exceptions=False,
        )

    def _submit(self, job: Job) -> Future[Answer]:
        with self._lock:
            if self._stopped:
                raise Interrupted(STOPPED)
            ref = self._remote.remote(job, *self._arguments)
            future: Future[Any] = ref.future()
            self._running[future] = ref
            return future

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            refs = [ref for future, ref in self._running.items() if not future.done()]
        for ref in refs:
            with contextlib.suppress(Exception):
                self._ray.cancel(ref)
        for ref in self._ray.wait(refs, num_returns=len(refs), timeout=PATIENCE)[1] if refs else ():
            with contextlib.suppress(Exception):
                self._ray.cancel(ref, force=True)

    def _lost(self, error: Exception) -> Exception:
        if self._stopped or isinstance(error, self._ray.exceptions.TaskCancelledError):
            return Interrupted(STOPPED)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join([*lines[:1], *lines[-1:]])[:400].rstrip(".")
        return DataError(
            f"A training on the cluster was lost: {reason}. The same command goes on; more cpus"
            " leave each training more of its node's memory."
        )


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _answer_on_node(job: Job, version: str, plan: Path, checksum: str, cpus: int) -> Answer:
    """Run a job on a node that has the same version and sees the comparison's folder."""
    node, sentence = socket.gethostname(), ""
    if version != installed_version():
        sentence = (
            f"Node {node} has retrieval {installed_version()}, this machine {version}: install the"
            " same on every node."
        )
    elif not plan.is_file() or _checksum(plan) != checksum:
        sentence = (
            f"Node {node} does not see {plan.parent}: on a cluster, the output lies in a folder"
            " that all nodes share."
        )
    if sentence:
        return {}, sentence, DataError.exit_code
    quiet_threads()
    torch.set_num_threads(cpus)
    try:
        return answer(job)
    except KeyboardInterrupt:  # raised only between two trainings, so no file is half written
        return {}, STOPPED, Interrupted.exit_code


@contextlib.contextmanager
def workers(
    count: int, ray: str | None, cpus: int | None, recipe: Recipe, folder: Path, meter: Meter
) -> Iterator[Workers]:
    """Context manager that yields the workers for the jobs.

    Args:
        count: number of processes; 1 means this process.
        ray: the address of a Ray cluster to use instead; see `Cluster.joined`.
        cpus: cores per training on the cluster; see `Cluster.joined`.
        recipe: one of the compared recipes; its `[train] device` decides whether a job needs a GPU.
        folder: the comparison's folder, with its `plan.json`.
        meter: the progress bar of the jobs.

    Raises:
        MissingDependency: Ray is not installed.
        DataError: no cluster can be reached.
    """
    if ray is not None:
        with Cluster.joined(ray, recipe.train.device, cpus) as cluster:
            yield OnRay(cluster, folder, meter)
    elif count == 1:
        yield Workers(meter)
    else:
        processes = Processes(count, meter)
        try:
            yield processes
        finally:
            processes.pool.shutdown(cancel_futures=True)
