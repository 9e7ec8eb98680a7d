"""LANML's search, L-BFGS on L with M = LLᵀ, beside projected gradients on M as the ANML paper has them.

    python benchmarks/anml_projected.py

LANML⁻ with its defaults (convex in M, so both have one minimum to find), features standardised, the same start M₀ = I/√N. Projected gradients: M − ρ∇f(M), negative
eigenvalues to 0, ρ from Barzilai and Borwein's rule with halving until f falls, which is kinder than a fixed step. They stop at the value that L-BFGS ended with, or
after twenty times its CPU seconds.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.preprocessing import StandardScaler

from bench import arguments, markdown
from retrieval_anml import LANML
from uci import load

SETS = ("iris", "wine", "ecoli", "vehicle", "german", "segment")
RESULT = Path(__file__).parent / "results" / "anml_projected.md"
KEPT = RESULT.parent / "raw" / "anml_projected.json"
TIMES = 20


def of_metric(learner: LANML, m: Any, x: Any, y: Any) -> tuple[float, Any, Any]:
    """Return f, ∇f in M and M's root. With L = M^½ of full rank the gradient in L is 2 ∇f L."""
    values, vectors = np.linalg.eigh(m)
    values = np.maximum(values, 1e-10 * values.max())
    root = (vectors * np.sqrt(values)) @ vectors.T
    value, slope = learner.objective(root, x, y)
    gradient = slope @ ((vectors / np.sqrt(values)) @ vectors.T) / 2
    return value, (gradient + gradient.T) / 2, root


def projected(learner: LANML, x: Any, y: Any, target: float, limit: float) -> dict[str, Any]:
    """Descend until `target` or for `limit` CPU seconds."""
    started = time.process_time()
    m = np.eye(x.shape[1]) / np.sqrt(len(x))
    value, slope, _ = of_metric(learner, m, x, y)
    rate, steps = 0.1 * np.linalg.norm(m) / np.linalg.norm(slope), 0
    while value > target * (1 + 1e-4) and time.process_time() - started < limit:
        while True:
            values, vectors = np.linalg.eigh(m - rate * slope)
            new = (vectors * np.maximum(values, 0)) @ vectors.T
            found, turned, _ = of_metric(learner, new, x, y)
            if found < value or rate < 1e-12:
                break
            rate /= 2
        moved, change = new - m, turned - slope
        steps += 1
        if rate < 1e-12:
            break
        rate = float(np.vdot(moved, moved) / max(np.vdot(moved, change), 1e-12))
        m, value, slope = new, found, turned
    return {"projected": value, "projected_seconds": time.process_time() - started, "steps": steps}


def measure() -> list[dict[str, Any]]:
    """Run each set."""
    rows = []
    for name in SETS:
        x, y = load(name)
        x = StandardScaler().fit_transform(x)
        x = x[:, x.std(0) > 0]
        learner = LANML(standardize=False, max_queries=None)
        started = time.process_time()
        learner.fit(x, y)
        seconds = time.process_time() - started
        row = {
            "set": name,
            "lbfgs": learner.objective_,
            "lbfgs_seconds": seconds,
            "iterations": learner.n_iter_,
        }
        row |= projected(learner, x, y, learner.objective_, TIMES * seconds)
        rows.append(row)
        print(row, flush=True)
    return rows


def render(rows: list[dict[str, Any]]) -> str:
    """Return the page."""
    lines = [
        [
            row["set"],
            f"{row['lbfgs']:.4f}",
            f"{row['lbfgs_seconds']:.2f} ({row['iterations']})",
            f"{row['projected']:.4f}",
            f"{row['projected_seconds']:.2f} ({row['steps']})",
            f"{row['projected_seconds'] / row['lbfgs_seconds']:.1f}",
        ]
        for row in rows
    ]
    reached = [row for row in rows if row["projected"] <= row["lbfgs"] * (1 + 1e-4)]
    ratios = [row["projected_seconds"] / row["lbfgs_seconds"] for row in reached]
    said = (
        f"{min(ratios):.1f} to {max(ratios):.1f} times its CPU seconds"
        if ratios
        else "no time that was given"
    )
    return "\n".join(
        [
            "# LANML by L-BFGS and by projected gradients",
            "",
            f"`python benchmarks/anml_projected.py` says what is compared. CPU seconds, one thread (steps); projected gradients stop at L-BFGS's value or after {TIMES} times its seconds.",
            "",
            markdown(["", "L-BFGS: objective", "CPU s", "projected: objective", "CPU s ", "times"], lines),
            "",
            f"Projected gradients reach L-BFGS's value on {len(reached)} of {len(rows)} sets, in {said}.",
            "",
        ]
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.parse_args()
    rows = measure()
    KEPT.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    RESULT.write_text(render(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
