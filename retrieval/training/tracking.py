"""Trackers, such as Weights & Biases, log a run and never stop its training.

If a tracker fails, the run reports the failure and continues without the tracker. The run's folder
keeps the ids that trackers gave the run, so that a resumed run continues the same tracked runs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from retrieval.base.files import write_json
from retrieval.errors import Interrupted, PluginError, RetrievalError, did_you_mean
from retrieval.host.factory import failure
from retrieval.host.hookspecs import hookimpl
from retrieval.host.plugins import Plugins
from retrieval.model.contracts import TrackedRun, Tracker
from retrieval.recipe.read import Recipe
from retrieval.run.checkpoint_format import python_random_kept
from retrieval.run.open import Run, run_versions

FILE = "trackers.json"
"""File in a run's folder with each tracker's id of the run, or the tracker's failure."""


class Tracking:
    """The trackers of one run: a plugin whose hooks pass the run's metrics on to the trackers.

    Args:
        names: the trackers' names; see `full_name`.
        recipe: the run's recipe, whose plugins provide the trackers.
        tell: called with each message for the user.
        name: the name of the tracked run, by default the recipe's.
        group: the name by which trackers group the runs of a comparison.

    Raises:
        PluginError: a tracker does not exist.
    """

    def __init__(
        self,
        names: Sequence[str],
        recipe: Recipe,
        tell: Callable[[str], None],
        name: str | None = None,
        group: str | None = None,
    ) -> None:
        plugins = recipe.loaded
        # `fromkeys`: a name and its full name are one tracker
        self._trackers: dict[str, Tracker] = {
            full: plugins.build("trackers", {"name": full})
            for full in dict.fromkeys(full_name(plugins, name) for name in names)
        }
        self._name = name or recipe.name
        self._group = group
        self._say = tell
        self._folder: Path | None = None

    @hookimpl
    def retrieval_run_start(self, run: Run) -> None:
        """Begin the tracked runs, in the main process only; further calls have no effect."""
        from accelerate import PartialState

        if self._folder is not None or not PartialState().is_main_process:
            return
        self._folder = run.path
        table = {**run.recipe.model_dump(exclude_unset=True), "versions": run_versions()}
        plain = json.loads(json.dumps(table, default=str))  # paths become text
        for full in [*self._trackers]:
            key = _entries(run.path).get(full, {}).get("key")
            tracked = TrackedRun(self._name, self._group, plain, key, str(run.path))
            self._try(full, partial(self._begin, full, tracked))

    @hookimpl
    def retrieval_steps_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the means of metrics over the last steps."""
        self._tell("log_steps", step, dict(metrics))

    @hookimpl
    def retrieval_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Log an epoch's metrics."""
        self.log(metrics, epoch)

    @hookimpl
    def retrieval_run_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Log the best validation metrics, and a sheet of hits to trackers that accept images."""
        self.log({f"best_validation_{name}": value for name, value in metrics.items()})
        takes_images = any(hasattr(tracker, "image") for tracker in self._trackers.values())
        drawn = run.dataset.kind == "image" and len(run.splits.validation) > 1
        if self._folder is not None and takes_images and drawn:
            from retrieval.evaluation.plot import validation_sheet

            try:
                self._tell("image", "validation", validation_sheet(run))
            except RetrievalError as error:
                self._say(f"warning: The validation sheet cannot be drawn: {error}")

    def log(self, metrics: Mapping[str, float], epoch: int | None = None) -> None:
        """Log an epoch's metrics, or the final metrics if `epoch` is `None`."""
        if metrics:
            self._tell("log", {str(name): float(value) for name, value in metrics.items()}, epoch)

    def end(self, how: str) -> None:
        """End the tracked runs as "finished", "stopped" or "failed"."""
        self._tell("end", how)

    def _begin(self, full: str, run: TrackedRun) -> None:
        key, address = self._trackers[full].begin(run)
        self._keep(full, {"key": key})
        self._say(f"{full}: {address}")

    def _tell(self, method: str, *arguments: Any) -> None:
        """Call a method of all trackers that have the method, if the run has started."""
        if self._folder is None:
            return
        for full, tracker in [*self._trackers.items()]:  # a copy, because a failure removes one
            if hasattr(tracker, method):
                self._try(full, partial(getattr(tracker, method), *arguments))

    def _try(self, full: str, call: Callable[[], Any]) -> None:
        """Call a tracker; if the call fails, report the failure and drop the tracker."""
        subject = f"The tracker {full}"
        try:
            with python_random_kept():  # MLflow's retries draw from Python's generator
                call()
            return
        except SystemExit:
            sentence = f"{subject} failed: it tried to end the process"
        except Exception as error:
            sentence = failure(subject, error)
        del self._trackers[full]
        sentence += ". The run continues without it."
        self._say(f"warning: {sentence}")
        self._keep(full, {"failed": sentence})

    def _keep(self, full: str, entry: Mapping[str, str]) -> None:
        assert self._folder is not None
        entries = _entries(self._folder)
        # a tracker that began again has not failed
        if "key" in entry:
            before = {}
        else:
            before = entries.get(full, {})
        with suppress(OSError):  # the disk may be full
            write_json(self._folder / FILE, {**entries, full: {**before, **entry}})


def full_name(plugins: Plugins, name: str) -> str:
    """Return a tracker's full name, `PLUGIN.NAME`.

    `name` may also be NAME alone, or PLUGIN if that plugin has a single tracker.

    Raises:
        PluginError: no tracker, or more than one, has the name.
    """
    known = plugins.factories("trackers")
    offered = [full for full in known if name in (full, *full.split("."))]
    if len(offered) == 1:
        return offered[0]
    if offered:
        raise PluginError(f"'{name}' matches several trackers: name one of {', '.join(offered)}.")
    for full, reason in plugins.disabled("trackers").items():
        if name in (full, full.partition(".")[0]):
            raise PluginError(reason)
    raise PluginError(
        f"There is no tracker '{name}' (installed: {', '.join(known) or 'none'})."
        f"{did_you_mean(name, known)} For tensorboard, wandb or mlflow, install the extra of that"
        " name, as in pip install 'embedding-retrieval[wandb]'."
    )


@contextmanager
def tracking(
    names: Sequence[str],
    recipe: Recipe,
    tell: Callable[[str], None],
    *,
    name: str | None = None,
    group: str | None = None,
) -> Iterator[Tracking]:
    """Context manager in which trackers follow the training of a recipe.

    See `Tracking` for the arguments and errors.
    """
    trackers = Tracking(names, recipe, tell, name, group)
    if not names:
        yield trackers
        return
    manager = recipe.loaded.manager
    how = "failed"
    manager.register(trackers, FILE)
    try:
        yield trackers
        how = "finished"
    except (Interrupted, KeyboardInterrupt):
        how = "stopped"
        raise
    finally:
        manager.unregister(trackers)
        trackers.end(how)


def failures(folders: Sequence[Path]) -> list[str]:
    """Return one line per distinct failure of a tracker, with the number of runs that had it."""
    counts: Counter[str] = Counter()
    for folder in folders:
        counts.update(e["failed"] for e in _entries(folder).values() if "failed" in e)
    return [f"{sentence} ({count} of {len(folders)} runs)" for sentence, count in counts.items()]


def _entries(folder: Path) -> dict[str, dict[str, str]]:
    """Return the trackers' entries in a folder; empty if the file is missing or damaged."""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return {str(name): dict(entry) for name, entry in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
