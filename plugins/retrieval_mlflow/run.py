"""A tracker that logs to a run of MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal

from retrieval.plugin import TrackedRun

EXPERIMENT = "retrieval"
"""Name of the experiment if MLFLOW_EXPERIMENT_NAME is not set."""
MAX_KEY = 250
MAX_VALUE = 6000
MAX_PARAMETERS = 100
"""MLflow's limits: characters of a parameter's name and of its value, and parameters per call."""
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowRun:
    """A tracker that logs to MLflow.

    MLflow's environment variables apply: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME or
    MLFLOW_EXPERIMENT_ID.
    """

    def __init__(self) -> None:
        """Load the package and open its store; see `retrieval.plugin.Tracker`."""
        # MLflow's telemetry would use the network.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # Training waits: MLflow's own 7 tries take four minutes, or 120 seconds each if a server
        # accepts connections and never answers.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        from mlflow import MlflowClient

        self._client: Any = MlflowClient()
        self._key = ""

    def begin(self, run: TrackedRun) -> tuple[str, str]:
        """Begin a run, or continue one in the store; see `retrieval.plugin.Tracker`."""
        from mlflow.exceptions import MlflowException

        known: Mapping[str, str] = {}
        if run.key is not None:
            # The run is in another store, or was deleted.
            with suppress(MlflowException):
                known = self._client.get_run(run.key).data.params
                self._client.update_run(run.key, status="RUNNING")
                self._key = run.key
        if not self._key:
            if run.group:
                tags = {"comparison": run.group}
            else:
                tags = {}
            created = self._client.create_run(self._experiment(), run_name=run.name, tags=tags)
            self._key = created.info.run_id
        self._parameters(run.configuration, known)
        return self._key, f"{self._client.tracking_uri}, run {self._key}"

    def _experiment(self) -> str:
        """Return the id of the experiment, which is created if necessary."""
        from mlflow.exceptions import MlflowException

        if identifier := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return identifier
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
        if (experiment := self._client.get_experiment_by_name(name)) is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:
                # Another process has just created it.
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _parameters(self, configuration: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Log the parameters that are new: a resumed run must not change parameters in MLflow."""
        from mlflow.entities import Param

        flat = {
            _allowed(key)[:MAX_KEY]: str(value)[:MAX_VALUE] for key, value in _flat(configuration)
        }
        new = [Param(key, value) for key, value in flat.items() if key not in known]
        for start in range(0, len(new), MAX_PARAMETERS):
            self._client.log_batch(self._key, params=new[start : start + MAX_PARAMETERS])
        self._client.log_dict(self._key, dict(configuration), "configuration.json")

    def log(self, metrics: Mapping[str, float], epoch: int | None) -> None:
        """Log the metrics of an epoch at its number, counted from 1; log final metrics at 0."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        step = epoch or 0
        entries = [Metric(_allowed(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._key, metrics=entries)

    def end(self, how: Literal["finished", "stopped", "failed"]) -> None:
        """End the run."""
        self._client.set_terminated(self._key, status=STATUS[how])


def _flat(tables: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of nested tables with their values."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _allowed(name: str) -> str:
    """Return a name without the characters that MLflow does not allow."""
    return re.sub(r"[^\w\-. /]", "", name)
