"""LANML against metric-learn's LMNN: CPU seconds of one fit, on the same split, one thread; and LANML's memory on large data.

    python benchmarks/anml_speed.py                  # everything, then results/anml_speed.md
    python benchmarks/anml_speed.py --only vehicle

Features standardised on the training part (70 %) of a random split. LMNN as it comes, with 4 and 7 target neighbours (it stops
after 1,000 steps at the latest). LANML⁻ and LANML⁺ with the paper's settings for its Figure 8 (γ₁ = −1 and 1, all of the class
as S_i, here γ₂ = 1) and with the library's defaults, all items queries. Each fit runs in a process of its own, which reports its
CPU time and its peak memory; what is kept in `results/anml_speed.jsonl` is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

LIMIT = 900
"""CPU seconds after which a fit is given up."""

SETS = ("vehicle", "german", "segment", "penbased")
LEARNERS = {
    "LANML⁻, as the paper": "LANML(-1.0, 1.0, 1.0, neighbors='all', max_queries=None)",
    "LANML⁺, as the paper": "LANML(1.0, 1.0, 1.0, max_queries=None)",
    "LANML⁻, default": "LANML(max_queries=None)",
    "LANML⁺, γ = 1, 2": "LANML(1.0, 2.0, 0.03, max_queries=None)",
    "PNCA, α = .3": "PNCA(0.3, max_queries=None)",
    "LMNN, K = 4": "LMNN(4)",
    "LMNN, K = 7": "LMNN(7)",
}
LARGE = {
    ("letter", "LANML⁻, all 14,000 queries"): "LANML(max_queries=None)",
    ("letter", "LANML⁻, 5,000 queries (default)"): "LANML()",
    ("60,000 × 50", "LANML⁻, 5,000 queries (default)"): "LANML()",
    ("60,000 × 50", "LANML⁻, all queries, 2 iterations"): "LANML(max_queries=None, max_iter=2)",
}


def data(name: str) -> tuple[Any, Any]:
    if name == "60,000 × 50":  # ten classes of five clumps each
        random = np.random.default_rng(0)
        clump = random.integers(0, 50, 60000)
        return random.normal(size=(60000, 50)) + 1.5 * random.normal(size=(50, 50))[clump], clump % 10
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    from uci import load

    x, y = load(name)
    x, _, y, _ = train_test_split(x, y, test_size=0.3, random_state=0)
    return StandardScaler().fit_transform(x), y


def one(name: str, expression: str) -> dict[str, Any]:
    from retrieval_anml import LANML, PNCA
    from retrieval_metric_learn.learners import LMNN

    x, y = data(name)
    learner = eval(expression, {"LANML": LANML, "PNCA": PNCA, "LMNN": LMNN})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    learner.fit(x, y)
    return {
        "set": name,
        "learner": expression,
        "items": len(x),
        "features": x.shape[1],
        "seconds": time.process_time() - started,
        "iterations": getattr(learner, "n_iter_", None),
        "megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "items_squared_megabytes": len(x) ** 2 * 8 / 2**20,
    }


def report(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    def cell(name: str, expression: str) -> str:
        row = rows.get((name, expression))
        if row and row["iterations"] is None:
            return f"> {row['seconds']:.0f}, given up"
        return f"{row['seconds']:.2f} ({row['iterations']})" if row else "–"

    def times(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
        more = "> " if theirs["iterations"] is None else ""
        return f"{more}{theirs['seconds'] / ours['seconds']:.1f}"

    lines = [
        "# Speed and memory of LANML",
        "",
        "CPU seconds of one fit (iterations), one thread; `benchmarks/anml_speed.py` states the protocol.",
        "",
        "| | " + " | ".join(SETS) + " |",
        "| --- " * (len(SETS) + 1) + "|",
    ]
    for title, expression in LEARNERS.items():
        lines.append(f"| {title} | " + " | ".join(cell(name, expression) for name in SETS) + " |")
    lines += ["", "How many times LMNN's CPU seconds are those of a learner (K = 4 / K = 7):", ""]
    lines += ["| | " + " | ".join(SETS) + " |", "| --- " * (len(SETS) + 1) + "|"]
    for title, expression in LEARNERS.items():
        if title.startswith("LMNN"):
            continue
        cells = []
        for name in SETS:
            ours = rows.get((name, expression))
            theirs = [rows.get((name, f"LMNN({k})")) for k in (4, 7)]
            cells.append(" / ".join(times(t, ours) if t and ours else "–" for t in theirs))
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Large data: memory is what the fit added to the process's peak; N² × 8 bytes for comparison.",
        "",
    ]
    lines += [
        "| data | learner | CPU s | iterations | MB | N² × 8 B, MB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (name, title), expression in LARGE.items():
        row = rows.get((name, expression))
        if row:
            shape = "" if "×" in name else f", {row['items']:,} × {row['features']}"
            lines.append(
                f"| {name}{shape} | {title} | {row['seconds']:.1f} | {row['iterations']} | "
                f"{row['megabytes']:.0f} | {row['items_squared_megabytes']:,.0f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="only these sets")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "anml_speed.md")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(*arguments.one)))
        return
    kept = arguments.out.with_suffix(".jsonl")
    kept.parent.mkdir(parents=True, exist_ok=True)
    lines = kept.read_text().splitlines() if kept.exists() else []
    rows = {(row["set"], row["learner"]): row for row in map(json.loads, lines)}
    jobs = [(name, expression) for name in SETS for expression in LEARNERS.values()]
    jobs += [(name, expression) for (name, _), expression in LARGE.items()]
    for name, expression in jobs:
        if (name, expression) in rows or (arguments.only and name not in arguments.only):
            continue
        command = [sys.executable, __file__, "--one", name, expression]
        limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))  # noqa: E731
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
        if done.returncode == -signal.SIGKILL:
            row = {"set": name, "learner": expression, "seconds": LIMIT, "iterations": None, "megabytes": 0.0}
        elif done.returncode:
            sys.exit(done.stderr)
        else:
            row = json.loads(done.stdout.splitlines()[-1])
        rows[name, expression] = row
        with kept.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(name, expression, f"{row['seconds']:.2f} s", f"{row['megabytes']:.0f} MB", flush=True)
    arguments.out.write_text(report(rows))
    print(report(rows))


if __name__ == "__main__":
    main()
