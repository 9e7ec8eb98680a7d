"""Every loss and miner of `pml` beside pytorch-metric-learning's own of the same parameters: time
and memory.

    python benchmarks/pml_losses.py # cases that are not measured yet, then the page
    # measured again; nothing is kept
    python benchmarks/pml_losses.py --fresh --only triplet_margin --items 256

A loss is called forward and backward, a miner once, on one thread. Both sides are called in turn in
one process; the median CPU time of the rounds is kept. Memory is how far the process's peak rises
during a first call over what it holds before, each side in a process of its own, which may take 3
GB and a minute: what needs more is said to, and not timed. The batch: 8 items a class, each its
class's random vector plus one and a half times as much noise. Cases are kept in
raw/pml_losses.json.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench import RAW, finish, load, machine, resume_arguments, status, versions

BYTES, SECONDS = 3 << 30, 60
SIZES = [(items, width) for items in (256, 1024, 4096) for width in (128, 512)]
EACH = 8
CLASSES = 1000
GIVEN: dict[str, dict[str, Any]] = {
    "ranked_list": {"margin": 0.4, "Tn": 10.0, "alpha": 1.2},
    "cross_batch_memory": {"memory_size": 4096, "loss": "contrastive"},
    "self_supervised": {"loss": "nt_xent"},
}
"""Parameters without a default, or of another size; inner losses by name."""
RECIPES = {
    "multi_similarity + multi_similarity": ("multi_similarity", "multi_similarity"),
    "triplet_margin + triplet_margin": ("triplet_margin", "triplet_margin"),
    "triplet_margin + batch_hard": ("triplet_margin", "batch_hard"),
    "margin + distance_weighted": ("margin", "distance_weighted"),
    "contrastive + pair_margin": ("contrastive", "pair_margin"),
}
"""Losses with a miner."""
UPSTREAM_NAMES = {"p2s_grad": {"embedding_size": "descriptors_dim"}}
LEFT_OUT = {
    "multiple": "a sum of other losses",
    "embeddings_already_packaged_as_triplets": (
        "counts rows, and takes no batch that is not of triplets"
    ),
}


def cases() -> list[tuple[str, str]]:
    """Return every kind and name."""
    from retrieval_pml import retrieval_losses, retrieval_miners

    found = [("loss", name) for name in retrieval_losses() if name not in LEFT_OUT]
    found += [("miner", name) for name in retrieval_miners() if name not in LEFT_OUT]
    return found + [("recipe", name) for name in RECIPES]


def part(kind: str, name: str, ours: bool, width: int) -> Any:
    """Return a loss or miner: the plugin's, or upstream's class of the same parameters."""
    import pytorch_metric_learning as upstream
    import torch

    from retrieval_pml import retrieval_losses, retrieval_miners

    factory = (retrieval_losses if kind == "losses" else retrieval_miners)()[name]
    given = {**GIVEN.get(name, {}), "embedding_size": width, "classes": CLASSES}
    given = {
        key: value for key, value in given.items() if key in inspect.signature(factory).parameters
    }
    if "loss" in given:
        given["loss"] = part("losses", given["loss"], ours, width)
    torch.manual_seed(0)
    made = factory(**given)
    torch.manual_seed(0)  # so that weights of a loss's own are the same on both sides
    if ours:
        return made
    renamed = {"classes": "num_classes", **UPSTREAM_NAMES.get(name, {})}
    theirs = {renamed.get(key, key): value for key, value in given.items()}
    if name != "manifold":
        return getattr(getattr(upstream, kind), type(made).__name__)(**theirs)
    loss = upstream.losses.ManifoldLoss(l=width)
    loss.meta_classes = made.meta_classes
    return loss


def call(kind: str, name: str, ours: bool, width: int) -> Callable[[Any, Any], Any]:
    """Return a function of embeddings and labels that gives a loss or a miner's indices."""
    if kind == "miner":
        miner = part("miners", name, ours, width)
        return lambda x, y: miner(x, y)
    if kind == "recipe":
        loss, miner = (
            part(of, each, ours, width)
            for of, each in zip(("losses", "miners"), RECIPES[name], strict=True)
        )
        return lambda x, y: loss(x, y, miner(x, y))
    loss = part("losses", name, ours, width)
    if ours:
        return lambda x, y: loss(x, y)
    if name == "manifold":
        return lambda x, y: loss(x, indices_tuple=loss.meta_classes[y])
    if name in ("vic_reg", "self_supervised"):  # ours pairs each label's items in their order
        return lambda x, y: loss(x[::2], ref_emb=x[1::2])
    return lambda x, y: loss(x, y)


class Side:
    """One side of a case, ready to be called."""

    def __init__(self, kind: str, name: str, ours: bool, items: int, width: int) -> None:
        import torch

        torch.manual_seed(0)
        self.run, self.kind = call(kind, name, ours, width), kind
        self.labels = torch.arange(items) // EACH
        centres = torch.randn(items // EACH, width)
        self.x = centres[self.labels] + 1.5 * torch.randn(items, width)
        self.x.requires_grad_()
        self.once(64)  # what is set up once

    def once(self, rows: int | None = None) -> tuple[float, float | None]:
        """Call it, and return CPU seconds and the loss."""
        import torch

        self.x.grad = None
        torch.manual_seed(0)
        for module in (cell.cell_contents for cell in self.run.__closure__ or ()):
            if hasattr(
                module, "hist_"
            ):  # upstream's fails where this belongs to an earlier batch's graph
                module.hist_ = torch.zeros_like(module.hist_)
        x, y = self.x[:rows], self.labels[:rows]
        start = time.process_time()
        value = self.run(x, y)
        if self.kind == "miner":
            return time.process_time() - start, None
        value.backward()
        return time.process_time() - start, float(value.detach())


def peak_of(kind: str, name: str, ours: bool, items: int, width: int) -> dict[str, Any]:
    """Return a first call's memory in MB and CPU seconds, and the loss."""
    side = Side(kind, name, ours, items, width)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    seconds, value = side.once()
    return {"megabytes": (status("VmHWM") - before) / 2**20, "seconds": seconds, "value": value}


def seconds_of(
    kind: str, name: str, sides: list[bool], items: int, width: int, rounds: int
) -> dict[str, Any]:
    """Return the median CPU seconds of each side, called in turn."""
    made = [Side(kind, name, ours, items, width) for ours in sides]
    taken = [[side.once()[0] for side in made] for _ in range(rounds)]
    return {"seconds": [median(each) for each in zip(*taken, strict=True)]}


def in_a_process(
    work: Callable[..., dict[str, Any]], *arguments: Any, limited: bool
) -> dict[str, Any]:
    """Return what work gives in a process of its own, or why it gives nothing, by "failed".

    The process is a copy of this one, which has imported everything and computed nothing.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(there, work, arguments, limited))
    process.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        found = {"failed": "more than a minute" if limited else "it was killed"}
    process.join()
    return found


def _child(pipe: Any, work: Callable[..., dict[str, Any]], arguments: Any, limited: bool) -> None:
    import torch

    torch.set_num_threads(1)
    if limited:
        size = status("VmSize") + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        spent = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (spent + SECONDS, spent + SECONDS))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe.send(work(*arguments))
    except (RuntimeError, MemoryError) as error:
        words = str(error).splitlines() or ["no message"]
        short = "memory" in str(error) or isinstance(error, MemoryError)
        pipe.send({"failed": "more than 3 GB" if short else f"fails: {words[0]}"})
    except Exception as error:
        pipe.send({"failed": f"fails: {error}".splitlines()[0]})


def measure(kind: str, name: str, items: int, width: int) -> dict[str, Any]:
    """Return a case's figures."""
    kept: dict[str, Any] = {"kind": kind, "name": name, "items": items, "width": width}
    kept["load"] = load()
    for side in ("theirs", "ours"):
        kept[side] = in_a_process(peak_of, kind, name, side == "ours", items, width, limited=True)
    run = [side for side in ("theirs", "ours") if "failed" not in kept[side]]
    if run:
        total = sum(kept[side]["seconds"] for side in run)
        rounds = max(1, min(15, int(2 / max(total, 1e-3))))
        sides = [side == "ours" for side in run]
        timed = in_a_process(seconds_of, kind, name, sides, items, width, rounds, limited=False)
        for side, seconds in zip(run, timed["seconds"], strict=True):
            kept[side]["seconds"] = seconds
    return kept


def render(raw: dict[str, Any]) -> str:
    """Return the page."""
    return "\n".join(_page(raw["cases"], raw["machine"])) + "\n"


def _page(kept: list[dict[str, Any]], machine: dict[str, str]) -> Iterator[str]:
    yield "# Losses and miners of `pml` beside pytorch-metric-learning's own\n"
    yield (
        "`python benchmarks/pml_losses.py`: a loss forward and backward, a miner's call, one"
        f" thread; median CPU time, both sides in turn; peak memory of a call. {EACH} items a"
        f" class, {CLASSES:,} classes of proxies. N × N: our memory in float32 matrices of the"
        " batch's pairs.\n"
    )
    loads = sorted(row["load"] for row in kept)
    yield f"{machine['cpu']}; {machine['versions']}. Load average {loads[0]} to {loads[-1]}.\n"
    yield from _headline(kept)
    yield (
        "| loss or miner | batch | dim | pytorch-metric-learning: ms | MB | ours: ms | MB | N × N |"
        " times faster |"
    )
    yield "| --- | --: | --: | --: | --: | --: | --: | --: | --: |"
    order = {"loss": "", "miner": " (miner)", "recipe": " (loss + miner)"}
    for kind, title in order.items():
        names = dict.fromkeys(row["name"] for row in kept if row["kind"] == kind)
        for name in names:
            mine = [row for row in kept if row["kind"] == kind and row["name"] == name]
            for row in sorted(mine, key=lambda row: (row["items"], row["width"])):
                cells = [f"`{name}`{title}", f"{row['items']:,}", row["width"]]
                cells += [*_shown(row["theirs"]), *_shown(row["ours"]), _matrices(row)]
                ratio = _ratio(row)
                cells.append(
                    "–"
                    if ratio is None
                    else f"**{ratio:,.2f}**"
                    if ratio < 10
                    else f"**{ratio:,.0f}**"
                )
                yield "| " + " | ".join(map(str, cells)) + " |"


def _headline(kept: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what misses its number, and where values differ."""
    slower = [row for row in kept if (ratio := _ratio(row)) is not None and ratio < 1 / 1.05]
    lines = [
        f"`{r['name']}` ({r['kind']}) {r['items']:,} × {r['width']}: {1 / _ratio(r):.2f} ×"
        for r in slower
    ]  # type: ignore[operator]
    yield (
        f"{len(kept)} of {len(SIZES) * len(cases())} cases are measured; a further run measures the"
        f" others. Slower than 1.05 times the peer: {'; '.join(lines) or 'none'}.\n"
    )
    yield (
        "What bounds the rest, by profile: with 512 numbers the two or three products of matrices,"
        " which run at the processor's full rate: 19 of the 25 ms of `multi_similarity` at 1,024,"
        " nine tenths of the losses of class weights; at 256 items some forty small operations of a"
        " few microseconds each. `instance` sums over all items of a label, where the peer picks"
        " one. Triplets that a miner lists are 24 bytes each: they are its memory, and the angular"
        " miner's do not fit in 3 GB at 4,096 items.\n"
    )
    gone = [row for row in kept if "failed" in row["theirs"]]
    yield (
        f"The peer gives nothing within 3 GB and a minute in {len(gone)} cases; ours gives nothing"
        f" in {sum('failed' in row['ours'] for row in kept)}.\n"
    )
    apart = {row["name"] for row in kept if _apart(row)}
    yield (
        "Values differ, by random weights of the loss itself or where its docstring says how:"
        f" {', '.join(f'`{name}`' for name in sorted(apart)) or 'none'}.\n"
    )


def _apart(row: dict[str, Any]) -> bool:
    values = [row[side].get("value") for side in ("ours", "theirs")]
    return None not in values and abs(values[0] - values[1]) > 1e-3 * max(map(abs, values))


def _ratio(row: dict[str, Any]) -> float | None:
    if "failed" in row["ours"] or "failed" in row["theirs"]:
        return None
    return max(row["theirs"]["seconds"], 1e-6) / max(row["ours"]["seconds"], 1e-6)


def _matrices(row: dict[str, Any]) -> str:
    if "failed" in row["ours"]:
        return "–"
    return f"{row['ours']['megabytes'] * 2**20 / (4 * row['items'] ** 2):.1f}"


def _shown(figures: dict[str, Any]) -> list[str]:
    if "failed" in figures:
        return [figures["failed"][:60].replace("|", "/"), "–"]
    return [f"{1000 * figures['seconds']:,.1f}", f"{figures['megabytes']:,.0f}"]


def main() -> None:
    parser = resume_arguments(__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="losses, miners or recipes by name"
    )
    parser.add_argument(
        "--items", type=int, nargs="+", default=sorted({items for items, _ in SIZES})
    )
    options = parser.parse_args()
    # imported here, before the processes are copied
    import pytorch_metric_learning.losses
    import pytorch_metric_learning.miners  # noqa: F401

    raw: dict[str, Any] = {"cases": []}
    if not options.fresh:
        raw = json.loads((RAW / "pml_losses.json").read_text(encoding="utf-8"))
    done = {(row["kind"], row["name"], row["items"], row["width"]) for row in raw["cases"]}
    found = len(done)
    for items, width in (size for size in SIZES if size[0] in options.items):
        for kind, name in cases():
            if (kind, name, items, width) in done or (options.only and name not in options.only):
                continue
            raw["cases"].append(measure(kind, name, items, width))
            raw["machine"] = {
                "cpu": machine(),
                "versions": versions("torch", "pytorch-metric-learning"),
            }
            print(json.dumps(raw["cases"][-1]), flush=True)
    if options.fresh:
        print(render(raw))
    else:
        finish("pml_losses", raw, render(raw))
    print(f"{len(raw['cases']) - found} cases were measured now; {found} are kept ones.")


if __name__ == "__main__":
    main()
