"""Weights & Biases as a tracker: `retrieval train … --track wandb`, if `wandb` is installed."""

from __future__ import annotations

from importlib.util import find_spec

from retrieval.plugin import Factories, hookimpl

if find_spec("wandb") is not None:

    @hookimpl
    def retrieval_trackers() -> Factories:
        """Logging to Weights & Biases."""
        from retrieval_wandb.run import WandbRun

        return {"run": WandbRun}
