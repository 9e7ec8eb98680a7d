"""MLflow as a tracker: `retrieval train … --track mlflow`.

It is there where the package `mlflow` is.
"""

from __future__ import annotations

from importlib.util import find_spec

from retrieval import hookimpl
from retrieval.plugin import Factories

if find_spec("mlflow") is not None:

    @hookimpl
    def retrieval_trackers() -> Factories:
        """MLflow."""
        from retrieval_mlflow.run import MlflowRun

        return {"run": MlflowRun}
