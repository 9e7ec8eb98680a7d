"""Where training is."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Position:
    """Where training is; part of the checkpoint."""

    phase: int = 0
    phase_epoch: int = 0
    epoch: int = 0
    step: int = 0
    """Steps done in this epoch."""
    total: int = 0
    """Steps done in all."""
    best: float | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    stale: int = 0
    """Validations since the best."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of this epoch's figures so far."""
    counts: dict[str, int] = field(default_factory=dict)
    """Steps that had each of them: a batch without triplets has no generator's objective."""
