"""Time and memory of the losses and miners of `pml` beside pytorch-metric-learning's own, forward and backward, on one core.

    python benchmarks/pml_losses.py --only triplet_margin margin circle multi_similarity mined --report benchmarks/results/pml_losses.md

Each measurement is a process of its own, both sides in one run. Time is CPU time, the least of several calls. Memory is how far
the process's peak rises during a call over what it holds before. A process may take 8 GB and two minutes. The batch: 8 items a
class (`--items-per-class`), each its class's random vector plus one and a half times as much noise. `mined` is Multi-Similarity with its miner.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIMIT = 8 << 30
SECONDS = 120
SIZES = [(256, 128), (1024, 128), (1024, 512), (4096, 128)]
NAMES = ["triplet_margin", "margin", "circle", "multi_similarity", "mined"]


def call(name: str, ours: bool) -> Callable[[Any, Any], Any]:
    """Return a function of embeddings and labels to a loss: the plugin's, or upstream's of the same parameters."""
    if name == "mined":
        miner = part("multi_similarity", ours, "miners")
        loss = part("multi_similarity", ours, "losses")
        return lambda x, y: loss(x, y, miner(x, y))
    loss = part(name, ours, "losses")
    return lambda x, y: loss(x, y)


def part(name: str, ours: bool, kind: str) -> Any:
    """Return a loss or miner with the plugin's default parameters."""
    import pytorch_metric_learning as upstream
    from retrieval import create

    made = create(kind, f"pml.{name}")
    if ours:
        return made
    return getattr(getattr(upstream, kind), type(made).__name__)()


def measure(name: str, ours: bool, items: int, width: int, each: int) -> dict[str, float]:
    """Return milliseconds and MB of one call."""
    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    run = call(name, ours)
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(items) // each
    centres = torch.randn(items // each + 1, width, generator=generator)
    x = (centres[labels] + 1.5 * torch.randn(items, width, generator=generator)).requires_grad_()

    def once(rows: int) -> float:
        x.grad = None
        start = time.process_time()
        run(x[:rows], labels[:rows]).backward()
        return time.process_time() - start

    once(64)
    torch.zeros_like(x)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    best = once(items)
    memory = _status("VmHWM") - before
    for _ in range(min(15, int(3 / best))):
        best = min(best, once(items))
    return {"ms": 1000 * best, "megabytes": memory / 2**20}


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def in_a_process(*arguments: object) -> dict[str, float] | None:
    """Return `measure` of a process of its own; None where it ran out of memory or time."""
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == 0:
        return dict(json.loads(done.stdout))
    if "memory" in done.stderr.lower() or done.returncode < 0:
        return None
    raise RuntimeError(done.stderr)


def report(names: list[str], each: int) -> Iterator[str]:
    """Yield the lines of the report."""
    import pytorch_metric_learning
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    sets = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    yield "# Losses and miners of `pml` beside pytorch-metric-learning's own\n"
    yield f"`python benchmarks/pml_losses.py --items-per-class {each}`: forward and backward, one core, CPU time; peak memory of a call.\n"
    yield f"{model} ({', '.join(sets)}), {platform.machine()}; load average {os.getloadavg()[0]:.1f} when it began, so read the ratios; torch {torch.__version__},"
    yield f"pytorch-metric-learning {pytorch_metric_learning.__version__}.\n"
    yield "| loss | batch | dim | pytorch-metric-learning: ms | MB | ours: ms | MB | times faster | of the memory |"
    yield "| --- | --: | --: | --: | --: | --: | --: | --: | --: |"
    for name in names:
        for items, width in SIZES:
            theirs, ours = (in_a_process(name, side, items, width, each) for side in ("theirs", "ours"))
            cells = [f"`{name}`", f"{items:,}", width, *_shown(theirs), *_shown(ours)]
            if theirs and ours:
                cells.append(f"**{theirs['ms'] / ours['ms']:.1f}**")
                cells.append(f"{100 * ours['megabytes'] / max(theirs['megabytes'], 0.1):.0f} %")
            else:
                cells += ["–", "–"]
            yield "| " + " | ".join(map(str, cells)) + " |"


def _shown(figures: dict[str, float] | None) -> list[str]:
    if figures is None:
        return ["over 8 GB or 2 minutes", "–"]
    return [f"{figures['ms']:.1f}", f"{figures['megabytes']:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=NAMES, metavar="NAME", help="losses by their name in pml"
    )
    parser.add_argument("--items-per-class", type=int, default=8)
    parser.add_argument("--report", type=Path, help="write the report here")
    parser.add_argument("--one", nargs=5, help="one measurement, as JSON")
    options = parser.parse_args()
    if options.one:
        name, side, *numbers = options.one
        print(json.dumps(measure(name, side == "ours", *map(int, numbers))))
        return
    lines = []
    for line in report(options.only, options.items_per_class):
        print(line, flush=True)
        lines.append(line)
    if options.report:
        options.report.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
