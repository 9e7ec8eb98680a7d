"""Validation figures of a run in training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.data.encode import encode
from retrieval.data.loading import RawInputs
from retrieval.evaluation.evaluate_run import resolve_metrics
from retrieval.evaluation.evaluation import evaluate
from retrieval.evaluation.protocol import Protocol
from retrieval.model.contracts import Dataset
from retrieval.run.checkpoint import python_random_kept

if TYPE_CHECKING:
    from retrieval.run.open import Run


@python_random_kept()
def validate(
    run: Run, dataset: Dataset, from_features: bool, raw: RawInputs | None = None
) -> dict[str, float]:
    """Return the recipe's figures on the validation part, each item a query among the others; MAP@R
    always.

    Args:
        run: the run; its model keeps its mode.
        dataset: where the items are (a frozen backbone's features, or the run's own dataset).
        from_features: whether those are features.
        raw: the dataset's inputs, where they are kept between calls.
    """
    indices = run.splits.validation
    codes = encode(
        run.model,
        dataset,
        indices,
        batch=run.recipe.evaluate.batch,
        device=run.device,
        from_features=from_features,
        raw=raw,
    )
    metrics = resolve_metrics(run.recipe.evaluate.metrics, run.plugins, always=("map_at_r",))
    distance = None if run.model.combiner is None else run.model.combiner.compute_mat
    said = Protocol(run, indices, None).arguments(indices, None)
    return dict(
        evaluate(
            codes, run.splits.labels[indices], metrics=metrics, distance=distance, **said
        ).values
    )
