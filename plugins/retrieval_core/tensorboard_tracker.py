"""A tracker that writes files for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from retrieval.plugin import TrackedRun

METRICS = ("loss", "validation_map_at_r", "validation_recall_at_1")
"""Metrics that the tab HPARAMS shows beside the recipe's keys."""


class Board:
    """Writes to the folder `tensorboard` in the run's folder, without network access.

    `tensorboard --logdir runs` shows all runs: losses and learning rates by step, metrics by epoch,
    the recipe under HPARAMS, and a sheet of validation queries under IMAGES.
    """

    def __init__(self) -> None:
        """Import TensorBoard; see `retrieval.plugin.Tracker`."""
        # Listing the trackers imports this module, and should not import TensorBoard.
        from torch.utils import tensorboard

        self._module: Any = tensorboard
        self._writer: Any = None

    def begin(self, run: TrackedRun) -> tuple[str, str]:
        """Start a run, or continue in its folder; see `retrieval.plugin.Tracker`."""
        folder = str(Path(run.folder) / "tensorboard")
        self._writer = self._module.SummaryWriter(folder)
        for summary in self._module.summary.hparams(
            dict(_flat(run.configuration)), dict.fromkeys(METRICS, 0.0)
        ):
            self._writer.file_writer.add_summary(summary)
        return folder, folder

    def log_steps(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the means of the last few steps under the number of the last step."""
        for name, value in metrics.items():
            self._writer.add_scalar(f"steps/{name}", value, step)

    def log(self, metrics: Mapping[str, float], epoch: int | None) -> None:
        """Log an epoch's metrics at step `epoch`; final metrics (epoch None) at step 0."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, epoch or 0)
        self._writer.flush()

    def image(self, title: str, pixels: np.ndarray[Any, Any]) -> None:
        """Log an image (H, W, 3)."""
        self._writer.add_image(title, pixels, dataformats="HWC")

    def end(self, how: Literal["finished", "stopped", "failed"]) -> None:
        """Write the remaining data and close the files."""
        self._writer.close()


def _flat(tables: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys of nested tables with their values, as JSON if TensorBoard needs it."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield (
                f"{before}{key}",
                value if isinstance(value, str | float | int) else json.dumps(value),
            )
