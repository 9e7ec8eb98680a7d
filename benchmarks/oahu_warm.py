"""`oahu.warm` against Euclid along the stream.

    OMP_NUM_THREADS=1 python benchmarks/oahu_warm.py

There are 16 sets × 20 seeds; features are raw for even seeds and standardised for odd ones.
`uci.py` names the sets, by a rule that was fixed before any measurement. Half of a set's items give
the triplets and are the references; the other half are the queries. There are two kinds of stream,
each in its own order:

- *random*: `from_labels(labels)`;
- *closure*: `with_closure(from_labels(labels))`, where each random triplet is followed by one that
  follows from the stream so far.

After 100 to 10,000 triplets, the script measures 5-nearest-neighbour accuracy, Recall@1, and MAP@R
of up to 500 queries, and subtracts Euclid's. With *shuffled labels* there is nothing to learn, and
the script counts the streams of 1,000 triplets that leave Euclid after any block.

Noise: among the queries that only one of the two gets right, c are the learner's and b are
Euclid's. The upper end of Clopper and Pearson's one-sided 95 % interval of c / (b + c) gives an
upper bound of the gain. A stream is *below beyond noise* if that bound is below −.005 at some
point.

Then follow Fashion-MNIST's pixels, with the splits of `oahu_table3.py` and its stream in a random
order. Each stream's metrics are kept at once in results/raw/oahu_warm.jsonl, so an interrupted run
resumes. Everything takes about an hour of one core.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

import oahu_table3
import uci
from bench import Kept, markdown, nearest, one_thread, page, resume_arguments
from retrieval_oahu import Warm, from_labels, with_closure

Floats = NDArray[Any]
Row = dict[str, Any]
POINTS = (100, 300, 1000, 3000, 10_000)
SHUFFLED_TRIPLETS = 1000
SEEDS = 20
KINDS, METRICS = ("random", "closure"), ("gain", "recall_at_1", "map_at_r")
FASHION_REPEATS, SLACK, K, MAP_QUERIES = 3, 0.005, 5, 500


def split(name: str, seed: int, standardized: bool) -> tuple[Floats, Floats, Floats, Floats]:
    """Return features and labels of the learning part and of the queries."""
    x, y = uci.items(name)
    order = np.random.default_rng(1000 + seed).permutation(len(x))
    refs, queries = order[: len(x) // 2], order[len(x) // 2 :]
    if standardized:
        deviation = x[refs].std(axis=0)
        x = (x - x[refs].mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    return x[refs], y[refs], x[queries], y[queries]


def triplets(kind: str, labels: Floats, seed: int, count: int) -> Floats:
    """Return the first triplets (count, 3) of a stream."""
    stream: Iterator[Any] = from_labels(labels, seed=seed)
    if kind == "closure":
        stream = with_closure(stream, seed=seed)
    return np.array(list(islice(stream, count)))


def score(refs: Floats, labels: Floats, queries: Floats, truth: Floats) -> dict[str, Floats]:
    """Return which queries are right by five neighbours and by one, and MAP@R of some queries."""
    near = labels[nearest(queries, refs, K)]
    judged = truth[:MAP_QUERIES]
    relevant = np.bincount(labels, minlength=int(truth.max()) + 1)[judged]
    most = max(int(relevant.max()), 1)
    distances = (refs**2).sum(axis=1) - 2 * queries[:MAP_QUERIES] @ refs.T
    hits = labels[np.argsort(distances, axis=1, kind="stable")[:, :most]] == judged[:, None]
    hits &= np.arange(most) < relevant[:, None]
    sums: Floats = (hits * hits.cumsum(axis=1) / np.arange(1, most + 1)).sum(axis=1)
    right = {"k": oahu_table3.vote(near) == truth, "one": near[:, 0] == truth}
    return right | {"map": sums / np.maximum(relevant, 1)}


Parts = tuple[Floats, Floats, Floats, Floats]
"""Features and labels of the learning part and of the queries."""


def along(learner: Any, parts: Parts, stream: Floats, points: tuple[int, ...]) -> Iterator[Row]:
    """Yield a learner's gain on Euclid at each point of the stream."""
    x, y, queries, truth = parts
    learner.prepare(x)
    mean = x.mean(axis=0)
    euclid = score(x - mean, y, queries - mean, truth)
    before, seconds = 0, 0.0
    for point in points:
        started = time.process_time()
        learner.learn_from(x[stream[start : start + 256]] for start in range(before, point, 256))
        seconds += time.process_time() - started
        before = point
        learned = euclid
        if learner.left_:
            learned = score(learner.transform(x), y, learner.transform(queries), truth)
        yield {
            "triplets": point,
            "left": bool(learner.left_),
            "served": int(learner.alpha_.argmax()),
            "queries": len(truth),
            "euclid": float(euclid["k"].mean()),
            "gain": float(learned["k"].mean() - euclid["k"].mean()),
            "won": int((learned["k"] & ~euclid["k"]).sum()),
            "lost": int((euclid["k"] & ~learned["k"]).sum()),
            "recall_at_1": float(learned["one"].mean() - euclid["one"].mean()),
            "map_at_r": float(learned["map"].mean() - euclid["map"].mean()),
            "seconds": seconds,
        }


def upper(row: Row) -> float:
    """Return the upper bound of a gain, which allows for the noise of the queries."""
    won, lost = row["won"], row["lost"]
    share = float(beta.ppf(0.95, won + 1, lost)) if lost else 1.0
    return (won + lost) / row["queries"] * (2 * share - 1)


def measured(name: str, kind: str, seed: int) -> list[Row]:
    if kind.startswith("shuffled"):
        return _shuffled(name, kind, seed)
    if name == "fashion":
        x, y = oahu_table3.fashion()
        dev, queries = oahu_table3.split(seed)
        stream = np.random.default_rng(seed).permutation(oahu_table3.triplet_rows(y[dev], seed))
        parts = (x[dev], y[dev], x[queries], y[queries])
        return list(along(Warm(seed=seed), parts, stream, POINTS[-1:]))
    parts = split(name, seed, bool(seed % 2))
    stream = triplets(kind, parts[1], seed, POINTS[-1])
    return list(along(Warm(seed=seed), parts, stream, POINTS))


def jobs() -> Iterator[tuple[str, str, int]]:
    """Yield set, kind ("shuffled random" with shuffled labels) and seed of each stream, the most
    important first.
    """
    for repeat in range(FASHION_REPEATS):
        yield "fashion", "random", repeat
    seeds = range(SEEDS)
    for part, prefix in ((seeds[:6], ""), (seeds, "shuffled "), (seeds[6:], "")):
        for seed, kind, name in itertools.product(part, KINDS, uci.EVALUATION):
            yield name, prefix + kind, seed


def _shuffled(name: str, kind: str, seed: int) -> list[Row]:
    x, y, _, _ = split(name, seed, bool(seed % 2))
    y = np.random.default_rng(seed).permutation(y)
    stream = triplets(kind.removeprefix("shuffled "), y, seed, SHUFFLED_TRIPLETS)
    learner = Warm(seed=seed).prepare(x)
    learner.learn_from(x[stream[start : start + 256]] for start in range(0, len(stream), 256))
    away = learner.weights_at_[learner.weights_[:, 0] < 1]
    return [{"left_after": int(away[0]) if len(away) else None}]


def main() -> None:
    parser = resume_arguments(__doc__)
    parser.add_argument("--sets", nargs="*", help="only these")
    options = parser.parse_args()
    one_thread()
    kept = Kept("oahu_warm", options, ("stream",))
    machine = f"numpy {np.__version__}, {platform.machine()}, one core, shared with other work."
    for (stream,) in kept.missing((s,) for s in jobs() if s[0] in (options.sets or [s[0]])):
        for row in measured(*stream):
            kept.add({"stream": stream, "machine": machine} | row)
    kept.finish(render(kept.rows))


def render(rows: list[Row]) -> str:
    real = [row for row in rows if row["stream"][0] != "fashion" and "left_after" not in row]
    shuffled = [row for row in rows if "left_after" in row]
    fashion = [row for row in rows if row["stream"][0] == "fashion"]
    parts = [_counts(real)] if real else []
    parts += [_alarms(shuffled)] if shuffled else []
    parts += [_means(real), _sets(real)] if real else []
    parts += [_pixels(fashion)] if fashion else []
    tables = "\n\n".join(parts)
    return page(f"""
        # `oahu.warm` along its stream

        Gain on Euclid in 5-nearest-neighbour accuracy, Recall@1 and MAP@R on queries that are in no
        triplet. `python benchmarks/oahu_warm.py` states the protocol and defines *below beyond
        noise*; `benchmarks/uci.py` names the sets, by a rule that was fixed first.

        {tables}

        {" ".join(sorted({row["machine"] for row in rows}))}
    """)


def _counts(rows: list[Row]) -> str:
    head = ["streams", "number", "anywhere below −.005", "beyond noise"]
    head += ["Recall@1 anywhere below −.005", "MAP@R so", "lowest gain", "ever left Euclid"]
    lines = []
    for kind in KINDS:
        streams: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            if row["stream"][1] == kind:
                streams.setdefault(tuple(row["stream"]), []).append(row)

        def count(condition: Callable[[Row], bool], streams: Any = streams) -> str:
            return str(sum(any(map(condition, stream)) for stream in streams.values()))

        gain, *below = (count(lambda row, key=key: row[key] < -SLACK) for key in METRICS)
        beyond, left = count(lambda row: upper(row) < -SLACK), count(lambda row: row["left"])
        lowest = min((row["gain"] for stream in streams.values() for row in stream), default=0.0)
        cells = [str(len(streams)), gain, f"**{beyond}**", *below, f"{lowest:+.4f}", left]
        lines.append([kind, *cells])
    return markdown(head, lines)


def _alarms(rows: list[Row]) -> str:
    lines = []
    for kind in KINDS:
        streams = [row for row in rows if row["stream"][1] == f"shuffled {kind}"]
        names = [row["stream"][0] for row in streams]
        away = [row["stream"][0] for row in streams if row["left_after"] is not None]
        worst = max(sorted(set(away)), key=away.count, default="")
        most = f"{worst}, {away.count(worst)} of {names.count(worst)}" if away else "none"
        share = f"{100 * len(away) / max(len(streams), 1):.1f} %"
        lines.append([kind, str(len(streams)), str(len(away)), share, most])
    head = ["shuffled labels", "number", "ever left Euclid", "share", "most on one set"]
    title = f"Shuffled labels, {SHUFFLED_TRIPLETS:,} triplets; `doubt` is 5 %:"
    return f"{title}\n\n{markdown(head, lines)}"


def _means(rows: list[Row]) -> str:
    lines = []
    for point in (*POINTS, None):
        reached = [row for row in rows if point in (None, row["triplets"])]
        cells = [
            np.mean([row[key] for row in reached if row["stream"][1] == kind])
            for kind in KINDS
            for key in METRICS
        ]
        lines.append([f"{point:,}" if point else "all five", *(f"{cell:+.4f}" for cell in cells)])
    head = ["triplets", *(f"{k}: {m}" for k in KINDS for m in ("accuracy", "Recall@1", "MAP@R"))]
    return f"Mean gains over all streams:\n\n{markdown(head, lines)}"


def _sets(rows: list[Row]) -> str:
    parts: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        name, kind, seed = row["stream"]
        parts.setdefault((name, kind, seed % 2), []).append(row)
    lines = []
    for (name, kind, odd), part in sorted(parts.items()):
        if last := [row for row in part if row["triplets"] == POINTS[-1]]:
            cells = [np.mean([row[key] for row in last]) for key in METRICS]
            cells.insert(1, min(row["gain"] for row in part))
            about = [name, kind, "standardised" if odd else "raw", f"{part[0]['queries']:,}"]
            about.append(f"{np.mean([row['euclid'] for row in part]):.3f}")
            lines.append([*about, *(f"{cell:+.4f}" for cell in cells)])
    head = ["set", "stream", "features", "queries", "Euclid", "gain", "lowest", "Recall@1", "MAP@R"]
    title = "Each set: mean gain after 10,000 triplets and the lowest of all points, over the seeds"
    return f"{title}.\n\n{markdown(head, lines)}"


def _pixels(rows: list[Row]) -> str:
    cells = [", ".join(f"{row[key]:+.4f}" for row in rows) for key in METRICS]
    line = [f"{POINTS[-1]:,}", *cells, f"{np.mean([row['seconds'] for row in rows]):.1f}"]
    head = ["triplets", "gain of accuracy", "Recall@1", "MAP@R", "seconds"]
    return f"""
        Fashion-MNIST's pixels, 35,000 references, 4,000 queries; each repeat, and CPU seconds to
        learn the 10,000 triplets after `prepare`:

        {markdown(head, [line])}
    """


if __name__ == "__main__":
    main()
