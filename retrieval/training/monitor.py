"""The monitored metric: it decides which epoch is the best, and whether training was worth it."""

from __future__ import annotations

import math
from typing import Any

from retrieval.evaluation.evaluation import resolve_metrics
from retrieval.recipe.read import Recipe
from retrieval.run.resume import Position

_FEW_CLASSES = 5
"""With fewer validation classes, the verdict warns.

An epoch that beats the start on so few classes may be worse on other classes
(benchmarks/recipes.py, digits).
"""


class Monitor:
    """The metric of `[train] monitor`.

    Attributes:
        name: the metric's key in the validation metrics.
        larger: whether larger values are better.
    """

    def __init__(self, recipe: Recipe) -> None:
        ((self.name, metric),) = resolve_metrics([recipe.train.monitor], recipe.loaded).items()
        self.larger: bool = getattr(metric, "larger_is_better", True)

    def better(self, value: float, other: float | None) -> bool:
        """Return whether a value is better than another; any number is better than `None`."""
        if other is None:
            # NaN as the best could never be beaten
            return not math.isnan(value)
        if self.larger:
            return value > other
        return value < other

    def verdict(self, progress: Position, suggests_frozen: bool, classes: int) -> list[str]:
        """Return sentences that say which epoch was kept, and whether training was worth it.

        Args:
            progress: progress of a run that was validated.
            suggests_frozen: whether to suggest measuring the frozen backbone with a trained head,
                if the run has not measured it.
            classes: number of validation classes.
        """
        best = progress.best
        start = progress.start
        assert best is not None
        kept_epoch = "the start (epoch 0)"
        if progress.best_epoch:
            kept_epoch = f"epoch {progress.best_epoch}"
        lines = [f"Kept: {kept_epoch}, validation {self.name} {best:.4f}."]
        if start is not None and progress.best_epoch:
            lines.append(f"Training beat the start ({start:.4f}).")
        elif start is not None:
            lines.append("No epoch beat the start: the run keeps its initial weights.")
        frozen = progress.with_frozen
        trained = progress.with_trained
        if frozen is not None and trained is not None:
            if self.better(trained, frozen):
                verb = "beat"
            else:
                verb = "did not beat"
            lines.append(
                f"Training the backbone ({trained:.4f}) {verb} the frozen backbone with a trained"
                f" head ({frozen:.4f})."
            )
        elif suggests_frozen:
            lines.append(
                "The frozen backbone with a trained head was not measured. To measure it, begin"
                ' with a [[phase]] that sets train = ["head", "loss"]. If that phase gives the best'
                " weights, the run keeps them."
            )
        if classes < _FEW_CLASSES:
            lines.append(
                f"The validation part has only {classes} classes, so another epoch may be better"
                " for other classes. With so few, compare runs on several splits."
            )
        return lines

    def note(self, progress: Position, validation: dict[str, Any], trains_backbone: bool) -> bool:
        """Record an epoch's validation metrics in `progress`; return whether it is the best so far.

        An epoch whose monitored metric was not measured is never the best, and does not count for
        `[train] patience`. `trains_backbone` says whether this phase or an earlier phase trains the
        backbone.
        """
        # a run that never measures its metric still reports the others of its last epoch
        if progress.best is None:
            progress.best_metrics = dict(validation)
        if self.name not in validation:
            return False
        value = float(validation[self.name])
        if trains_backbone:
            field = "with_trained"
        else:
            field = "with_frozen"
        # no step has been taken: these are the initial weights, which count as neither
        if progress.start is None and progress.total == 0:
            progress.start = value
        elif self.better(value, getattr(progress, field)):
            setattr(progress, field, value)
        if not self.better(value, progress.best):
            progress.stale += 1
            return False
        progress.best = value
        progress.stale = 0
        progress.best_metrics = dict(validation)
        return True
