"""Whether AML gains over GMML, or either gains over LANML⁺, on sets that a rule chose.

    python benchmarks/aml_heldout.py            # measures missing results, then writes the page
    python benchmarks/aml_heldout.py --write    # writes the page from the kept results

The sets are the 16 evaluation sets of `uci.py`. Before, these methods had been measured on three of
them, for Table 1 (`aml_table1.py`). Splits are random, 70/30, with features standardised on the
training part, at most 1,000 training and 1,500 test items; the measure is the 5-nearest-neighbour
error. There are two sizes: the whole training part, and ten items of each class, where
regularisation matters most. If adversarial pairs regularise better than GMML's own term, the small
size shows it.

GMML and AML have twenty candidates each with the same five t: GMML four λ, AML four pairs of α and
β. LANML⁺ has two candidates. Threefold cross-validation on the training part chooses; ties go to
the first. Splits of a set are averaged. Intervals are Student's over the sets, whose differences
count as independent.
"""

from __future__ import annotations

import itertools
import time
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import StratifiedKFold, train_test_split
from sklearn.preprocessing import StandardScaler

import bench
import uci
from retrieval_aml import AML, GMML
from retrieval_anml import LANML

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SPLITS, TRAIN, TEST, FEW = 5, 1000, 1500, 10
TS = (0.1, 0.2, 0.3, 0.5, 0.7)
METHODS = {
    "euclid": "Euclid",
    "gmml": "GMML (t = .5)",
    "aml": "AML (α = β = 1)",
    "gmml_tuned": "GMML tuned",
    "aml_tuned": "AML tuned",
    "lanml": "LANML⁺",
}
SEEN = ("letter", "segment", "vehicle")
"""Sets of Table 1, on which AML and GMML were compared earlier."""
PAIRS = (
    ("aml", "gmml"),
    ("aml_tuned", "gmml_tuned"),
    ("gmml_tuned", "euclid"),
    ("lanml", "euclid"),
    ("aml_tuned", "lanml"),
)


def candidates(method: str) -> list[Any]:
    if method == "gmml_tuned":
        weights = (0.0, 0.01, 0.1, 1.0)
        return [GMML(t, regularization=weight) for t, weight in itertools.product(TS, weights)]
    if method == "aml_tuned":
        settings = ((1.0, 1.0), (10.0, 1.0), (10.0, 10.0), (100.0, 1.0))
        return [AML(alpha, beta, t=t) for t, (alpha, beta) in itertools.product(TS, settings)]
    if method == "lanml":
        return [LANML(1.0, gamma2, 0.1, standardize=False, max_iter=50) for gamma2 in (8.0, 2.0)]
    return [{"euclid": None, "gmml": GMML(), "aml": AML()}[method]]


def fitted_error(learner: Any, x: Floats, y: Ints, test: Floats, truth: Ints) -> float:
    """Fit a learner on x, and return its error on `test`."""
    if learner is None:
        return bench.error(x, y, test, truth)
    learner.fit(x, y)
    return bench.error(learner.transform(x), y, learner.transform(test), truth)


def part_of(name: str, split: int, size: str) -> tuple[Floats, Ints, Floats, Ints]:
    x, y = uci.items(name)
    x, test, y, truth = train_test_split(x, y, test_size=0.3, random_state=split, stratify=y)
    if size == "few":
        rows = np.concatenate([np.flatnonzero(y == c)[:FEW] for c in np.unique(y)])
        x, y = x[rows], y[rows]
    elif len(x) > TRAIN:
        x, _, y, _ = train_test_split(x, y, train_size=TRAIN, random_state=split, stratify=y)
    scale = StandardScaler().fit(x)
    return scale.transform(x), y, scale.transform(test[:TEST]), truth[:TEST]


def measure(name: str, split: int, size: str) -> dict[str, Any]:
    """Return each method's error on a split of a set."""
    started = time.process_time()
    x, y, test, truth = part_of(name, split, size)
    folds = list(StratifiedKFold(3, shuffle=True, random_state=0).split(x, y))
    row: dict[str, Any] = {"set": name, "split": split, "size": size, "items": len(x)}
    for method in METHODS:
        learners = candidates(method)
        best = 0
        if len(learners) > 1:
            scores = [
                sum(fitted_error(learner, x[i], y[i], x[o], y[o]) for i, o in folds)
                for learner in learners
            ]
            best = int(np.argmin(scores))
        row[method] = fitted_error(learners[best], x, y, test, truth)
        row[f"{method}_chosen"] = " ".join(str(learners[best]).split())
    return row | {"seconds": round(time.process_time() - started, 1)}


def tables(rows: list[dict[str, Any]], sets: list[str], size: str) -> tuple[str, str]:
    """Return a table of errors at one size in %, and one of the methods' differences."""
    means = {
        name: {
            m: 100 * np.mean([r[m] for r in bench.chosen(rows, set=name, size=size)])
            for m in METHODS
        }
        for name in sets
    }
    body = [[name, *(f"{means[name][m]:.1f}" for m in METHODS)] for name in sets]
    body.append(["**mean**", *(f"{np.mean([means[n][m] for n in sets]):.1f}" for m in METHODS)])
    compared = []
    for first, second in PAIRS:
        gaps = {name: means[name][first] - means[name][second] for name in sets}
        every, fresh = list(gaps.values()), [gap for name, gap in gaps.items() if name not in SEEN]
        spans = [f"{np.mean(some):+.2f} ± {bench.half_width(some):.2f}" for some in (every, fresh)]
        better = f"{sum(gap < 0 for gap in every)} of {len(sets)}"
        span = f"{min(every):+.1f} … {max(every):+.1f}"
        compared.append([f"{METHODS[first]} minus {METHODS[second]}", *spans, better, span])
    head = ["difference in error, points (below 0: the first is better)", f"all {len(sets)} sets"]
    head += [f"the {len(sets) - len(SEEN)} not in Table 1", "sets where the first is better"]
    return bench.markdown(["", *METHODS.values()], body), bench.markdown([*head, "range"], compared)


def render(rows: list[dict[str, Any]]) -> str:
    sets = list(dict.fromkeys(row["set"] for row in rows))
    splits = [
        split
        for split in range(1 + max(row["split"] for row in rows))
        if len(bench.chosen(rows, split=split)) == 2 * len(sets)
    ]
    rows = [row for row in rows if row["split"] in splits]
    whole, few = (tables(rows, sets, size) for size in ("all", "few"))
    minutes = sum(row["seconds"] for row in rows) / 60
    return bench.page(f"""
        # AML, GMML and LANML⁺ on held-out sets

        `python benchmarks/aml_heldout.py` states the protocol. 5-nearest-neighbour error in %,
        {len(splits)} random split{"s" if len(splits) > 1 else ""}; {len(sets)} sets that a rule
        chose, of which {", ".join(SEEN)} had been measured earlier for Table 1. Differences are
        paired by split and averaged over splits; ± is Student's 95 % interval over sets.

        ## All of the training part (at most 1,000 items)

        {whole[0]}

        {whole[1]}

        ## Ten items of each class

        {few[0]}

        {few[1]}

        Measured in {minutes:.0f} minutes of one CPU thread.
    """)


def main() -> None:
    options = bench.resume_arguments(__doc__).parse_args()
    bench.one_thread()
    warnings.simplefilter("ignore", ConvergenceWarning)
    kept = bench.Kept("aml_heldout", options, ("set", "split", "size"))
    jobs = itertools.product(range(SPLITS), uci.EVALUATION, ("few", "all"))
    for name, split, size in kept.missing((name, split, size) for split, name, size in jobs):
        kept.add(measure(name, split, size))
    kept.finish(render(kept.rows))


if __name__ == "__main__":
    main()
