"""`oahu.warm` against Euclid along the stream.

    OMP_NUM_THREADS=1 python benchmarks/oahu_warm.py
    OMP_NUM_THREADS=1 python benchmarks/oahu_warm.py --development     # the sets that choices were made on

16 sets × raw or standardised features × 3 seeds: 96 streams of 10,000 triplets (the paper's: 5,000
random ones, 5,000 that follow from them, shuffled). `warm_sets.py` names the sets, by a rule that
was fixed before anything was measured, and those that everything was developed on (`--development`,
one seed, keeps nothing). Half of a set's items give the triplets and are the references, the other
half are the queries. After 100 to 10,000 triplets: 5-nearest-neighbour accuracy, Recall@1, and
MAP@R of up to 500 queries, each less Euclid's.

Noise: of the queries that only one of both has right, c are the learner's and b Euclid's; the upper
end of Clopper and Pearson's one-sided 95 % interval of c / (b + c) makes an upper bound of the
gain. A stream is *below beyond noise* where that bound is under −.005 at some point.

Then Fashion-MNIST's pixels, by the splits of `oahu_table3.py`. Each stream's figures go to
results/raw/oahu_warm.jsonl as soon as they are measured, and a second run goes on from there. Some
ten minutes of one core.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from bench import Kept, markdown, resume_arguments
from retrieval_oahu import Warm
from retrieval_oahu.streams import paper_stream

Floats = NDArray[Any]
POINTS = (100, 300, 1000, 3000, 10_000)
SEEDS = (0, 1, 2)
SLACK = 0.005
K = 5
MAP_QUERIES = 500


def split(name: str, seed: int, standardized: bool) -> tuple[Floats, Floats, Floats, Floats]:
    """Return features and labels of the part that learns, and of the queries."""
    import warm_sets  # its packages are needed to measure, not to write the page

    x, y = warm_sets.items(name)
    order = np.random.default_rng(1000 + seed).permutation(len(x))
    own, asked = order[: len(x) // 2], order[len(x) // 2 :]
    if standardized:
        deviation = x[own].std(axis=0)
        x = (x - x[own].mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    return x[own], y[own], x[asked], y[asked]


def triplets(labels: Floats, seed: int) -> Floats:
    """Return the stream (T, 3), in a random order."""
    rows = np.array(list(paper_stream(labels, 5000, 5000, seed=seed)))
    return np.random.default_rng(seed).permutation(rows)


def judged(refs: Floats, own: Floats, asked: Floats, truth: Floats) -> dict[str, Floats]:
    """Return each query's correctness by 5 neighbours and by one, and average precision at R of the
    first queries.
    """
    hit, first, precision = [], [], []
    norms = (refs**2).sum(axis=1)
    for start in range(0, len(asked), 500):
        d = norms - 2 * asked[start : start + 500] @ refs.T
        wanted = truth[start : start + 500]
        near = np.argpartition(d, K, axis=1)[:, :K]
        near = np.take_along_axis(near, np.argsort(np.take_along_axis(d, near, 1), axis=1), 1)
        labels = own[near]
        counts = (labels[:, :, None] == labels[:, None]).sum(axis=2)
        hit.append(labels[np.arange(len(d)), counts.argmax(axis=1)] == wanted)
        first.append(labels[:, 0] == wanted)
        if start < MAP_QUERIES:
            precision.append(_average_precision(d, own, wanted))
    return {
        "k": np.concatenate(hit),
        "one": np.concatenate(first),
        "map": np.concatenate(precision),
    }


def _average_precision(d: Floats, own: Floats, wanted: Floats) -> Floats:
    relevant = np.bincount(own, minlength=int(wanted.max()) + 1)[wanted]
    most = max(int(relevant.max()), 1)
    near = np.argsort(d, axis=1, kind="stable")[:, :most]
    hits = own[near] == wanted[:, None]
    hits &= np.arange(most) < relevant[:, None]
    found: Floats = (hits * hits.cumsum(axis=1) / np.arange(1, most + 1)).sum(axis=1) / np.maximum(
        relevant, 1
    )
    return found


def along(
    learner: Any,
    x: Floats,
    y: Floats,
    asked: Floats,
    truth: Floats,
    stream: Floats,
    points: tuple[int, ...],
) -> Iterator[dict[str, Any]]:
    """Return what a learner that sees the stream gains on Euclid at each point."""
    learner.prepare(x)
    mean = x.mean(axis=0)
    euclid = judged(x - mean, y, asked - mean, truth)
    before, seconds = 0, 0.0
    for point in points:
        started = time.process_time()
        learner.learn_from(x[stream[start : start + 256]] for start in range(before, point, 256))
        seconds += time.process_time() - started
        before = point
        now = (
            judged(learner.transform(x), y, learner.transform(asked), truth)
            if learner.left_
            else euclid
        )
        yield {
            "triplets": point,
            "left": bool(learner.left_),
            "served": int(learner.alpha_.argmax()),
            "queries": len(truth),
            "euclid": float(euclid["k"].mean()),
            "gain": float(now["k"].mean() - euclid["k"].mean()),
            "won": int((now["k"] & ~euclid["k"]).sum()),
            "lost": int((euclid["k"] & ~now["k"]).sum()),
            "recall_at_1": float(now["one"].mean() - euclid["one"].mean()),
            "map_at_r": float(now["map"].mean() - euclid["map"].mean()),
            "seconds": seconds,
        }


def upper(row: dict[str, Any]) -> float:
    """Return the upper bound of a gain, noise of the queries taken into account."""
    won, lost = row["won"], row["lost"]
    share = float(beta.ppf(0.95, won + 1, lost)) if lost else 1.0
    return (won + lost) / row["queries"] * (2 * share - 1)


def jobs(development: bool) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Return each stream's name and what measures it."""
    import warm_sets

    for seed in SEEDS[:1] if development else SEEDS:
        for name in warm_sets.DEVELOPMENT if development else warm_sets.EVALUATION:
            for standardized in (False, True):
                yield (name, standardized, seed), _set
    if not development:
        for repeat in SEEDS:
            yield ("fashion", False, repeat), _fashion


def _set(name: str, standardized: bool, seed: int) -> list[dict[str, Any]]:
    x, y, asked, truth = split(name, seed, standardized)
    return list(along(Warm(seed=seed), x, y, asked, truth, triplets(y, seed), POINTS))


def _fashion(name: str, standardized: bool, seed: int) -> list[dict[str, Any]]:
    import oahu_table3

    x, y = oahu_table3.fashion()
    dev, queries = oahu_table3.split(seed)
    stream = np.random.default_rng(seed).permutation(oahu_table3.triplet_rows(y[dev], seed))
    parts = (x[dev], y[dev], x[queries], y[queries])
    return list(along(Warm(seed=seed), *parts, stream, (10_000,)))


def main() -> None:
    """Measure what is missing and write the page."""
    parser = resume_arguments(__doc__)
    parser.add_argument(
        "--development",
        action="store_true",
        help="the sets that choices were made on; keeps nothing",
    )
    parser.add_argument("--sets", nargs="*", help="only these")
    options = parser.parse_args()
    kept = Kept("oahu_warm", options.fresh or options.development)
    done = {tuple(row["stream"]) for row in kept.rows}
    machine = f"numpy {np.__version__}, {platform.machine()}, one core, shared with other work."
    for stream, measure in jobs(options.development):
        if stream not in done and stream[0] in (options.sets or [stream[0]]):
            for row in measure(*stream):
                kept.add({"stream": stream, "machine": machine} | row)
    kept.finish(render(kept.rows))


def render(rows: list[dict[str, Any]]) -> str:
    """Return the page."""
    lines = [
        "# `oahu.warm` along its stream",
        "",
        (
            "Gain on Euclid of 5-nearest-neighbour accuracy, Recall@1 and MAP@R on queries that"
            " gave no triplet. `python benchmarks/oahu_warm.py` says how, and what"
        ),
        (
            "*below beyond noise* means; `benchmarks/warm_sets.py` names the sets, by a rule that"
            " was fixed first."
        ),
        "",
    ]
    sets = [row for row in rows if row["stream"][0] != "fashion"]
    if sets:
        lines += [*_counts(sets), *_means(sets), *_each(sets)]
    if len(sets) < len(rows):
        lines += _of_fashion([row for row in rows if row["stream"][0] == "fashion"])
    lines += sorted({row["machine"] for row in rows})
    return "\n".join(lines) + "\n"


def _counts(rows: list[dict[str, Any]]) -> list[str]:
    head = [
        "streams",
        "number",
        "anywhere below −.005",
        "beyond noise",
        "Recall@1 anywhere below −.005",
        "MAP@R so",
        "lowest gain",
        "ever left Euclid",
    ]
    lines = []
    for title, some in (
        ("all", rows),
        ("1,000 queries or more", [r for r in rows if r["queries"] >= 1000]),
    ):
        streams: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in some:
            streams.setdefault(tuple(row["stream"]), []).append(row)
        own = list(streams.values())
        below = [
            str(sum(any(row[key] < -SLACK for row in stream) for stream in own))
            for key in ("gain", "recall_at_1", "map_at_r")
        ]
        beyond = sum(any(upper(row) < -SLACK for row in stream) for stream in own)
        lowest = min((row["gain"] for row in some), default=0.0)
        left = sum(any(row["left"] for row in stream) for stream in own)
        lines.append(
            [
                title,
                str(len(own)),
                below[0],
                f"**{beyond}**",
                *below[1:],
                f"{lowest:+.4f}",
                str(left),
            ]
        )
    return [markdown(head, lines), ""]


def _means(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for point in (*POINTS, None):
        some = [row for row in rows if point in (None, row["triplets"])]
        cells = [
            f"{np.mean([row[key] for row in some]):+.4f}"
            for key in ("gain", "recall_at_1", "map_at_r")
        ]
        lines.append([f"{point:,}" if point else "all five", *cells])
    head = ["triplets", "accuracy", "Recall@1", "MAP@R"]
    return ["Mean gains over all streams:", "", markdown(head, lines), ""]


def _each(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for name, standardized in dict.fromkeys((row["stream"][0], row["stream"][1]) for row in rows):
        own = [row for row in rows if row["stream"][:2] == [name, standardized]]
        last = [row for row in own if row["triplets"] == POINTS[-1]]
        cells = [np.mean([row["gain"] for row in last]), min(row["gain"] for row in own)]
        cells += [np.mean([row[key] for row in last]) for key in ("recall_at_1", "map_at_r")]
        euclid = np.mean([row["euclid"] for row in own])
        lines.append(
            [
                name,
                "standardised" if standardized else "raw",
                f"{own[0]['queries']:,}",
                f"{euclid:.3f}",
            ]
            + [f"{cell:+.4f}" for cell in cells]
        )
    head = ["set", "features", "queries", "Euclid", "gain", "lowest", "Recall@1", "MAP@R"]
    said = "Each set: mean gain after 10,000 triplets and the lowest of all points, over the seeds."
    return [said, "", markdown(head, lines), ""]


def _of_fashion(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for point in dict.fromkeys(row["triplets"] for row in rows):
        own = [row for row in rows if row["triplets"] == point]
        shown = [
            ", ".join(f"{row[key]:+.4f}" for row in own)
            for key in ("gain", "recall_at_1", "map_at_r")
        ]
        lines.append([f"{point:,}", *shown, f"{np.mean([r['seconds'] for r in own]):.1f}"])
    head = ["triplets", "gain of accuracy", "Recall@1", "MAP@R", "seconds"]
    said = (
        "Fashion-MNIST's pixels, 35,000 references, 4,000 queries; each repeat, and CPU seconds to"
        " learn the 10,000 triplets after `prepare`:"
    )
    return [said, "", markdown(head, lines), ""]


if __name__ == "__main__":
    main()
