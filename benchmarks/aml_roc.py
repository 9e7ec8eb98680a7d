"""Verification of pairs after the paper's Figure 4: ROC and AUC under each metric, for unseen
classes.

    python benchmarks/aml_roc.py

The paper's features of faces (PubFig, LFW) and patches (MVS) are not available. This script uses
the pixels of scikit-learn's digits and of 3,000 images of Fashion-MNIST, as 64 principal components
of the training classes. Five classes train; 10,000 pairs of items of the other five classes are
judged as same or different, half of each. There are five choices of the classes. GMML's t is the
one with the best AUC on three of the training classes after learning from the other two, averaged
over two such choices. AML has α = β = 1, as the paper's Figure 5 advises, at the same t (AML_t) and
at .5. ITML and LMNN are metric-learn's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score, roc_curve

import bench
from retrieval_aml import AML, GMML
from retrieval_core import fashion_mnist
from retrieval_metric_learn.learners import ITML, LMNN

Floats = NDArray[np.float64]
REPEATS, PAIRS = 5, 10_000
TS = (0.1, 0.2, 0.3, 0.5, 0.7)


def sets() -> Iterator[tuple[str, Floats, Any]]:
    x, y = load_digits(return_X_y=True)
    yield "digits", x / 16, y
    data = fashion_mnist()
    rows = np.random.default_rng(0).permutation(len(data))[:3000]
    pixels = np.asarray(data.arrays)[rows].reshape(len(rows), -1).astype(np.float64) / 255
    yield "Fashion-MNIST", pixels, np.array(data.labels, dtype=np.int64)[rows]


def pairs_of(y: Any, seed: int) -> tuple[Any, Any, Any]:
    """Return the rows of both items of each pair, and whether they are of one class (half are)."""
    random = np.random.default_rng(seed)
    a, b = random.integers(0, len(y), (2, 60 * PAIRS))
    a, b = a[a != b], b[a != b]
    same = y[a] == y[b]
    rows = np.concatenate([np.flatnonzero(side)[: PAIRS // 2] for side in (same, ~same)])
    return a[rows], b[rows], same[rows]


def verified(learner: Any, x: Floats, y: Any, seed: int) -> tuple[float, Any]:
    """Return AUC and ROC of a learner's distances."""
    codes = x if learner is None else learner.transform(x)
    a, b, same = pairs_of(y, seed)
    far = ((codes[a] - codes[b]) ** 2).sum(1)
    return float(roc_auc_score(same, -far)), roc_curve(same, -far)[:2]


def best_t(x: Floats, y: Any, classes: Any) -> float:
    """Return GMML's t with the best AUC on training classes that it did not learn from."""
    total = dict.fromkeys(TS, 0.0)
    for known in (classes[:2], classes[3:]):
        inside, outside = np.isin(y, known), np.isin(y, classes) & ~np.isin(y, known)
        for t in TS:
            learner = GMML(t, regularization=1e-3).fit(x[inside], y[inside])
            total[t] += verified(learner, x[outside], y[outside], 0)[0]
    return max(TS, key=total.__getitem__)


def measure(name: str, x: Floats, y: Any, repeat: int) -> Iterator[dict[str, Any]]:
    """Yield the AUC of each method; for the first repeat also the curve."""
    classes = np.random.default_rng(repeat).permutation(10)[:5]
    seen = np.isin(y, classes)
    z = PCA(64, random_state=0).fit(x[seen]).transform(x) if name != "digits" else x
    t = best_t(z, y, classes)
    learners = {
        "Euclid": None,
        "GMML, t = .5": GMML(regularization=1e-3),
        "AML, α = β = 1": AML(regularization=1e-3),
        "GMML, t tuned": GMML(t, regularization=1e-3),
        "AML_t, the same t": AML(t=t, regularization=1e-3),
        "LMNN": LMNN(3, max_iter=200),
        "ITML": ITML(max_iter=100),
    }
    for method, learner in learners.items():
        if learner is not None:
            learner.fit(z[seen], y[seen])
        auc, (false, true) = verified(learner, z[~seen], y[~seen], repeat)
        row: dict[str, Any] = {"set": name, "repeat": repeat, "method": method, "t": t, "auc": auc}
        if not repeat:
            points = np.linspace(0, len(false) - 1, 100).astype(int)
            row["curve"] = [false[points].round(4).tolist(), true[points].round(4).tolist()]
        yield row


def render(rows: list[dict[str, Any]]) -> str:
    names, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("set", "method"))

    def auc(name: str, method: str) -> list[float]:
        return [row["auc"] for row in rows if (row["set"], row["method"]) == (name, method)]

    body = [[name, *(bench.interval(auc(name, method)) for method in methods)] for name in names]
    gaps = []
    compared = (("AML, α = β = 1", "GMML, t = .5"), ("AML_t, the same t", "GMML, t tuned"))
    for first, second in compared:
        pairs = [np.subtract(auc(name, first), auc(name, second)).tolist() for name in names]
        cells = [bench.interval(pair, 4, sign=True) for pair in pairs]
        gaps.append([f"({first}) minus ({second})", *cells])
    return bench.page(f"""
        # Verification of pairs (Figure 4 of AML)

        `python benchmarks/aml_roc.py` measures AUC over pairs of five unseen classes; mean ±
        Student's 95 % interval over five choices of classes.

        {bench.markdown(["", *methods], body)}

        Differences, paired by choice of classes:

        {bench.markdown(["", *names], gaps)}
    """)


def draw(rows: list[dict[str, Any]]) -> None:
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    names = list(dict.fromkeys(row["set"] for row in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(8, 3.6), layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        for row in rows:
            if row["set"] == name and "curve" in row:
                axis.plot(*row["curve"], label=f"{row['method']} ({row['auc']:.3f})", lw=1)
        axis.set_title(f"{name}, unseen classes, first choice of them", fontsize=8)
        axis.set_xlabel("false positives", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=6)
    axes[0].set_ylabel("true positives", fontsize=8)
    bench.save_figure(figure, bench.DOCS / "aml_roc.png")


def main() -> None:
    options = bench.resume_arguments(__doc__).parse_args()
    bench.one_thread()
    warnings.simplefilter("ignore")
    kept = bench.Kept("aml_roc", options, ("set", "repeat"))
    data = {} if options.write else {name: (x, y) for name, x, y in sets()}
    jobs = ((name, repeat) for name in data for repeat in range(REPEATS))
    for name, repeat in kept.missing(jobs):
        for row in list(measure(name, *data[name], repeat)):
            kept.add(row)
    kept.finish(render(kept.rows))
    if not options.fresh:
        draw(kept.rows)


if __name__ == "__main__":
    main()
