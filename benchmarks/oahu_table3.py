"""OAHU and its baselines on Fashion-MNIST: Table 3 and Figure 4 of the paper, and where OAHU does
help.

    OMP_NUM_THREADS=1 python benchmarks/oahu_table3.py
    # a part, measured again
    OMP_NUM_THREADS=1 python benchmarks/oahu_table3.py --fresh --parts table --methods LEGO --repeats 0

Each figure is kept at once, in results/raw/oahu_table3.jsonl: a run that stops goes on where it
was. Some ten minutes of CPU time. Constants of the baselines were chosen on the development parts
of two other splits; the queries are 4,000 images a repeat that lie in neither of those parts.
35,000 of the other images are the development part, as in the paper: they give the triplets and are
the references.
"""  # noqa: E501

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import RESULTS, Kept, resume_arguments
from oahu_report import POINTS, draw, report

Floats = NDArray[Any]
REPEATS = 3
QUERIES = 4000
TUNED = "OAHU, η .01 τ 1.9"


def learners() -> dict[str, Callable[[int], Any]]:
    """Return what is compared: each makes a learner of a seed."""
    from retrieval_oahu import LEGO, OAHU, OASIS, OPML, RDML

    return {
        "LEGO": lambda seed: LEGO(seed=seed),
        "LEGO, median targets": lambda seed: LEGO(upper=50, lower=50, seed=seed),
        "RDML": lambda seed: RDML(seed=seed),
        "OASIS": lambda seed: OASIS(seed=seed),
        "OPML": lambda seed: OPML(seed=seed),
        "OAHU": lambda seed: OAHU(seed=seed),
        "OAHU, untrained": lambda seed: OAHU(seeds=0, closure=0, seed=seed),
        TUNED: lambda seed: OAHU(learning_rate=0.01, tau=1.9, seed=seed),
    }


def fashion() -> tuple[Floats, Floats]:
    """Return all 70,000 images as (N, 784) between 0 and 1, and their classes."""
    from retrieval_core import fashion_mnist

    data = fashion_mnist()
    return data.arrays.reshape(len(data), -1).astype(np.float32) / 255, np.array(
        data.labels, dtype=np.int64
    )


def split(repeat: int) -> tuple[Floats, Floats]:
    """Return rows of the development part (35,000) and of the queries."""
    chosen_on = [np.random.default_rng(seed).permutation(70_000)[:35_000] for seed in (0, 1)]
    untouched = np.setdiff1d(np.arange(70_000), np.concatenate(chosen_on))
    queries = np.random.default_rng(100).permutation(untouched)[
        QUERIES * repeat : QUERIES * (repeat + 1)
    ]
    rest = np.random.default_rng(200 + repeat).permutation(np.setdiff1d(np.arange(70_000), queries))
    return rest[:35_000], queries


def nearest(
    query: Floats, references: Floats, k: int, inner: bool = False, own: bool = False
) -> Floats:
    """Return rows (Q, k), nearest first; `inner` by the largest inner product, `own` leaves out the
    item itself.
    """
    query, references = query.astype(np.float32), references.astype(np.float32)
    norms = 0 if inner else (references**2).sum(1)
    found = []
    for start in range(0, len(query), 500):
        d = norms - 2 * query[start : start + 500] @ references.T
        if own:
            d[np.arange(len(d)), start + np.arange(len(d))] = np.inf
        some = np.argpartition(d, k, axis=1)[:, :k]
        found.append(
            np.take_along_axis(
                some, np.argsort(np.take_along_axis(d, some, 1), axis=1, kind="stable"), 1
            )
        )
    return np.concatenate(found)


def vote(labels: Floats) -> Floats:
    """Return the most frequent label of each row (Q, k); of equally frequent ones the nearest."""
    counts = (labels[:, :, None] == labels[:, None]).sum(2)
    return labels[np.arange(len(labels)), counts.argmax(1)]


def classified(learner: Any, refs: Floats, labels: Floats, query: Floats, k: int = 5) -> Floats:
    """Return labels of the queries by each learner's own way; None is Euclid."""
    kind = type(learner).__name__
    if kind == "OAHU":
        return learner.classify(query, learner.spaces(refs), labels, k)
    if kind == "OASIS":
        return vote(labels[nearest(learner.queries(query), learner.transform(refs), k, inner=True)])
    if learner is not None:
        query, refs = learner.transform(query), learner.transform(refs)
    return vote(labels[nearest(query, refs, k)])


def scores(truth: Floats, found: Floats) -> dict[str, float]:
    """Return error and macro-F1."""
    from sklearn.metrics import f1_score

    return {
        "error": float((truth != found).mean()),
        "f1": float(f1_score(truth, found, average="macro")),
    }


def triplet_rows(labels: Floats, seed: int) -> Floats:
    """Return the paper's 10,000 triplets (T, 3)."""
    from retrieval_oahu.streams import paper_stream

    return np.array(list(paper_stream(labels, 5000, 5000, seed=seed)))


Job = tuple[str, str, int]


def jobs() -> Iterator[tuple[Job, Callable[[], list[dict[str, Any]]]]]:
    """Return what to measure: part, method, repeat, and a function that gives its rows."""
    x, y = fashion()
    on_splits = {
        "table": (table_rows, ["Euclid", *learners()], range(REPEATS)),
        "curve": (curve_rows, ["LEGO", "RDML", "OASIS", "OPML", "OAHU"], range(1)),
        "few": (few_rows, ["Euclid", "LEGO", "OAHU", TUNED], range(REPEATS)),
    }
    for part, (measure, names, repeats) in on_splits.items():
        for repeat in repeats:
            dev, queries = split(repeat)
            for name in names:
                yield (part, name, repeat), partial(measure, name, repeat, x, y, dev, queries)
    for repeat in range(REPEATS):
        for name in ("Euclid", "OAHU", TUNED):
            yield ("retrieval", name, repeat), partial(retrieval_rows, name, repeat, x, y)


def table_rows(
    name: str, repeat: int, x: Floats, y: Floats, dev: Floats, queries: Floats
) -> list[dict[str, Any]]:
    """Error, F1 and utilisation of Table 3; error with few references; AUC of pairs."""
    from sklearn.metrics import roc_auc_score

    learner = None
    seconds = 0.0
    if name != "Euclid":
        started = time.process_time()
        learner = learners()[name](repeat).fit(x[dev], y[dev])
        seconds = time.process_time() - started
    row: dict[str, Any] = scores(y[queries], classified(learner, x[dev], y[dev], x[queries]))
    row["fit_seconds"] = seconds
    if learner is not None:
        row["utilization"] = learner.constraint_utilization_
    for few in (100, 1000):
        row[f"error_{few}"] = scores(
            y[queries], classified(learner, x[dev[:few]], y[dev[:few]], x[queries])
        )["error"]
    a, b = np.random.default_rng(repeat).integers(0, len(queries), (2, 20_000))
    a, b = a[a != b], b[a != b]
    one, other = x[queries[a]], x[queries[b]]
    if learner is None:
        d = ((one - other) ** 2).sum(1)
    elif name == "OASIS":
        d = -(learner.queries(one) * learner.transform(other)).sum(1)
    else:
        d = ((learner.transform(one) - learner.transform(other)) ** 2).sum(1)
    row["auc"] = float(roc_auc_score(y[queries[a]] == y[queries[b]], -d))
    return [row]


def few_rows(
    name: str, repeat: int, x: Floats, y: Floats, dev: Floats, queries: Floats
) -> list[dict[str, Any]]:
    """Error with each of ten draws of 100 references."""
    learner = None if name == "Euclid" else learners()[name](repeat).fit(x[dev], y[dev])
    errors = []
    for draw_ in range(10):
        some = np.random.default_rng(400 + draw_).permutation(dev)[:100]
        errors.append(
            scores(y[queries], classified(learner, x[some], y[some], x[queries]))["error"]
        )
    return [{"errors": errors}]


def curve_rows(
    name: str, repeat: int, x: Floats, y: Floats, dev: Floats, queries: Floats
) -> list[dict[str, Any]]:
    """Error after so many triplets, and the weights along the way."""
    learner = learners()[name](repeat).prepare(x[dev])
    rows = np.random.default_rng(repeat).permutation(triplet_rows(y[dev], repeat))
    found: list[dict[str, Any]] = []
    before = 0
    asked = queries[:2000]
    for point in POINTS:
        learner.learn_from(
            x[dev[rows[start : min(start + 256, point)]]] for start in range(before, point, 256)
        )
        before = point
        e = scores(y[asked], classified(learner, x[dev], y[dev], x[asked]))["error"]
        found.append({"triplets": point, "error": e})
    if hasattr(learner, "weights_"):
        every = max(1, len(learner.weights_) // 64)
        found[-1]["weights"] = learner.weights_[::every].round(4).tolist()
        found[-1]["weights_at"] = learner.weights_at_[::every].tolist()
    return found


def retrieval_rows(name: str, repeat: int, x: Floats, y: Floats) -> list[dict[str, Any]]:
    """Recall@K and precision@10 on unseen classes: each item is a query for the others."""
    rng = np.random.default_rng(300 + repeat)
    order = rng.permutation(70_000)
    train = order[y[order] < 5][:15_000]
    test = order[y[order] >= 5][:5000]
    if name == "Euclid":
        return [retrieved("Euclid", nearest(x[test], x[test], 10, own=True), y[test])]
    learner = learners()[name](repeat).fit(x[train], y[train])
    codes = learner.transform(x[test])
    summed = nearest(codes, codes, 10, own=True)
    if not name.startswith("OAHU"):
        return [retrieved(name, summed, y[test])]
    spaces = learner.spaces(x[test])
    exact, _ = spaces.retrieve(spaces, 11)
    without = np.array([[i for i in row if i != n][:10] for n, row in enumerate(exact.tolist())])
    overlap = float(
        np.mean([len(np.intersect1d(a, b)) / 10 for a, b in zip(without, summed, strict=True)])
    )
    return [
        retrieved(f"{name}: Eq 27, a space at a time", without, y[test]) | {"overlap": overlap},
        retrieved(f"{name}: weighted sum, one index", summed, y[test]),
    ]


def retrieved(title: str, rows: Floats, labels: Floats) -> dict[str, Any]:
    """Return Recall@1, 5, 10 and Precision@10."""
    hits = labels[rows] == labels[:, None]
    return {"title": title, "p10": float(hits.mean())} | {
        f"r{k}": float(hits[:, :k].any(1).mean()) for k in (1, 5, 10)
    }


def main() -> None:
    """Measure what is missing, and write the page and the figure."""
    parts = ["table", "curve", "few", "retrieval"]
    parser = resume_arguments(__doc__)
    parser.add_argument("--parts", nargs="*", default=parts, choices=parts)
    parser.add_argument("--methods", nargs="*", default=None, help="only these")
    parser.add_argument("--repeats", nargs="*", type=int, default=range(REPEATS), help="only these")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="tau is")
    kept = Kept("oahu_table3", options.fresh)
    done = {(r["part"], r["method"], r["repeat"]) for r in kept.rows}
    for job, measure in jobs():
        part, method, repeat = job
        if job in done or part not in options.parts or repeat not in options.repeats:
            continue
        if options.methods is not None and method not in options.methods:
            continue
        started = time.process_time()
        found = [{"part": part, "method": method, "repeat": repeat, **row} for row in measure()]
        found[0]["cpu"] = time.process_time() - started
        for row in found:
            kept.add(row)
    if not options.fresh:
        draw(kept.rows, RESULTS / "oahu_table3.png")
    kept.finish(report(kept.rows, "oahu_table3.png"))


if __name__ == "__main__":
    main()
