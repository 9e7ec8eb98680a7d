"""Every extension point, and nothing else.

A plugin is a module (or a package) whose functions carry `retrieval.hookimpl` and one of these
names. A hook that returns factories takes nothing and gives `{name: factory}`; the host calls the
thing `PLUGIN.name`. A factory is a class or function: its signature is what a recipe may set, and
its docstring says what each parameter means. A factory with a fault disables itself, and nothing
else: `retrieval plugins list` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import click
hookspec = pluggy.HookspecMarker("retrieval")
hookimpl = pluggy.HookimplMarker("retrieval")

Factories = Mapping[str, Callable[..., Any] | str]
"""What a factory hook returns: each a class, a function, or the text `MODULE:NAME` of one, whose
module is imported when something names the factory.
"""


@hookspec
def retrieval_backbones() -> Factories:  # type: ignore[empty-body]
    """Called when a recipe's `[backbone]` is looked up.

    Each factory gives a `retrieval.plugin.Backbone`.
    """


@hookspec
def retrieval_datasets() -> Factories:  # type: ignore[empty-body]
    """Called when a recipe's `[data]` is looked up.

    Each factory gives a `retrieval.plugin.Dataset`.
    """


@hookspec
def retrieval_losses() -> Factories:  # type: ignore[empty-body]
    """Called when a recipe's `[loss]` is looked up.

    Each factory gives a module with the call of `retrieval.plugin.Loss`.
    """


@hookspec
def retrieval_miners() -> Factories:  # type: ignore[empty-body]
    """Called when a recipe's `[miner]` is looked up.

    Each factory gives a module with the call of `retrieval.plugin.Miner`.
    """


@hookspec
def retrieval_generators() -> Factories:  # type: ignore[empty-body]
    """Called when a recipe's `[generator]` is looked up.

    Each factory gives a `retrieval.plugin.Generator`, whose `bind` is called with the model's head
    before training.
    """


@hookspec
def retrieval_combiners() -> Factories:  # type: ignore[empty-body]
    """Called when a recipe's `[combiner]` is looked up.

    Each factory gives a `retrieval.plugin.Combiner`.
    """


@hookspec
def retrieval_learners() -> Factories:  # type: ignore[empty-body]
    """Called when a recipe's `[learner]` is looked up.

    Each factory gives a `retrieval.plugin.Learner`.
    """


@hookspec
def retrieval_augmentations() -> Factories:  # type: ignore[empty-body]
    """Called when a recipe's `[augmentation] transforms` are looked up.

    Each factory gives a `retrieval.plugin.Transform`.
    """


@hookspec
def retrieval_metrics() -> Factories:  # type: ignore[empty-body]
    """Called when a recipe's `[evaluate] metrics` are looked up.

    Each factory gives a `retrieval.plugin.Metric`.
    """


@hookspec
def retrieval_indexes() -> Factories:  # type: ignore[empty-body]
    """Called when an index back end is named; for a built-in one no plugin but the package's own is
    asked. Each factory gives a `retrieval.plugin.IndexBackend`.
    """


@hookspec
def retrieval_stores() -> Factories:  # type: ignore[empty-body]
    """Called when an index is named by an address, such as `milvus://host:19530/photos`; for a
    folder no plugin but the package's own is asked. Each factory's name is a scheme, and it gives a
    `retrieval.stores.StorePlace`.
    """


@hookspec
def retrieval_distances() -> Factories:  # type: ignore[empty-body]
    """Called when a loss's or miner's `distance` is looked up.

    Each factory gives a pytorch-metric-learning `BaseDistance`.
    """


@hookspec
def retrieval_reducers() -> Factories:  # type: ignore[empty-body]
    """Called when a loss's `reducer` is looked up.

    Each factory gives a pytorch-metric-learning `BaseReducer`.
    """


@hookspec
def retrieval_regularizers() -> Factories:  # type: ignore[empty-body]
    """Called when a loss's regulariser is looked up.

    Each factory gives a pytorch-metric-learning `BaseRegularizer`.
    """


@hookspec
def retrieval_run_start(run: Any) -> None:
    """Called when training starts or resumes, before the first batch."""


@hookspec
def retrieval_epoch_end(run: Any, epoch: int, metrics: Mapping[str, float]) -> None:
    """Called after each epoch and its validation, with its number from 0 and its metrics."""


@hookspec
def retrieval_run_end(run: Any, metrics: Mapping[str, float]) -> None:
    """Called once training is complete, with the best validation metrics.

    Not called when it is interrupted.
    """


@hookspec
def retrieval_trackers() -> Factories:  # type: ignore[empty-body]
    """Called when `--track` names one: off unless asked.

    Each factory gives a `retrieval.plugin.Tracker`, which is told of one run.
    """


@hookspec
def retrieval_report_panels(run: Any) -> Mapping[str, bytes]:  # type: ignore[empty-body]
    """Called when `retrieval report` is written, for each run.

    Gives drawings by title, SVG or PNG of at most 4 MB; none where there is nothing to draw.
    """


@hookspec
def retrieval_commands(app: click.Group) -> None:
    """Called when the command line starts: a plugin may add commands of its own to `app`."""
