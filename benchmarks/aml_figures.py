"""The figures of docs/aml.md from our own runs, after the paper's Figures 3 and 5.

    # less than a minute; writes docs/aml_two_classes.png and docs/aml_sensitivity.png
    python benchmarks/aml_figures.py

Two classes (Figure 3): 200 training and 200 test items of two normal distributions in 10
dimensions. The training classes are clean (means 4 apart), the test classes overlap (means 1.5
apart). The axes are the first two principal components, of the training items without a metric, and
of all items under each metric. The crosses are AML's adversarial pairs (Eq 9) of a few training
pairs.

Sensitivity (Figure 5): 5-nearest-neighbour error on the training part (each item left out) and on
the test part, means over five 80/20 splits of standardised features. α varies at β = 1, and β at α
= 1. The paper uses MNIST; this script uses scikit-learn's digits and two UCI sets, whose packages
`uci.py` names.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from bench import DOCS, arguments, error, one_thread, save_figure
from retrieval_aml import AML, GMML
from uci import load

Floats = NDArray[np.float64]
COLOURS = np.array(["#1f77b4", "#d6604d"])
GRID = 10.0 ** np.arange(-3, 3.5, 0.5)


def two_classes(path: Path) -> None:
    random = np.random.default_rng(3)
    y = np.arange(200) % 2
    direction = random.normal(size=10)
    direction /= np.linalg.norm(direction)
    spread = np.linalg.qr(random.normal(size=(10, 10)))[0] * random.uniform(0.4, 1.4, 10)

    def draw(apart: float) -> Floats:
        drawn: Floats = random.normal(size=(200, 10)) @ spread.T
        return drawn + np.outer((y - 0.5) * apart, direction)

    train, test = draw(4.0), draw(1.5)
    gmml, aml = GMML().fit(train, y), AML().fit(train, y)
    chosen = random.permutation(200)[:120].reshape(60, 2)
    pairs, similar = train[chosen], y[chosen[:, 0]] == y[chosen[:, 1]]
    points = aml.adversarial_pairs(pairs, similar)

    figure, axes = plt.subplots(2, 3, figsize=(9, 5.6), layout="constrained")
    plane = PCA(2).fit(train)

    def scatter(axis: Any, items: Floats, title: str) -> None:
        axis.scatter(*plane.transform(items).T, c=COLOURS[y], s=9, linewidths=0, alpha=0.8)
        axis.set_title(title, fontsize=9)

    scatter(axes[0, 0], train, "training items, adversarial pairs")
    scatter(axes[1, 0], test, "test items")
    crosses = plane.transform(points.reshape(-1, 10))
    axes[0, 0].scatter(*crosses.T, c=COLOURS[y[chosen.reshape(-1)]], marker="x", s=22, linewidths=1)
    for column, (name, learner) in enumerate((("GMML", gmml), ("AML", aml)), start=1):
        codes, test_codes = learner.transform(train), learner.transform(test)
        plane = PCA(2).fit(codes)
        wrong = error(codes, y, codes, y, own=True), error(codes, y, test_codes, y)
        for row, (items, part) in enumerate(((codes, "training"), (test_codes, "test"))):
            scatter(axes[row, column], items, f"{name}, {part}: 5-NN error {wrong[row]:.3f}")
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_aspect("equal", adjustable="datalim")
    save_figure(figure, path)


def sets() -> Iterator[tuple[str, Floats, Any]]:
    x, y = load_digits(return_X_y=True)
    yield "digits", x, y
    for name in ("vehicle", "segment"):
        yield name, *load(name)


def both_errors(learner: Any, train: Floats, labels: Any, test: Floats, truth: Any) -> list[float]:
    """Return a learner's errors on the training part (each item left out) and the test part."""
    codes = learner.fit(train, labels).transform(train)
    seen = error(codes, labels, codes, labels, own=True)
    return [seen, error(codes, labels, learner.transform(test), truth)]


def curves(x: Floats, y: Any) -> tuple[Floats, Floats]:
    """Return the errors of AML (α or β, value, part) and of GMML (part), means over five splits."""
    errors, plain = np.zeros((5, 2, len(GRID), 2)), np.zeros((5, 2))
    for split in range(5):
        train, test, labels, truth = train_test_split(x, y, test_size=0.2, random_state=split)
        scale = StandardScaler().fit(train)
        parts = (scale.transform(train), labels, scale.transform(test), truth)
        plain[split] = both_errors(GMML(), *parts)
        for i, value in enumerate(GRID):
            errors[split, 0, i] = both_errors(AML(value, 1.0), *parts)
            errors[split, 1, i] = both_errors(AML(1.0, value), *parts)
    return errors.mean(0), plain.mean(0)


def sensitivity(path: Path) -> None:
    figure, axes = plt.subplots(
        2, 3, figsize=(9, 5.2), layout="constrained", sharex=True, sharey="col"
    )
    for column, (name, x, y) in enumerate(sets()):
        errors, plain = curves(x, y)
        for row, letter in enumerate("αβ"):
            axis = axes[row, column]
            for part, title in enumerate(("training", "test")):
                line = {"c": COLOURS[part], "label": f"AML, {title}"}
                axis.plot(GRID, errors[row, :, part], "o-", ms=3, **line)
                axis.axhline(plain[part], ls=":", c=COLOURS[part], label=f"GMML, {title}")
            axis.set_xscale("log")
            axis.set_xlabel(f"{letter} ({'β' if letter == 'α' else 'α'} = 1)", fontsize=9)
            axis.tick_params(labelsize=8, labelbottom=True)
        axes[0, column].set_title(name, fontsize=10)
        axes[0, column].set_ylim(0, 1.2 * max(errors.max(), plain.max()))
        low, high = errors[..., 1].min(), errors[..., 1].max()
        print(f"{name}: test error of GMML {plain[1]:.4f}, of AML {low:.4f} to {high:.4f}")
    axes[0, 0].legend(fontsize=7)
    for axis in axes[:, 0]:
        axis.set_ylabel("5-NN error", fontsize=9)
    save_figure(figure, path)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, default=DOCS)
    folder = parser.parse_args().folder
    one_thread()
    plt.switch_backend("agg")
    warnings.simplefilter("ignore", ConvergenceWarning)
    two_classes(folder / "aml_two_classes.png")
    sensitivity(folder / "aml_sensitivity.png")


if __name__ == "__main__":
    main()
