"""AML's and GMML's speed: CPU seconds of one fit by number of pairs, by number of features, and against metric-learn's ITML.

    python benchmarks/aml_speed.py        # half a minute, then results/aml_speed.md

One thread; each figure is the median of 3 to 15 runs (ITML: one). Pairs are drawn from letter (20,000 × 16); "after" is the search alone,
once A and B are there. Features: 6,238 items of 26 classes of random normal numbers about random means, as many as isolet's training
part has, for 617 its width. ITML is metric-learn's with its defaults (at most 1,000 iterations; 20 C² pairs of each kind), and the
same sets, standardised. Needs the packages that `uci.py` names, and metric-learn.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from sklearn.preprocessing import StandardScaler

from retrieval_aml import AML, GMML
from retrieval_aml.moments import moments_of_classes, moments_of_drawn_pairs
from retrieval_aml.objective import Objective
from retrieval_aml.search import minimise
from retrieval_metric_learn.learners import ITML
from uci import load

PAIRS = (650, 6_500, 65_000, 650_000)
FEATURES = (16, 64, 128, 256, 617)


def seconds(call: Callable[[], Any], repeats: int = 5) -> tuple[float, Any]:
    """Return the median CPU seconds of a call, and what it gave last."""
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        found = call()
        taken.append(time.process_time() - started)
    return float(np.median(taken)), found


def by_pairs() -> list[str]:
    x, y = load("letter")
    x = StandardScaler().fit_transform(x)
    lines = [
        "## By number of pairs (letter, 20,000 × 16)",
        "",
        "| pairs | forming A and B, ms | after, ms | iterations |",
    ]
    lines.append("| --- | --- | --- | --- |")
    after = []
    ways: list[tuple[str, Callable[[], Any]]] = [
        (f"{count:,} drawn", lambda count=count: moments_of_drawn_pairs(x, y, count, 0)) for count in PAIRS
    ]
    ways.append((f"all {20000 * 19999 // 2:,}, by sums of classes", lambda: moments_of_classes(x, y)))
    for title, form in ways:
        forming, found = seconds(form)
        objective = Objective(found.similar, found.dissimilar, 1.0, 1.0)
        searching, result = seconds(
            lambda objective=objective: minimise(objective, tol=1e-6, max_iter=500), 15
        )
        after.append(searching)
        lines.append(f"| {title} | {1e3 * forming:.1f} | {1e3 * searching:.1f} | {result.iterations} |")
    whole = seconds(lambda: AML().fit(x, y))[0]
    lines += [
        "",
        f"After A and B are formed, 650,000 pairs take {after[3] / after[0]:.2f} times what 650 take (target: at most 2): the moments of "
        f"few pairs are worse conditioned and take a few iterations more. `AML().fit` on all pairs of letter: {whole:.3f} s "
        f"(target: under 1).",
        "",
    ]
    return lines


def by_features() -> list[str]:
    random = np.random.default_rng(0)
    y = np.arange(6238) % 26
    lines = [
        "## By number of features (6,238 random items, all pairs)",
        "",
        "| features | GMML, s | AML, s | iterations | least eigenvalue of M |",
    ]
    lines.append("| --- | --- | --- | --- | --- |")
    for features in FEATURES:
        x = random.normal(size=(6238, features)) + random.normal(size=(26, features))[y]
        closed = seconds(lambda x=x: GMML().fit(x, y), 3)[0]
        searched, learner = seconds(lambda x=x: AML().fit(x, y), 3)
        least = np.linalg.eigvalsh(learner.get_mahalanobis_matrix())[0]
        lines.append(f"| {features} | {closed:.3f} | {searched:.3f} | {learner.n_iter_} | {least:.2g} |")
    return [*lines, ""]


def against_itml() -> list[str]:
    lines = [
        "## Against metric-learn's ITML",
        "",
        "| | GMML, s | AML, s | ITML, s | ITML / AML |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in ("vehicle", "german"):
        x, y = load(name)
        x = StandardScaler().fit_transform(x)
        closed, searched, theirs = (
            seconds(lambda learner=learner, x=x, y=y: learner.fit(x, y), repeats)[0]
            for learner, repeats in ((GMML(), 15), (AML(), 15), (ITML(), 1))
        )
        lines.append(f"| {name} | {closed:.4f} | {searched:.4f} | {theirs:.2f} | {theirs / searched:.0f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "aml_speed.md")
    out = parser.parse_args().out
    lines = [
        "# Speed of AML and GMML",
        "",
        "CPU seconds of one fit, one thread; `benchmarks/aml_speed.py` states the protocol.",
        "",
    ]
    text = "\n".join([*lines, *by_pairs(), *by_features(), *against_itml()]) + "\n"
    temporary = out.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(out)
    print(text)


if __name__ == "__main__":
    main()
