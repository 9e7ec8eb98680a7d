"""Time and memory of the losses and miners that `pml` computes itself, beside
pytorch-metric-learning's.

    # in 15 minutes, measures all cases that are not yet measured at this commit; writes the page
    python benchmarks/pml_losses.py
    # measures again; nothing is kept
    python benchmarks/pml_losses.py --fresh --only triplet_margin

All other losses and miners of `pml` are pytorch-metric-learning's classes, and equally fast. A call
of a loss is a forward and a backward pass; a call of a miner is one pass. Both sides, and the
matrix product that a loss needs, take turns in one process with one thread. Times are medians over
the rounds of the CPU time, and the ratio is the median of the rounds' ratios. Memory is the rise of
the process's peak during a first call, for each side in a new process, which may take 3 GB and half
a minute. A side that needs more is reported without times. A batch has 8 items a class: the class's
random vector, plus noise of one and a half times its size. Losses of classes have 1,000 of
them. Cases are kept in raw/pml_losses.json.
"""

from __future__ import annotations

import json
import math
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import bench

BYTES, SECONDS = 3 << 30, 30
WIDTH, EACH, CLASSES = 128, 8, 1000
SIZES = (256, 1024, 4096)
CALLS = 4096
"""Number of items, in calls one after the other, between two readings of the clock."""
READING, BUDGET, ROUNDS = 0.5, 8, 25
"""Most seconds of the calls between two readings and of all rounds of a case; most rounds."""
KINDS = {"losses": "", "miners": " (miner)", "recipe": " (loss + miner)"}
LOSSES = """
triplet_margin contrastive margin threshold_consistent_margin multi_similarity circle sup_con
nt_xent tuplet_margin lifted_structure generalized_lifted_structure n_pairs nca instance histogram
smooth_ap pnp proxy_anchor proxy_nca arc_face cos_face sub_center_arc_face manifold
"""
MOST_USED = """
triplet_margin contrastive multi_similarity circle nt_xent sup_con proxy_anchor arc_face
sub_center_arc_face margin lifted_structure n_pairs
"""
OF_CLASSES = ["proxy_anchor", "proxy_nca", "arc_face", "cos_face", "sub_center_arc_face"]
CASES = [
    *(("losses", name) for name in LOSSES.split()),
    *(("miners", name) for name in ("multi_similarity", "triplet_margin", "angular")),
    *(("recipe", name) for name in ("multi_similarity", "triplet_margin")),
]
"""Kind and name. A recipe is a loss with the miner of the same name."""


def part(kind: str, name: str, ours: bool) -> Any:
    """Return a loss or miner of the plugin, or upstream's class with the same parameters."""
    import pytorch_metric_learning as upstream
    import torch

    import retrieval_pml

    torch.manual_seed(0)
    factory = getattr(retrieval_pml, f"retrieval_{kind}")()[name]
    sizes = {}
    if name in (*OF_CLASSES, "manifold"):
        sizes = {"classes": CLASSES, "embedding_size": WIDTH}
    product = factory(**sizes)
    if ours:
        return product
    cls = getattr(getattr(upstream, kind), type(product).__name__)
    if name in OF_CLASSES:
        loss = cls(num_classes=CLASSES, embedding_size=WIDTH)
        loss.load_state_dict(product.state_dict())
        return loss
    if name != "manifold":
        return cls()
    loss = upstream.losses.ManifoldLoss(l=WIDTH)
    loss.meta_classes = product.meta_classes
    return loss


def call(kind: str, name: str, ours: bool) -> Callable[[Any, Any], Any]:
    """Return a function of embeddings and labels that returns a loss or a miner's indices."""
    if kind == "recipe":
        loss, miner = part("losses", name, ours), part("miners", name, ours)
        return lambda x, y: loss(x, y, miner(x, y))
    product = part(kind, name, ours)
    if name == "manifold" and not ours:
        return lambda x, y: product(x, indices_tuple=product.meta_classes[y])
    return lambda x, y: product(x, y)


class Side:
    """One side of a case, ready for calls."""

    def __init__(self, kind: str, name: str, ours: bool, items: int) -> None:
        import torch

        self.run, self.kind = call(kind, name, ours), kind
        torch.manual_seed(0)
        self.labels = torch.arange(items) // EACH
        centres = torch.randn(items // EACH, WIDTH)
        self.x = centres[self.labels] + 1.5 * torch.randn(items, WIDTH)
        self.x.requires_grad_()
        self.once(64)  # set up once, before the measured calls

    def once(self, rows: int | None = None) -> float | None:
        """Make one call; return the loss."""
        self.x.grad = None
        value = self.run(self.x[:rows], self.labels[:rows])
        if self.kind == "miners":
            return None
        value.backward()
        return float(value.detach())

    def seconds(self, calls: int) -> float:
        """Return the CPU seconds of a call, the mean of several: reading the clock takes long."""
        start = time.process_time()
        for _ in range(calls):
            self.once()
        return (time.process_time() - start) / calls


class Product:
    """The matrix product that a loss needs, with its backward pass."""

    def __init__(self, name: str, items: int) -> None:
        import torch

        rows = items
        columns = items
        if name in OF_CLASSES:
            columns = CLASSES
        if name == "sub_center_arc_face":
            columns = 3 * CLASSES
        if name == "n_pairs":  # one pair a class
            rows = columns = items // EACH
        self.x = torch.randn(rows, WIDTH, requires_grad=True)
        self.y = torch.randn(columns, WIDTH, requires_grad=True)
        self.slopes = torch.rand(rows, columns)
        self.seconds(1)  # set up once, before the measured calls

    def seconds(self, calls: int) -> float:
        """Return the CPU seconds of a call."""
        start = time.process_time()
        for _ in range(calls):
            self.x.grad = self.y.grad = None
            (self.x @ self.y.T).backward(self.slopes)
        return (time.process_time() - start) / calls


def peak_of(kind: str, name: str, ours: bool, items: int) -> dict[str, Any]:
    """Return memory in MB, CPU seconds and the loss of a first call, or why it failed."""
    size = bench.status("VmSize") + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    try:
        side = Side(kind, name, ours, items)
        before = bench.status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        start = time.process_time()
        value = side.once()
        seconds = time.process_time() - start
    except Exception as error:
        first = (str(error).splitlines() or ["no message"])[0]
        short = "memory" in first or "bad_alloc" in first or isinstance(error, MemoryError)
        return {"failed": "more than 3 GB" if short else f"fails: {first}"}
    return {
        "megabytes": (bench.status("VmHWM") - before) / 2**20,
        "seconds": seconds,
        "value": value,
    }


def seconds_of(
    kind: str, name: str, sides: list[str], items: int, slow: float
) -> dict[str, list[float]]:
    """Return the CPU seconds of each side and of the matrix product in each round."""
    contestants: dict[str, Any] = {side: Side(kind, name, side == "ours", items) for side in sides}
    if kind == "losses":
        contestants["product"] = Product(name, items)
    calls = max(1, min(CALLS // items, int(READING / slow)))
    rounds = max(1, min(ROUNDS, int(BUDGET / (calls * slow))))
    times: dict[str, list[float]] = {side: [] for side in contestants}
    for _ in range(rounds):
        for side, contestant in contestants.items():
            times[side].append(contestant.seconds(calls))
    return times


def measure(kind: str, name: str, items: int) -> dict[str, Any]:
    """Return the row of a case."""
    kept: dict[str, Any] = {"kind": kind, "name": name, "items": items, "load": bench.load()}
    kept["commit"] = bench.commit()
    for side in ("theirs", "ours"):
        try:
            values = (kind, name, side == "ours", items)
            kept[side] = bench.alone(peak_of, *values, cpu=SECONDS, new=False)
        except TimeoutError:
            kept[side] = {"failed": "more than half a minute"}
    run = [side for side in ("theirs", "ours") if "failed" not in kept[side]]
    if run:
        slow = sum(kept[side]["seconds"] for side in run)
        times = bench.alone(seconds_of, kind, name, run, items, slow, new=False)
        for side in run:
            kept[side]["seconds"] = median(times[side])
        if "product" in times:
            kept["product"] = median(times["product"])
        if len(run) == 2:
            both = zip(times["theirs"], times["ours"], strict=True)
            kept["ratio"] = median(theirs / ours for theirs, ours in both)
    return kept


def render(raw: dict[str, Any]) -> str:
    about = raw["machine"]
    kept = [
        row
        for kind, name in CASES
        for row in sorted(
            bench.chosen(raw["cases"], kind=kind, name=name), key=lambda row: row["items"]
        )
    ]
    loads = sorted(row["load"] for row in kept)
    failures = sum("failed" in row["theirs"] for row in kept)
    compared = [row for row in kept if "ratio" in row]
    lines = [
        [
            _title(row),
            f"{row['items']:,}",
            *_shown(row["theirs"]),
            *_shown(row["ours"]),
            _times(row["ratio"]) if "ratio" in row else "–",
            *_product(row),
        ]
        for row in kept
    ]
    head = ["loss or miner", "batch", "pytorch-metric-learning: ms", "MB", "ours: ms", "MB"]
    head += ["times faster", "matrix product: ms", "at most times faster"]
    growth = ["loss or miner", *(f"{side}, {step}" for side in SIDES.values() for step in STEPS)]
    used = [row for row in compared if row["name"] in MOST_USED.split()]
    return bench.page(f"""
        # Losses and miners of `pml` beside pytorch-metric-learning's own

        `python benchmarks/pml_losses.py`: CPU time and peak memory of a loss's forward and
        backward pass, or a miner's call, on one thread; both sides take turns, and times and ratios
        are medians. {EACH} items a class, {WIDTH} dimensions; losses of classes have {CLASSES:,}
        classes. All other losses and miners of `pml` are pytorch-metric-learning's classes, and
        equally fast. The matrix product is the bare `x @ y.T` of the loss's size with its backward
        pass; a loss that did nothing else would be so many times faster as the last column says.

        {about["cpu"]}; {about["versions"]}. Load average {loads[0]} to {loads[-1]}. Measured at
        commit {", ".join(dict.fromkeys(row["commit"] for row in kept))}.

        - pytorch-metric-learning does not finish within 3 GB and half a minute in {failures} of
        {len(kept)} cases.
        - Slower than pytorch-metric-learning: {_named(compared, lambda row: row["ratio"] < 1)}.
        - Less than twice as fast, of the twelve most used:
        {_named(used, lambda row: row["ratio"] < 2)}.
        - More memory: {_named(compared, _takes_more, _megabytes)}.
        - Other values, as their descriptions explain: {_named(compared, _apart, _size)}.
        pytorch-metric-learning's `instance` compares an item with one item of the batch, not with
        all items of its label, so it does less work.

        {bench.markdown(head, lines)}

        Time grows with the batch to this power, from 256 to 1,024 and from 1,024 to 4,096 items:

        {bench.markdown(growth, list(_growth(kept)))}
    """)


SIDES = {"theirs": "pytorch-metric-learning", "ours": "ours"}
STEPS = ("to 1,024", "to 4,096")
Row = dict[str, Any]


def _title(row: Row) -> str:
    return f"`{row['name']}`{KINDS[row['kind']]}"


def _size(row: Row) -> str:
    return f"{row['items']:,}"


def _named(
    rows: list[Row],
    condition: Callable[[Row], bool],
    figure: Callable[[Row], str] = lambda row: f"{row['items']:,}: {_times(row['ratio'])} ×",
) -> str:
    """Return the losses or miners with a condition, with a figure for each batch."""
    by_title: dict[str, list[str]] = {}
    for row in filter(condition, rows):
        by_title.setdefault(_title(row), []).append(figure(row))
    return "; ".join(f"{title} ({', '.join(all_)})" for title, all_ in by_title.items()) or "none"


def _takes_more(row: Row) -> bool:
    theirs, ours = (row[side]["megabytes"] for side in SIDES)
    return bool(round(ours) > round(theirs))


def _megabytes(row: Row) -> str:
    theirs, ours = (row[side]["megabytes"] for side in SIDES)
    return f"{row['items']:,}: {ours:,.0f} MB, not {theirs:,.0f}"


def _apart(row: Row) -> bool:
    values = [row[side].get("value") for side in SIDES]
    return None not in values and abs(values[0] - values[1]) > 1e-3 * max(map(abs, values))


def _times(ratio: float) -> str:
    return f"{ratio:,.2f}" if ratio < 10 else f"{ratio:,.0f}"


def _product(row: Row) -> list[str]:
    if "product" not in row or "failed" in row["theirs"]:
        return ["–", "–"]
    return [f"{1000 * row['product']:,.2f}", _times(row["theirs"]["seconds"] / row["product"])]


def _shown(figures: Row) -> list[str]:
    if "failed" in figures:
        return [figures["failed"][:60].replace("|", "/"), "–"]
    return [f"{1000 * figures['seconds']:,.2f}", f"{figures['megabytes']:,.0f}"]


def _growth(kept: list[Row]) -> Iterator[list[str]]:
    for kind, name in CASES:
        rows = {row["items"]: row for row in bench.chosen(kept, kind=kind, name=name)}
        powers = []
        for side in SIDES:
            seconds = [rows.get(size, {}).get(side, {}).get("seconds") for size in SIZES]
            for small, large in pairwise(seconds):
                known = small is not None and large is not None
                powers.append(f"{math.log(large / small, 4):.2f}" if known else "–")
        yield [_title({"kind": kind, "name": name}), *powers]


def main() -> None:
    parser = bench.resume_arguments(__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="losses, miners or recipes by name"
    )
    options = parser.parse_args()
    bench.one_thread()
    # imported before processes are forked
    import pytorch_metric_learning.losses
    import pytorch_metric_learning.miners  # noqa: F401
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    file = bench.RAW / "pml_losses.json"
    raw: dict[str, Any] = {"cases": []}
    if not options.fresh and file.exists():
        raw = json.loads(file.read_text(encoding="utf-8"))
    done = {
        (row["kind"], row["name"], row["items"])
        for row in raw["cases"]
        if row["commit"] == bench.commit()
    }
    for kind, name, items in ((*case, items) for case in CASES for items in SIZES):
        skipped = options.write or (options.only and name not in options.only)
        if skipped or (kind, name, items) in done:
            continue
        older = bench.chosen(raw["cases"], kind=kind, name=name, items=items)
        raw["cases"] = [row for row in raw["cases"] if row not in older]
        raw["cases"].append(measure(kind, name, items))
        print(json.dumps(raw["cases"][-1]), flush=True)
        packages = bench.versions("torch", "pytorch-metric-learning")
        raw |= {"machine": {"cpu": bench.machine(), "versions": packages}}
        if not options.fresh:
            bench.finish("pml_losses", raw, render(raw), measured=False)
    bench.finish("pml_losses", raw, render(raw), keep=not options.fresh, measured=False)


if __name__ == "__main__":
    main()
