"""A tracker that logs to a run of Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from retrieval.plugin import TrackedRun

INIT_SECONDS = 20.0
"""Time to wait for the server if WANDB_INIT_TIMEOUT is not set.

The default of the package is 90, and the package waits again at the end of the process.
"""


class WandbRun:
    """A tracker that logs to Weights & Biases.

    The package's environment variables apply: WANDB_PROJECT, WANDB_ENTITY, WANDB_DIR,
    WANDB_BASE_URL. With WANDB_MODE=offline, the network is not used.
    """

    def __init__(self) -> None:
        """Load the package; see `retrieval.plugin.Tracker`."""
        self._offline = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
        if self._offline:
            # The package would send error reports over the network.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def begin(self, run: TrackedRun) -> tuple[str, str]:
        """Begin or continue a run; see `retrieval.plugin.Tracker`.

        Offline, each part of a resumed run has its own folder; all parts have one id.
        """
        if "WANDB_INIT_TIMEOUT" in os.environ:
            timeout = {}
        else:
            timeout = {"init_timeout": INIT_SECONDS}
        self._run = self._wandb.init(
            name=run.name,
            group=run.group,
            config=dict(run.configuration),
            id=run.key,
            resume="allow",
            reinit="create_new",
            settings=self._wandb.Settings(console="off", silent=True, **timeout),
        )
        # An offline run has no URL, and reading the URL would cause a warning.
        return str(self._run.id), str(self._run.dir if self._offline else self._run.url)

    def log(self, metrics: Mapping[str, float], epoch: int | None) -> None:
        """Log the metrics of an epoch, or write final metrics to the summary."""
        if epoch is None:
            self._run.summary.update(dict(metrics))
        else:
            self._run.log({"epoch": epoch, **metrics}, step=epoch)

    def end(self, how: Literal["finished", "stopped", "failed"]) -> None:
        """Send the remaining data and end the run."""
        self._run.finish(exit_code=0 if how == "finished" else 1)
