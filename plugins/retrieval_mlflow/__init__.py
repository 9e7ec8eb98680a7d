"""MLflow as a tracker: `retrieval train … --track mlflow`, if the package `mlflow` is installed."""

from __future__ import annotations

from importlib.util import find_spec

from retrieval.plugin import Factories, hookimpl

if find_spec("mlflow") is not None:

    @hookimpl
    def retrieval_trackers() -> Factories:
        """Logging to MLflow."""
        from retrieval_mlflow.run import MlflowRun

        return {"run": MlflowRun}
