"""The page of distributed.py, from what it measured."""

from __future__ import annotations

from typing import Any

THEIRS = ("efficient=False", "efficient=True")


def _off(given: Any) -> str:
    """Return how far gradients are off, network / loss; or why there are none."""
    if isinstance(given, str):
        return "refused"
    return " / ".join(
        "–" if each is None else f"{each:.0e}" if each < 1e-3 else f"{100 * each:.0f} %" for each in given
    )


def _cost(given: dict[str, Any] | None, base: float, key: str, scale: float) -> str:
    if given is None or key not in given:
        return "–"
    return f"{given[key] / scale:.2f}" if key == "bytes" else f"{given[key] / base:.2f}"


def render(raw: dict[str, Any]) -> str:
    """Return the page."""
    sizes, by_world = raw["sizes"], raw["losses"]
    small, large, share = (sizes[each] for each in ("small", "large", "share"))
    names, several = list(by_world["1"]), [world for world in by_world if world != "1"]
    of_several = "".join(f" {world}: ours | {world}: inefficient | {world}: efficient |" for world in several)
    off = [
        f"| {name} | " + " | ".join(_off(by_world[w][name]["gradients"][each]) for w in several for each in ("ours", *THEIRS)) + " |"
        for name in names
    ]  # fmt: skip
    times, memory, grown = [], [], []
    for name in names:
        one = by_world["1"][name]["costs"]
        base = one["ours"]["seconds"]
        cells = [f"{1000 * base:.0f} ms", _cost(one.get("theirs"), base, "seconds", 1)]
        held = [_cost(one["ours"], 1, "bytes", 1e6), _cost(one.get("theirs"), 1, "bytes", 1e6)]
        more = [_cost(by_world["1"][name]["grown"]["ours"], 1, "bytes", 1e6)]
        for world in several:
            costs = by_world[world][name]["costs"]
            cells += [_cost(costs.get(each), base, "seconds", 1) for each in ("ours", *THEIRS)]
            held += [_cost(costs.get(each), 1, "bytes", 1e6) for each in ("ours", *THEIRS)]
            more += [
                _cost(by_world[world][name]["grown"].get(each), 1, "bytes", 1e6) for each in ("ours", *THEIRS)
            ]
        times.append(f"| {name} | " + " | ".join(cells) + " |")
        memory.append(f"| {name} | " + " | ".join(held) + " |")
        grown.append(f"| {name} | " + " | ".join(more) + " |")
    head = f"| loss | 1: ours | 1: upstream |{of_several}\n|---|--:|--:|" + "--:|--:|--:|" * len(several)
    options = "" if len(by_world) == 3 else f" --worlds {' '.join(by_world)}"
    options += "" if raw["fc"] else " --without-fc"
    return f"""# Several processes that train one model

`python benchmarks/distributed.py --rounds {sizes["rounds"]}{options}`; {raw["machine"]}; gloo on the loopback, one thread each. Load average {" to ".join(map(str, raw["load"]))}: the machine
was shared, so time is that of the processors, not the clock's.

"Ours" is what the trainer does. Beside it stands pytorch-metric-learning's `DistributedLossWrapper` (with `DistributedMinerWrapper` where there is a miner), with `efficient=False` ("inefficient") and
`efficient=True`; the network is in `DistributedDataParallel`.

## Gradients

The largest difference from the gradients of one process on the whole batch, relative to the largest gradient, after two steps without an update; network / parameters of the loss. {small[0]} classes × {small[1]} items,
codes of {small[2]}, float32: what is below 1e-5 is rounding. "Refused": the wrapper raises an error.

| loss |{of_several}
|---|{"--:|--:|--:|" * len(several)}
{chr(10).join(off)}

A loss's own parameters have, with the wrapper, the whole gradient times the number of processes, here on each of them: they have no mean to undo that factor.

## Time

Processor time of one process for codes → loss → gradient of the codes, miner and gathering included, as a multiple of what ours takes in one process; the least of {sizes["rounds"]} rounds, contestants in turn.
{large[0]} classes × {large[1]} items = {large[0] * large[1]} in the whole batch, codes of {large[2]}.

{head}
{chr(10).join(times)}

## Memory

The most that tensors of that step hold at a time in one process, MB; the same batch.

{head}
{chr(10).join(memory)}

The same where each process brings {share} items, so that the batch grows with the number of processes:

| loss | 1: ours |{of_several}
|---|--:|{"--:|--:|--:|" * len(several)}
{chr(10).join(grown)}

Where ours divides a loss by rows, a process compares its rows with the batch: at once up to 2²⁰ numbers, as all of this page's batches are, and above in blocks that are computed once more for the
gradient (`distributed_blocks.md`). So memory grows with the number of processes up to some 40 MB, and no further but for the gathered codes and their gradient, and with a miner what the miner takes, which sees the whole batch.
Lifted structure, proxy-anchor and the memory are computed whole by each process. Upstream's NT-Xent and lifted structure compare each positive with each negative pair, which takes gigabytes here; they
are not measured.
{_partial_fc(raw["fc"], sizes["fc"]) if raw["fc"] else ""}"""


def _partial_fc(measured: dict[str, Any], sizes: list[int]) -> str:
    """Return the section on partial FC."""
    classes, width, batch = sizes
    fc = []
    for key, found in measured.items():
        world, sample = key.split()
        fc.append(
            f"| {world} | {float(sample):g} | {found['weights'] / 1e6:,.0f} | {found['resident'] / 1e6:,.0f} | {found['seconds']:.2f} |"
        )
    return f"""
## Partial FC

`core.partial_fc`, in a run of its own, {classes:,} classes × {width}, a batch of {batch} in all, SGD with momentum. Of one process: its weights, the growth of its resident memory over two steps (weights, gradient, momentum,
normalised weights and their gradient, logits), and the least processor time of a step. Memory only: labels are drawn, nothing is claimed of quality.

| processes | `sample` | weights, MB | resident, MB | seconds |
|--:|--:|--:|--:|--:|
{chr(10).join(fc)}
"""
