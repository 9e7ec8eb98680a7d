"""Algorithm 1 of "Adversarial Metric Learning" (projected gradient, ρ = .001, from M = I) beside
the search that `aml.aml` uses.

    python benchmarks/aml_algorithm1.py

α = β = 1, features standardised, all pairs (for sums, the pairs' number in place of their mean).
The gradient is the right one (docs/aml.md says what Eq 14 lacks), and Eq 16's projection keeps
eigenvalues at 0 or above. A singular M has no D(M); here 10⁻¹² stands for 0, so that it can go on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.preprocessing import StandardScaler

from bench import arguments, markdown
from retrieval_aml.aml import Objective, minimise
from retrieval_aml.gmml import moments_of_classes
from uci import load

SETS = ("breast", "vehicle", "german", "segment", "letter")
STEP = 0.001
STEPS = 3000
RESULT = Path(__file__).parent / "results" / "aml_algorithm1.md"
KEPT = RESULT.parent / "raw" / "aml_algorithm1.json"


def descend(objective: Objective, features: int) -> dict[str, Any]:
    """Follow Algorithm 1; stop where the objective is a thousand times what it was at M = I, or is
    not a number.
    """
    m = np.eye(features)
    start, slope = objective(m)
    value = start
    for step in range(1, STEPS + 1):
        values, vectors = np.linalg.eigh(m - STEP * slope)
        m = (vectors * np.maximum(values, 1e-12)) @ vectors.T
        value, slope = objective(m)
        if not np.isfinite(value) or value > 1e3 * start:
            return {"diverged": step}
    return {"reached": value / start}


def measure() -> list[dict[str, Any]]:
    """Run each set, with means and with sums over pairs."""
    rows = []
    for name in SETS:
        x, y = load(name)
        x = StandardScaler().fit_transform(x)
        x = x[:, x.std(0) > 0]
        found = moments_of_classes(x, y.astype(np.intp))
        for what in ("means", "sums"):
            weights = (1.0, 1.0) if what == "means" else (found.n_similar, found.n_dissimilar)
            objective = Objective(
                found.similar * weights[0], found.dissimilar * weights[1], 1.0, 1.0
            )
            least = minimise(objective, tol=1e-6, max_iter=500)
            start = objective(np.eye(x.shape[1]))[0]
            rows.append(
                {
                    "set": name,
                    "moments": what,
                    "least": least.value / start,
                    "iterations": least.iterations,
                    **descend(objective, x.shape[1]),
                }
            )
            print(rows[-1], flush=True)
    return rows


def render(rows: list[dict[str, Any]]) -> str:
    """Return the page."""
    lines = []
    for row in rows:
        ends = (
            f"diverges in step {row['diverged']}"
            if "diverged" in row
            else f"{row['reached']:.4f}, {row['reached'] / row['least'] - 1:.3%} above"
        )
        lines.append(
            [row["set"], row["moments"], ends, f"{row['least']:.4f}", str(row["iterations"])]
        )
    head = ["", "pairs as", f"after {STEPS:,} steps", "least found", "iterations of ours"]
    sums = [row for row in rows if row["moments"] == "sums"]
    means = [row for row in rows if row["moments"] == "means" and "reached" in row]
    gaps = [row["reached"] / row["least"] - 1 for row in means]
    return "\n".join(
        [
            "# Algorithm 1 of Adversarial Metric Learning",
            "",
            (
                "`python benchmarks/aml_algorithm1.py`: projected gradient with the paper's step"
                f" of {STEP}, from M = I, α = β = 1; D(M) as a share of D(I)."
            ),
            "",
            markdown(head, lines),
            "",
            (
                f"On sums over pairs it diverges on {sum('diverged' in row for row in sums)} of"
                f" {len(sums)} sets, in"
                f" {min((r['diverged'] for r in sums if 'diverged' in r), default=0)} to"
                f" {max((r['diverged'] for r in sums if 'diverged' in r), default=0)} steps. On"
                f" means it is still {min(gaps):.4%} to {max(gaps):.2%} above the least value after"
                f" {STEPS:,} steps."
            ),
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
