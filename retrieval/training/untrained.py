"""A recipe whose model has nothing to train, as a frozen backbone without a head: its run holds the
model as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from retrieval.run import checkpoint
from retrieval.run.folder import write_json
from retrieval.run.open import Run, begin_folder
from retrieval.training.parts import parts_of

NOTHING = "The model has nothing to train: its features are taken as they are."


def nothing_to_train(run: Run) -> bool:
    """Return whether neither backbone, nor head, nor combiner has a parameter that may change."""
    assert run.objective is not None
    parts = parts_of(run.model, run.objective, run.recipe.backbone.frozen)
    return not any(parts[name] for name in ("backbone", "head", "combiner"))


def write_untrained(run: Run, report: Callable[[str], None], *, replace: bool, resume: bool) -> Run:
    """Write a run that is complete without a step, to be evaluated and exported.

    Raises:
        DataError: see `begin_folder`.
    """
    run.splits.notes.append(NOTHING)
    if not resume:
        begin_folder(run, report, replace=replace)
    run.plugins.notify("retrieval_run_start", run=run)
    checkpoint.save(run.best, {"model": run.model.state_dict(), "metrics": {}})
    write_json(run.path / "summary.json", {"validation": {}, "epochs": 0, "steps": 0})
    run.model.eval()
    run.plugins.notify("retrieval_run_end", run=run, metrics={})
    report(NOTHING)
    return run
