"""Trackers, such as Weights & Biases, which log a run and never stop its training.

Each tracker runs in its own thread, because its network connection may hang. If a tracker fails,
the run reports the failure and continues without the tracker. The run's folder keeps the trackers'
run ids, so that a resumed run continues the same tracked run.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from retrieval.errors import Interrupted, PluginError, RetrievalError, did_you_mean
from retrieval.host.files import write_json
from retrieval.host.hookspecs import hookimpl
from retrieval.host.plugin_calls import failure
from retrieval.host.plugins import Plugins
from retrieval.model.contracts import TrackedRun, Tracker
from retrieval.recipe.read import Recipe
from retrieval.run.open import Run, run_versions

FILE = "trackers.json"
"""File that keeps each tracker's run id, or its failure, in the folder of a run or comparison."""
PATIENCE = 30.0
"""Seconds to wait for a tracker at the end of a run."""
FIRST_PATIENCE = 10.0
"""Seconds to wait for a tracker at the start of a run.

During the wait, the tracked run's address is printed before training starts. A tracker can also
finish its imports: two threads that import at once may see half-initialised modules.
"""

Tell = Callable[[str], None]


class Tracking:
    """The trackers of one run, as a plugin with the hooks of training.

    Args:
        names: the trackers; see `full_name`.
        plugins: the plugins that provide them.
        tell: called with each message for the user.
        name: the name of the tracked run, by default the recipe's.
        group: name under which the trackers group the runs of a comparison.

    Raises:
        PluginError: a tracker does not exist.
    """

    def __init__(
        self,
        names: Sequence[str],
        plugins: Plugins,
        tell: Tell,
        *,
        name: str | None = None,
        group: str | None = None,
    ) -> None:
        full_names = dict.fromkeys(full_name(plugins, name) for name in names)
        self._name, self._group, self._say = name, group, tell
        self._followers = [
            _Follower(full, plugins.build("trackers", {"name": full}), tell) for full in full_names
        ]
        self._begun = False

    @hookimpl
    def retrieval_run_start(self, run: Run) -> None:
        """Start tracking a run, in the main process only."""
        from accelerate import PartialState

        if PartialState().is_main_process:
            table = run.recipe.model_dump(exclude_unset=True)
            self.begin(
                run.path, self._name or run.recipe.name, {**table, "versions": run_versions()}
            )

    @hookimpl
    def retrieval_steps_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics' means over the last steps."""
        now = dict(metrics)
        self._tell(lambda tracker: tracker.log_steps(step, now), "log_steps")

    @hookimpl
    def retrieval_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Log an epoch's metrics."""
        self.log(metrics, epoch)

    @hookimpl
    def retrieval_run_end(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Log the best validation metrics, and a sheet of hits to trackers that accept images."""
        self.log({f"best_validation_{name}": value for name, value in metrics.items()})
        drawn = run.dataset.kind == "image" and len(run.splits.validation) > 1
        if drawn and any(follower.takes("image") for follower in self._followers):
            from retrieval.evaluation.plot import validation_sheet

            try:
                pixels = validation_sheet(run)
            except RetrievalError as error:
                self._say(f"warning: The validation sheet cannot be drawn: {error}")
            else:
                self._tell(lambda tracker: tracker.image("validation", pixels), "image")

    def begin(self, folder: Path, name: str, configuration: Mapping[str, Any]) -> None:
        """Start tracking, or continue the tracked run whose id the folder keeps.

        Only the first call has an effect.
        """
        if self._begun:
            return
        self._begun = True
        plain = json.loads(json.dumps(configuration, default=str))
        for follower in self._followers:
            key = _kept(folder).get(follower.tracker_name, {}).get("key")
            follower.begin_with(folder, TrackedRun(name, self._group, plain, key, str(folder)))
        for follower in self._followers:
            follower.wait(FIRST_PATIENCE)

    def log(self, metrics: Mapping[str, float], epoch: int | None = None) -> None:
        """Log an epoch's metrics, or the final metrics if `epoch` is `None`."""
        now = {str(name): float(value) for name, value in metrics.items()}
        if now:
            self._tell(lambda tracker: tracker.log(now, epoch))

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Log a table; the first row is its header."""
        self._tell(lambda tracker: tracker.table(title, rows))

    def _tell(self, call: Callable[[Any], Any], method: str = "log") -> None:
        """Queue a call for every tracker that has `method`."""
        for follower in self._followers if self._begun else ():
            if follower.takes(method):
                follower.call(call)

    def close(self, how: Literal["finished", "stopped", "failed"]) -> None:
        """End every tracked run, waiting up to `PATIENCE` seconds for each tracker."""
        self._tell(lambda tracker: tracker.end(how))
        for follower in self._followers if self._begun else ():
            follower.close(PATIENCE)


class _Follower(threading.Thread):
    """A thread that calls one tracker."""

    def __init__(self, name: str, tracker: Tracker, tell: Tell) -> None:
        # daemon, so that a tracker that hangs does not keep the process alive
        super().__init__(name=f"tracker {name}", daemon=True)
        self.tracker_name, self._tracker, self._say = name, tracker, tell
        self._calls: queue.SimpleQueue[Callable[[Tracker], Any] | None] = queue.SimpleQueue()
        self._sentences: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._folder: Path | None = None

    def begin_with(self, folder: Path, run: TrackedRun) -> None:
        self._folder = folder

        def first(tracker: Tracker) -> None:
            key, place = tracker.begin(run)
            _keep(folder, self.tracker_name, {"key": key})
            self._sentences.put(f"{self.tracker_name}: {place}")

        self._calls.put(first)
        self.start()

    def run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call(self._tracker)
            except (Exception, SystemExit) as error:
                what = f"The tracker {self.tracker_name}"
                sentence = (
                    failure(what, error)
                    if isinstance(error, Exception)
                    else f"{what} failed: it tried to end the process"
                )
                self._fail(f"{sentence}. The run continues without it.")
                return

    def _fail(self, sentence: str) -> None:
        self._sentences.put(f"warning: {sentence}")
        if self._folder is not None:
            with suppress(OSError):  # the failure is reported even if the disk is full
                _keep(self._folder, self.tracker_name, {"failed": sentence})

    def takes(self, method: str) -> bool:
        """Return whether the tracker has a method; some methods are optional."""
        return hasattr(self._tracker, method)

    def call(self, call: Callable[[Any], Any]) -> None:
        self._tell()
        self._calls.put(call)

    def wait(self, seconds: float) -> None:
        reached = threading.Event()
        self._calls.put(lambda tracker: reached.set())
        ends = 0.0
        while not reached.wait(0.02) and self.is_alive() and (ends := ends + 0.02) < seconds:
            pass
        self._tell()

    def close(self, seconds: float) -> None:
        self._calls.put(None)
        self.join(seconds)
        if self.is_alive():
            self._fail(
                f"The tracker {self.tracker_name} has not finished within {seconds:.0f} seconds;"
                " some of its data may be lost."
            )
        self._tell()

    def _tell(self) -> None:
        while not self._sentences.empty():
            self._say(self._sentences.get())


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
    wrong = plugins.disabled("trackers")
    if why := [reason for full, reason in wrong.items() if name in (full, full.partition(".")[0])]:
        raise PluginError(why[0])
    offer = (
        f"there {'is' if len(known) == 1 else 'are'} {', '.join(known)}"
        if known
        else "none is installed"
    )
    raise PluginError(
        f"There is no tracker '{name}' ({offer}).{did_you_mean(name, known)} For tensorboard,"
        " wandb or mlflow, install the extra of that name, as in"
        " pip install 'embedding-retrieval[wandb]'."
    )


@contextmanager
def tracking(
    names: Sequence[str],
    recipe: Recipe,
    tell: Tell,
    *,
    name: str | None = None,
    group: str | None = None,
) -> Iterator[Tracking]:
    """Context manager in which trackers follow the training of a recipe; they end with it.

    Raises:
        PluginError: a tracker does not exist.
    """
    trackers = Tracking(names, recipe.loaded, tell, name=name, group=group)
    manager = recipe.loaded.manager
    if names:
        manager.register(trackers, FILE)
    try:
        with ending(trackers):
            yield trackers
    finally:
        if names:
            manager.unregister(trackers)


@contextmanager
def ending(tracking: Tracking) -> Iterator[None]:
    """Context manager that closes trackers as finished, stopped or failed."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        tracking.close("stopped")
        raise
    except BaseException:
        tracking.close("failed")
        raise
    tracking.close("finished")


def failures(folders: Sequence[Path]) -> list[str]:
    """Return one line per distinct failure of a tracker, with the number of runs that have it."""
    counts: dict[str, int] = {}
    for folder in folders:
        for entry in _kept(folder).values():
            if sentence := entry.get("failed"):
                counts[str(sentence)] = counts.get(str(sentence), 0) + 1
    return [f"{sentence} ({count} of {len(folders)} runs)" for sentence, count in counts.items()]


_writing = threading.Lock()


def _kept(folder: Path) -> dict[str, dict[str, str]]:
    """Return the trackers' entries in a folder; empty if the file is missing or damaged."""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return {str(name): dict(entry) for name, entry in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _keep(folder: Path, name: str, entry: Mapping[str, str]) -> None:
    with _writing:
        kept = _kept(folder)
        before = {} if "key" in entry else kept.get(name, {})
        write_json(folder / FILE, {**kept, name: {**before, **entry}})
