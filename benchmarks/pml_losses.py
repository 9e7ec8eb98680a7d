"""Time and memory of the losses and miners that `pml` computes itself, beside
pytorch-metric-learning's.

    python benchmarks/pml_losses.py    # measures missing cases, then writes the page
    # measures again; nothing is kept
    python benchmarks/pml_losses.py --fresh --only triplet_margin

All other losses and miners of `pml` are pytorch-metric-learning's classes, and equally fast. A call
of a loss is a forward and a backward pass; a call of a miner is one pass. Both sides take turns in
one process with one thread, and the median CPU time of the rounds is kept. Memory is the rise of
the process's peak during a first call, for each side in a new process, which may take 3 GB and a
minute. A side that needs more is reported without times. A batch has 8 items a class: the class's
random vector, plus noise of one and a half times its size. Losses of classes have 1,000 of
them. Cases are kept in raw/pml_losses.json.
"""

from __future__ import annotations

import json
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import bench

BYTES, SECONDS = 3 << 30, 60
WIDTH, EACH, CLASSES = 128, 8, 1000
SIZES = (256, 1024, 4096)
CALLS = 4096
"""Number of items, in calls one after the other, between two readings of the clock."""
KINDS = {"losses": "", "miners": " (miner)", "recipe": " (loss + miner)"}
LOSSES = """
triplet_margin contrastive margin threshold_consistent_margin multi_similarity circle sup_con
nt_xent tuplet_margin lifted_structure generalized_lifted_structure n_pairs nca instance histogram
smooth_ap pnp proxy_anchor proxy_nca arc_face cos_face sub_center_arc_face manifold
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
        short = "memory" in first or isinstance(error, MemoryError)
        return {"failed": "more than 3 GB" if short else f"fails: {first}"}
    return {
        "megabytes": (bench.status("VmHWM") - before) / 2**20,
        "seconds": seconds,
        "value": value,
    }


def seconds_of(kind: str, name: str, sides: list[bool], items: int, rounds: int) -> list[float]:
    """Return the median CPU seconds of each side; the sides take turns."""
    contestants = [Side(kind, name, ours, items) for ours in sides]
    calls = max(1, CALLS // items)
    times = [[side.seconds(calls) for side in contestants] for _ in range(rounds)]
    return [median(side) for side in zip(*times, strict=True)]


def measure(kind: str, name: str, items: int) -> dict[str, Any]:
    """Return the row of a case."""
    kept: dict[str, Any] = {"kind": kind, "name": name, "items": items, "load": bench.load()}
    kept["commit"] = bench.commit()
    for side in ("theirs", "ours"):
        try:
            values = (kind, name, side == "ours", items)
            kept[side] = bench.alone(peak_of, *values, cpu=SECONDS, new=False)
        except TimeoutError:
            kept[side] = {"failed": "more than a minute"}
    run = [side for side in ("theirs", "ours") if "failed" not in kept[side]]
    if run:
        total = sum(kept[side]["seconds"] for side in run)
        rounds = max(1, min(15, int(2 / max(total, 1e-3))))
        sides = [side == "ours" for side in run]
        timed = bench.alone(seconds_of, kind, name, sides, items, rounds, new=False)
        for side, seconds in zip(run, timed, strict=True):
            kept[side]["seconds"] = seconds
    return kept


def render(raw: dict[str, Any]) -> str:
    kept, about = raw["cases"], raw["machine"]
    loads = sorted(row["load"] for row in kept)
    failures = sum("failed" in row["theirs"] for row in kept)
    apart = dict.fromkeys(f"`{row['name']}`" for row in kept if _apart(row))
    lines = [
        [
            title,
            f"{row['items']:,}",
            *_shown(row["theirs"]),
            *_shown(row["ours"]),
            _ratio(row),
            row["commit"],
        ]
        for kind, name in CASES
        for title in [f"`{name}`{KINDS[kind]}"]
        for row in sorted(bench.chosen(kept, kind=kind, name=name), key=lambda row: row["items"])
    ]
    head = ["loss or miner", "batch", "pytorch-metric-learning: ms", "MB", "ours: ms", "MB"]
    return bench.page(f"""
        # Losses and miners of `pml` beside pytorch-metric-learning's own

        `python benchmarks/pml_losses.py`: median CPU time and peak memory of a loss's forward and
        backward pass, or a miner's call, on one thread; both sides take turns. {EACH} items a
        class, {WIDTH} dimensions; losses of classes have {CLASSES:,} classes. All other losses and
        miners of `pml` are pytorch-metric-learning's classes, and equally fast.

        {about["cpu"]}; {about["versions"]}. Load average {loads[0]} to {loads[-1]}.

        pytorch-metric-learning does not finish within 3 GB and a minute in {failures} of
        {len(kept)} cases. These losses have other values, as their descriptions explain:
        {", ".join(apart) or "none"}. pytorch-metric-learning's `instance` compares an item with one
        item of the batch, not with all items of its label, so it does less work.

        {bench.markdown([*head, "times faster", "commit"], lines)}
    """)


def _apart(row: dict[str, Any]) -> bool:
    values = [row[side].get("value") for side in ("ours", "theirs")]
    return None not in values and abs(values[0] - values[1]) > 1e-3 * max(map(abs, values))


def _ratio(row: dict[str, Any]) -> str:
    if "failed" in row["ours"] or "failed" in row["theirs"]:
        return "–"
    ratio = row["theirs"]["seconds"] / row["ours"]["seconds"]
    return f"{ratio:,.2f}" if ratio < 10 else f"{ratio:,.0f}"


def _shown(figures: dict[str, Any]) -> list[str]:
    if "failed" in figures:
        return [figures["failed"][:60].replace("|", "/"), "–"]
    return [f"{1000 * figures['seconds']:,.1f}", f"{figures['megabytes']:,.0f}"]


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
    done = {(row["kind"], row["name"], row["items"]) for row in raw["cases"]}
    for kind, name, items in ((*case, items) for case in CASES for items in SIZES):
        skipped = options.write or (options.only and name not in options.only)
        if skipped or (kind, name, items) in done:
            continue
        raw["cases"].append(measure(kind, name, items))
        print(json.dumps(raw["cases"][-1]), flush=True)
        packages = bench.versions("torch", "pytorch-metric-learning")
        raw |= {"machine": {"cpu": bench.machine(), "versions": packages}}
        if not options.fresh:
            bench.finish("pml_losses", raw, render(raw), measured=False)
    bench.finish("pml_losses", raw, render(raw), keep=not options.fresh, measured=False)


if __name__ == "__main__":
    main()
