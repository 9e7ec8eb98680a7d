"""Weights & Biases as a tracker: `retrieval train … --track wandb`.

It is there where the package `wandb` is.
"""

from __future__ import annotations

from importlib.util import find_spec

from retrieval import hookimpl
from retrieval.plugin import Factories

if find_spec("wandb") is not None:

    @hookimpl
    def retrieval_trackers() -> Factories:
        """Weights & Biases."""
        from retrieval_wandb.run import WandbRun

        return {"run": WandbRun}
