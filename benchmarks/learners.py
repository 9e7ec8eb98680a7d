"""Time, memory and growth of learners with many classes: LANML, GMML, AML, OAHU and `oahu.warm`
beside metric-learn's and scikit-learn's.

    python benchmarks/learners.py           # measures what is missing, then writes the page
    # measures again, beside the kept results
    python benchmarks/learners.py --fresh --only GMML RCA --sizes 6250

There are ten items a class, 100 features, and 6,250 to 50,000 items in 625 to 5,000 classes.
Classes are Gaussian, with different spreads along 100 random directions: along some the classes lie
far apart, along others the items of one class do. A learner has to find out which. Each fit runs in
a new process on one thread, with limits of CPU time and memory. A learner that was stopped at one
size is not tried at a larger one. metric-learn's estimators run through the plugin's adapter,
because they fail with a current scikit-learn; the adapter does not change their results.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

import bench

LIMIT, MEMORY = 60, 8
"""CPU seconds and GB after which a fit is stopped."""
LONGER = {"LANML": 900}
"""CPU seconds of learners that may take longer, to show their growth."""
SIZES = (6_250, 12_500, 25_000, 50_000)
WIDTH, OF_A_CLASS, CHECKED = 100, 10, 2_000
OURS = {"GMML": "GMML()", "AML": "AML()", "Warm": "Warm()", "OAHU": "OAHU()", "LANML": "LANML()"}
FEWER = "n_constraints=10_000, random_state=0"
PEERS = {
    "metric-learn RCA": "adapted('RCA_Supervised')(random_state=0)",
    "scikit-learn LDA": "LinearDiscriminantAnalysis()",
    "metric-learn ITML, 10,000 pairs": f"adapted('ITML_Supervised')({FEWER})",
    "metric-learn ITML": "adapted('ITML_Supervised')(random_state=0)",
    "metric-learn MMC, 10,000 pairs": f"adapted('MMC_Supervised')({FEWER})",
    "metric-learn LFDA": "adapted('LFDA')()",
    "metric-learn LMNN": "adapted('LMNN')(random_state=0)",
    "scikit-learn NCA": "NeighborhoodComponentsAnalysis(random_state=0)",
}
ADAPTED = {title for title, made in PEERS.items() if made.startswith("adapted")}
Floats = NDArray[np.float64]


def data_of(items: int) -> tuple[Floats, NDArray[np.int64], Floats, NDArray[np.int64]]:
    """Return features (items, 100) and labels for the fit, and `CHECKED` items of other classes."""
    random = np.random.default_rng(0)
    directions = np.linalg.qr(random.standard_normal((WIDTH, WIDTH)))[0]
    between, within = np.geomspace(1, 0.1, WIDTH), random.permutation(np.geomspace(2.0, 0.2, WIDTH))
    labels = np.arange(items + CHECKED) // OF_A_CLASS
    x = (random.standard_normal((labels[-1] + 1, WIDTH)) * between)[labels]
    x = (x + random.standard_normal(x.shape) * within) @ directions
    order = random.permutation(items)
    return x[order], labels[order], x[items:], labels[items:]


def first(codes: Floats, labels: NDArray[np.int64]) -> float:
    """Return Recall@1."""
    from retrieval.evaluation.evaluation import evaluate

    return float(evaluate(np.asarray(codes), labels, metrics=["recall_at_1"]).values["recall_at_1"])


def fit(title: str, items: int) -> dict[str, Any]:
    """Fit one learner in this process, within the limits."""
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.neighbors import NeighborhoodComponentsAnalysis

    import metric_learn  # noqa: F401  (imported before the clock starts)
    from retrieval_aml import AML, GMML
    from retrieval_anml import LANML
    from retrieval_metric_learn.learners import adapted
    from retrieval_oahu import OAHU, Warm

    peers = (LinearDiscriminantAnalysis, NeighborhoodComponentsAnalysis, adapted)
    names = {kind.__name__: kind for kind in (AML, GMML, LANML, OAHU, Warm, *peers)}
    bench.one_thread()
    x, y, checked, truth = data_of(items)
    learner = eval({**OURS, **PEERS}[title], names)
    learner_of_few = eval({**OURS, **PEERS}[title], names)
    if title in OURS or "LDA" in title:
        learner_of_few.fit(x[:200], y[:200] % 10)  # imports and first calls of the fast learners
    began, limit = time.process_time(), LONGER.get(title, LIMIT)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_CPU, (int(began) + limit, int(began) + limit + 60))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY * 2**30, MEMORY * 2**30))
    row: dict[str, Any] = {"learner": title, "items": items}
    try:
        learner.fit(x, y)
    except MemoryError as error:
        return row | {"stopped": "memory", "why": str(error)}
    except (ValueError, RuntimeError, ArithmeticError) as error:
        return row | {"stopped": "failed", "why": " ".join(str(error).split())}
    row["cpu"] = time.process_time() - began
    row["megabytes"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    resource.setrlimit(resource.RLIMIT_CPU, (int(began) + limit + 55, int(began) + limit + 60))
    row["iterations"] = getattr(learner, "n_iter_", None)
    # metric-learn's own `transform` checks its input in a way that a current scikit-learn rejects
    codes = checked @ learner.components_.T if title in ADAPTED else learner.transform(checked)
    row["recall"] = first(np.real(codes), truth)
    row["recall_before"] = first(checked, truth)
    return row


def measure(title: str, items: int) -> dict[str, Any]:
    """Return the row of one fit in a new process."""
    before = bench.load()
    try:
        row = bench.alone(fit, title, items)
    except TimeoutError:
        row = {"learner": title, "items": items, "stopped": "time"}
    return row | {
        "load": before,
        "machine": f"{bench.machine()}; {bench.versions('metric-learn', 'scikit-learn', 'numpy')}",
        "limits": [LONGER.get(title, LIMIT), MEMORY],
    }


def growth(rows: dict[int, dict[str, Any]]) -> str:
    """Return p of time ∝ itemsᵖ by least squares of the logarithms, for three sizes or more."""
    seen = [(items, row["cpu"]) for items, row in rows.items() if "cpu" in row]
    if len(seen) < 3:
        return "–"
    return f"{np.polyfit(*np.log(np.array(seen)).T, 1)[0]:.2f}"


def cell(row: dict[str, Any] | None) -> str:
    """Return CPU seconds and memory, or why there are none."""
    if row is None:
        return "not tried"
    if "stopped" not in row:
        return f"{row['cpu']:.2f} s, {row['megabytes']:,.0f} MB"
    seconds, memory = row["limits"]
    stops = {"time": f"stopped after {seconds} s", "memory": f"stopped at {memory} GB"}
    return stops.get(row["stopped"], "failed")


def render(kept: list[dict[str, Any]]) -> str:
    sizes = sorted({row["items"] for row in kept})
    loads = [row["load"] for row in kept]
    before = [row["recall_before"] for row in kept if "recall_before" in row]
    table = []
    for title in [*OURS, *PEERS]:
        own = {row["items"]: row for row in bench.chosen(kept, learner=title)}
        done = [f"{row['recall']:.3f}" for row in own.values() if "recall" in row]
        cells = [*(cell(own.get(size)) for size in sizes), growth(own), (done or ["–"])[-1]]
        table += [[title, *cells]] if own else []
    failed = [row for row in kept if row.get("stopped") in ("failed", "memory") and row["why"]]
    reasons = "\n".join(f"- {row['learner']} at {row['items']:,}: {row['why']}" for row in failed)
    longer = ", ".join(f"{title} {most}" for title, most in LONGER.items())
    return bench.page(f"""
        # Learners at many classes: time, memory, growth

        `python benchmarks/learners.py`. One fit with the learner's defaults, unless the row says
        otherwise: CPU seconds on one thread, and the rise of the process's peak memory. There are
        {WIDTH} features and Gaussian classes of {OF_A_CLASS} items each, so {sizes[-1]:,} items are
        {sizes[-1] // OF_A_CLASS:,} classes. Each fit runs in a new process, which is stopped after
        {LIMIT} CPU seconds ({longer}, to see its growth) or at {MEMORY} GB of addresses. A stopped
        learner is not tried at larger sizes. Growth is p of time ∝ itemsᵖ, for three sizes or more.
        The last column is Recall@1 of 2,000 items of other classes at the largest completed size.
        Without a learner it is {min(before):.3f} to {max(before):.3f}.

        Machine: {kept[0]["machine"]}. Load {min(loads):.0f} to {max(loads):.0f}: other work shared
        the cores.

        {bench.markdown(["", *(f"{size:,} items" for size in sizes), "growth", "Recall@1"], table)}

        {reasons}

        *Not tried*: stopped at a smaller size. OAHU and Warm learn from at most 10,000 triplets, so
        their time hardly grows. LANML uses at most 5,000 items as queries, each among all items.
        scikit-learn's LDA has an advantage: it assumes Gaussian classes, and these are Gaussian.
    """)


def main() -> None:
    parser = bench.resume_arguments(__doc__)
    parser.add_argument("--only", nargs="*", help="only learners with these words")
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES)
    options = parser.parse_args()
    kept = bench.Kept("learners", options, ("learner", "items"))
    titles = [
        title
        for title in [*OURS, *PEERS]
        if not options.only or any(word in title for word in options.only)
    ]
    for title, items in kept.missing((title, size) for size in options.sizes for title in titles):
        if not any("stopped" in row for row in bench.chosen(kept.rows, learner=title)):
            kept.add(measure(title, items))
    kept.finish(render(kept.rows))


if __name__ == "__main__":
    main()
