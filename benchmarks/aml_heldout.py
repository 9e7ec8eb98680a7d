"""Does AML gain anything over GMML, or either over LANML⁺, on sets that were chosen by a rule?

    python benchmarks/aml_heldout.py            # what is not measured yet, then the page
    python benchmarks/aml_heldout.py --write    # from what is kept

The 16 evaluation sets of `warm_sets.py`. These methods had been measured before on three of them,
for Table 1 (`aml_table1.py`), and on none of the other 13. Random 70/30 splits, features
standardised on the training part, at most 1,000 training and 1,500 test items; 5-nearest-neighbour
error. Two sizes: all of the training part, and ten items of each class, where a metric has most to
gain from whatever regularises it. What adversarial pairs could do better than GMML's own
regularisation shows there, if anywhere.

GMML and AML have twenty candidates each and the same five t: GMML four λ, AML four pairs of α and
β. LANML⁺ has two. Each choice is by threefold cross-validation on the training part, ties going to
the first. Splits of a set are averaged, and the intervals are Student's over sets, whose
differences are what can be taken as independent.
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import StratifiedKFold, train_test_split
from sklearn.preprocessing import StandardScaler

from bench import append, arguments, error, half_width, markdown, read_lines

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RESULT = Path(__file__).parent / "results" / "aml_heldout.md"
KEPT = RESULT.parent / "raw" / "aml_heldout.jsonl"
SPLITS, TRAIN, TEST, FEW = 5, 1000, 1500, 10
TS = (0.1, 0.2, 0.3, 0.5, 0.7)
METHODS = {
    "euclid": "Euclid",
    "gmml": "GMML, t = .5",
    "aml": "AML, α = β = 1",
    "gmml_tuned": "GMML tuned",
    "aml_tuned": "AML tuned",
    "lanml": "LANML⁺",
}
SEEN = ("letter", "segment", "vehicle")
"""Sets of Table 1, on which AML and GMML had been compared before."""
PAIRS = (
    ("aml", "gmml"),
    ("aml_tuned", "gmml_tuned"),
    ("gmml_tuned", "euclid"),
    ("lanml", "euclid"),
    ("aml_tuned", "lanml"),
)


def candidates(method: str) -> list[Any]:
    from retrieval_aml import AML, GMML
    from retrieval_anml import LANML

    if method == "gmml_tuned":
        return [
            GMML(t, regularization=weight)
            for t, weight in itertools.product(TS, (0.0, 0.01, 0.1, 1.0))
        ]
    if method == "aml_tuned":
        settings = ((1.0, 1.0), (10.0, 1.0), (10.0, 10.0), (100.0, 1.0))
        return [AML(alpha, beta, t=t) for t, (alpha, beta) in itertools.product(TS, settings)]
    if method == "lanml":
        return [LANML(1.0, gamma2, 0.1, standardize=False, max_iter=50) for gamma2 in (8.0, 2.0)]
    return [{"euclid": None, "gmml": GMML(), "aml": AML()}[method]]


def fitted_error(learner: Any, x: Floats, y: Ints, test: Floats, truth: Ints) -> float:
    """Return the error of a learner that is fitted on x."""
    if learner is None:
        return error(x, y, test, truth)
    learner.fit(x, y)
    return error(learner.transform(x), y, learner.transform(test), truth)


def part_of(name: str, split: int, size: str) -> tuple[Floats, Ints, Floats, Ints]:
    """Return the training and the test part."""
    from warm_sets import items

    x, y = items(name)
    x, test, y, truth = train_test_split(x, y, test_size=0.3, random_state=split, stratify=y)
    if size == "few":
        chosen = np.concatenate([np.flatnonzero(y == c)[:FEW] for c in np.unique(y)])
        x, y = x[chosen], y[chosen]
    elif len(x) > TRAIN:
        x, _, y, _ = train_test_split(x, y, train_size=TRAIN, random_state=split, stratify=y)
    scale = StandardScaler().fit(x)
    return scale.transform(x), y, scale.transform(test[:TEST]), truth[:TEST]


def measure() -> None:
    """Run what is missing, split by split; keep each set at once."""
    from warm_sets import EVALUATION

    warnings.simplefilter("ignore", ConvergenceWarning)
    done = {(row["set"], row["split"], row["size"]) for row in read_lines(KEPT)}
    for split, name, size in itertools.product(range(SPLITS), EVALUATION, ("few", "all")):
        if (name, split, size) in done:
            continue
        started = time.process_time()
        x, y, test, truth = part_of(name, split, size)
        folds = list(StratifiedKFold(3, shuffle=True, random_state=0).split(x, y))
        row: dict[str, Any] = {"set": name, "split": split, "size": size, "items": len(x)}
        for method in METHODS:
            found = candidates(method)
            best = 0
            if len(found) > 1:
                scores = [
                    sum(fitted_error(one, x[i], y[i], x[o], y[o]) for i, o in folds)
                    for one in found
                ]
                best = int(np.argmin(scores))
            row[method] = fitted_error(found[best], x, y, test, truth)
            row[f"{method}_chosen"] = " ".join(str(found[best]).split())
        row["seconds"] = round(time.process_time() - started, 1)
        append(KEPT, row)


def render(rows: list[dict[str, Any]]) -> str:
    """Return the page."""
    sets = list(dict.fromkeys(row["set"] for row in rows))
    splits = 1 + max(row["split"] for row in rows)
    whole = [
        split
        for split in range(splits)
        if all(
            any((r["set"], r["split"], r["size"]) == (name, split, size) for r in rows)
            for name in sets
            for size in ("few", "all")
        )
    ]
    rows = [row for row in rows if row["split"] in whole]
    lines = [
        "# AML, GMML and LANML⁺ on held-out sets",
        "",
        (
            "`python benchmarks/aml_heldout.py` states the protocol. 5-nearest-neighbour error in"
            f" %, {len(whole)} random split{'s' if len(whole) > 1 else ''}; {len(sets)} sets chosen"
            f" by a rule, of which {', '.join(SEEN)}"
        ),
        (
            "had been measured for Table 1 before. Differences are paired by split, averaged over"
            " splits, and ± is Student's 95 % interval over sets."
        ),
        "",
    ]
    for size, title in (
        ("all", "All of the training part (at most 1,000 items)"),
        ("few", "Ten items of each class"),
    ):
        means = {
            name: {
                m: 100 * np.mean([r[m] for r in rows if (r["set"], r["size"]) == (name, size)])
                for m in METHODS
            }
            for name in sets
        }
        body = [[name, *(f"{means[name][m]:.1f}" for m in METHODS)] for name in sets]
        body.append(["**mean**", *(f"{np.mean([means[n][m] for n in sets]):.1f}" for m in METHODS)])
        lines += [f"## {title}", "", markdown(["", *METHODS.values()], body), ""]
        compared = []
        for one, other in PAIRS:
            gaps = {name: means[name][one] - means[name][other] for name in sets}
            fresh = [gap for name, gap in gaps.items() if name not in SEEN]
            compared.append(
                [
                    f"{METHODS[one]} − {METHODS[other]}",
                    f"{np.mean(list(gaps.values())):+.2f} ± {half_width(list(gaps.values())):.2f}",
                    f"{np.mean(fresh):+.2f} ± {half_width(fresh):.2f}",
                    f"{sum(gap < 0 for gap in gaps.values())} of {len(sets)}",
                    f"{min(gaps.values()):+.1f} … {max(gaps.values()):+.1f}",
                ]
            )
        head = [
            "difference in error, points (below 0: the first is better)",
            f"all {len(sets)} sets",
            f"the {len(sets) - len(SEEN)} not in Table 1",
            "sets where the first is better",
            "range",
        ]
        lines += [markdown(head, compared), ""]
    minutes = sum(row["seconds"] for row in rows) / 60
    lines += [f"Measured in {minutes:.0f} minutes of one CPU thread.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--write", action="store_true", help="run nothing")
    if not parser.parse_args().write:
        measure()
    rows = read_lines(KEPT)
    RESULT.write_text(render(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
