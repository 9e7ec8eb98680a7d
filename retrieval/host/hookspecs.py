"""The plugin hooks.

A plugin is a module or package with functions that have one of these names and the decorator
`retrieval.plugin.hookimpl`. A hook for factories takes no arguments and returns `{name: factory}`.
Recipes refer to each factory as `PLUGIN.NAME`. A factory is a class or function: a recipe may set
the parameters in its signature, and its docstring describes them. A faulty factory disables only
itself; `retrieval plugins list` shows the reason.

A new kind of part needs, besides its hook here, an entry in `KINDS` of `retrieval.host.factory`,
and, if it gets a recipe table of its own, one in `COMPONENTS` there and a field of
`retrieval.recipe.tables.Tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    import click
hookspec = pluggy.HookspecMarker("retrieval")
hookimpl = pluggy.HookimplMarker("retrieval")

Factories = Mapping[str, Callable[..., Any] | str]
"""What a factory hook returns: by name, a class or function, or its location `MODULE:NAME` as text.

The module of a location is imported when the factory is first needed.
"""


class Commands(Protocol):
    """The command line, to which a plugin adds commands."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command of click."""

    def add_location(self, name: str, location: str) -> None:
        """Add a command by its location `MODULE:NAME`, which is imported when it is called."""


@hookspec
def retrieval_backbones() -> Factories:  # type: ignore[empty-body]
    """Called for a recipe's `[backbone]`. A factory returns a `retrieval.plugin.Backbone`."""


@hookspec
def retrieval_datasets() -> Factories:  # type: ignore[empty-body]
    """Called for a recipe's `[data]`. A factory returns a `retrieval.plugin.Dataset`."""


@hookspec
def retrieval_losses() -> Factories:  # type: ignore[empty-body]
    """Called for a recipe's `[loss]`. A factory returns a `retrieval.plugin.Loss`."""


@hookspec
def retrieval_miners() -> Factories:  # type: ignore[empty-body]
    """Called for a recipe's `[miner]`. A factory returns a `retrieval.plugin.Miner`."""


@hookspec
def retrieval_generators() -> Factories:  # type: ignore[empty-body]
    """Called for a recipe's `[generator]`. A factory returns a `retrieval.plugin.Generator`, whose
    `bind` the host calls with the model's head before training.
    """


@hookspec
def retrieval_combiners() -> Factories:  # type: ignore[empty-body]
    """Called for a recipe's `[combiner]`. A factory returns a `retrieval.plugin.Combiner`."""


@hookspec
def retrieval_learners() -> Factories:  # type: ignore[empty-body]
    """Called for a recipe's `[learner]`. A factory returns a `retrieval.plugin.Learner`."""


@hookspec
def retrieval_samplers() -> Factories:  # type: ignore[empty-body]
    """Called for a recipe's `[sampler]`. A factory returns a `retrieval.plugin.BatchSampler` or one
    of torch.
    """


@hookspec
def retrieval_augmentations() -> Factories:  # type: ignore[empty-body]
    """Called for `[augmentation] transforms`. A factory returns a `retrieval.plugin.Transform`."""


@hookspec
def retrieval_text_encoders() -> Factories:  # type: ignore[empty-body]
    """Called for a recipe's `[text]`. A factory returns a `retrieval.plugin.TextEncoder`."""


@hookspec
def retrieval_metrics() -> Factories:  # type: ignore[empty-body]
    """Called for `[evaluate] metrics`. A factory returns a `retrieval.plugin.Metric`."""


@hookspec
def retrieval_indexes() -> Factories:  # type: ignore[empty-body]
    """Called when an index back end that is not built in is looked up by name.

    A factory returns a `retrieval.plugin.IndexBackend`.
    """


@hookspec
def retrieval_stores() -> Factories:  # type: ignore[empty-body]
    """Called for an index at an address, such as `milvus://host:19530/photos`.

    A factory's name is the scheme of its addresses; it returns a
    `retrieval.plugin.stores.StorePlace`.
    """


@hookspec
def retrieval_distances() -> Factories:  # type: ignore[empty-body]
    """Called for a loss's or miner's `distance`. A factory returns a `BaseDistance`."""


@hookspec
def retrieval_reducers() -> Factories:  # type: ignore[empty-body]
    """Called for a loss's `reducer`. A factory returns a `BaseReducer`."""


@hookspec
def retrieval_regularizers() -> Factories:  # type: ignore[empty-body]
    """Called for a loss's regulariser. A factory returns a `BaseRegularizer`."""


@hookspec
def retrieval_run_start(run: Any) -> None:
    """Called when training starts or resumes, before the first batch."""


@hookspec
def retrieval_steps_end(
    run: Any,
    step: int,
    metrics: Mapping[str, float],
) -> None:
    """Called every 50 steps and at the end of an epoch, with the number of all steps so far.

    `metrics` has the mean of each loss since the last call, and the learning rate of each part that
    trains, as `lr_PART`.
    """


@hookspec
def retrieval_epoch_end(
    run: Any,
    epoch: int,
    metrics: Mapping[str, float],
) -> None:
    """Called after each epoch's validation, with the epoch's number, from 1, and metrics."""


@hookspec
def retrieval_run_end(run: Any, metrics: Mapping[str, float]) -> None:
    """Called when training is complete, with the best validation metrics.

    An interrupted run does not call it.
    """


@hookspec
def retrieval_trackers() -> Factories:  # type: ignore[empty-body]
    """Called when `--track` names a tracker. A factory returns a `retrieval.plugin.Tracker`."""


@hookspec
def retrieval_clusters() -> Factories:  # type: ignore[empty-body]
    """Called when `--ray` names a cluster. A factory returns a `retrieval.plugin.Cluster`.

    The core looks for the factory `ray.cluster`.
    """


@hookspec
def retrieval_encoders() -> Factories:  # type: ignore[empty-body]
    """Called when `--model` names a model that is not trained here, such as `vectors:FILE`.

    A factory's name is what stands before the colon of its addresses. It takes the `address`, and
    returns a function of a `retrieval.plugin.Dataset` and indices (N,), which returns the items'
    vectors (N, D), to be compared by Euclidean distance.
    """


@hookspec(firstresult=True)
def retrieval_bundle_at(address: str) -> Path | None:
    """Called when an address such as `hf://OWNER/NAME` stands for a bundle.

    Returns the folder of the bundle, or `None` for an address of another kind.
    """


@hookspec
def retrieval_report_panels(run: Any) -> Mapping[str, bytes]:  # type: ignore[empty-body]
    """Called for each run when `retrieval report` writes a report.

    Returns drawings by title, each an SVG or PNG of at most 4 MB; the mapping may be empty.
    """


@hookspec
def retrieval_commands(app: Commands) -> None:
    """Called when a command is looked up that is not built in; a plugin may add its own to `app`.

    `app.add_command(command)` adds a command of click. `app.add_location(NAME, "MODULE:COMMAND")`
    adds one whose module is imported when the command is called.
    """
