"""Time and memory of ANML's deep losses against pytorch-metric-learning's, forward and backward, on one core.

    python benchmarks/anml_loss_speed.py --report benchmarks/results/anml_loss_speed.md
    python benchmarks/anml_loss_speed.py --no-lifted --report benchmarks/results/anml_loss_speed_amd.md    # on another maker's processor

Each measurement is a process of its own, both sides in one run of this script. Time is CPU time, the least of several calls.
Memory is how far the process's peak rises during a call over what it holds before, after one call on a batch of 32
(which loads what loads lazily). The batch: 5 items per class, each its class's random vector plus twice as much noise, so that the
miner keeps a good part of the pairs.
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

LIFTED_LIMIT = 6 << 30  # bytes a process may take, so that a failure is one of the process
SIZES = [(512, 128), (512, 512), (2048, 128), (2048, 512)]


def steps() -> dict[str, Callable[[], Callable[[Any, Any], Any]]]:
    """Return what is measured: each makes a function of embeddings and labels to a loss."""

    def upstream() -> Callable[[Any, Any], Any]:
        from pytorch_metric_learning.losses import MultiSimilarityLoss
        from pytorch_metric_learning.miners import MultiSimilarityMiner

        loss, miner = MultiSimilarityLoss(), MultiSimilarityMiner()
        return lambda x, y: loss(x, y, miner(x, y))

    def fused() -> Callable[[Any, Any], Any]:
        from retrieval_anml.danml import MinedDANMLoss

        return MinedDANMLoss(2.0, 50.0)

    def apart() -> Callable[[Any, Any], Any]:
        from retrieval_anml.danml import DANMLoss
        from retrieval_anml.miners import PairMiner

        loss, miner = DANMLoss(2.0, 50.0), PairMiner()
        return lambda x, y: loss(x, y, miner(x, y))

    def unmined() -> Callable[[Any, Any], Any]:
        from retrieval_anml.danml import DANMLoss

        return DANMLoss(2.0, 50.0)

    def improved_lifted() -> Callable[[Any, Any], Any]:
        from retrieval_anml.lifted import ImprovedLiftedLoss

        return ImprovedLiftedLoss()

    def upstream_lifted() -> Callable[[Any, Any], Any]:
        from pytorch_metric_learning.losses import LiftedStructureLoss

        return LiftedStructureLoss()

    made = (upstream, fused, apart, unmined, improved_lifted, upstream_lifted)
    return {function.__name__: function for function in made}


def measure(name: str, items: int, width: int) -> dict[str, float]:
    """Return seconds, MB, and the share of pairs that the miner keeps."""
    import torch

    torch.set_num_threads(1)
    if name == "upstream_lifted":
        resource.setrlimit(resource.RLIMIT_AS, (LIFTED_LIMIT, LIFTED_LIMIT))
    call = steps()[name]()
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(items) // 5
    centres = torch.randn(items // 5 + 1, width, generator=generator)
    x = (centres[labels] + 2 * torch.randn(items, width, generator=generator)).requires_grad_()

    def once(rows: int) -> None:
        x.grad = None
        call(x[:rows], labels[:rows]).backward()

    once(32)
    torch.zeros_like(x)
    before = held()
    reset_peak()
    start = time.process_time()
    once(items)
    first = time.process_time() - start
    memory = peak() - before
    best = first
    for _ in range(min(15, int(3 / first))):
        start = time.process_time()
        once(items)
        best = min(best, time.process_time() - start)
    return {"seconds": best, "megabytes": memory / 2**20}


def held() -> int:
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def run(name: str, items: int, width: int) -> dict[str, float] | None:
    """Return `measure` of a process of its own; None where it ran out of memory."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--one", name, str(items), str(width)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return dict(json.loads(done.stdout))
    if "memory" in done.stderr.lower() or done.returncode < 0:
        return None
    raise RuntimeError(done.stderr)


def processor() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def report(lifted: bool) -> Iterator[str]:
    """Yield the lines of the report."""
    import pytorch_metric_learning
    import torch

    yield f"# Speed and memory of the deep ANML losses: {processor()}\n"
    yield "Made by `python benchmarks/anml_loss_speed.py`, which says what is measured: forward and backward, one core, CPU time."
    yield f"{platform.machine()}, torch {torch.__version__}, pytorch-metric-learning {pytorch_metric_learning.__version__}.\n"
    yield "## DANML with its miner, against MultiSimilarityLoss with MultiSimilarityMiner\n"
    yield "| batch | dim | pml: ms | MB | `danml_mined`: ms | MB | times faster | of the memory | `pair_miner` + `danml`: ms | MB | `danml`, all pairs: ms | MB |"
    yield "| --- " * 12 + "|"
    for items, width in SIZES:
        theirs, fused, apart, unmined = (
            run(name, items, width) or {"seconds": float("nan"), "megabytes": float("nan")}
            for name in ("upstream", "fused", "apart", "unmined")
        )
        cells = [items, width, *shown(theirs), *shown(fused)]
        cells.append(f"**{theirs['seconds'] / fused['seconds']:.1f}**")
        cells.append(f"**{100 * fused['megabytes'] / theirs['megabytes']:.0f} %**")
        yield row(*cells, *shown(apart), *shown(unmined))
    if not lifted:
        return
    yield "\n## Improved lifted, against LiftedStructureLoss\n"
    yield f"Each process may take {LIFTED_LIMIT >> 30} GB.\n"
    yield "| batch | dim | pml `LiftedStructureLoss`: ms | MB | `improved_lifted`: ms | MB |"
    yield "| --- " * 6 + "|"
    for items in (128, 512, 2048):
        theirs_or_none, ours = run("upstream_lifted", items, 128), run("improved_lifted", items, 128)
        assert ours is not None
        cells = shown(theirs_or_none) if theirs_or_none else ["out of memory", "–"]
        yield row(items, 128, *cells, *shown(ours))


def shown(figures: dict[str, float]) -> list[str]:
    return [f"{1000 * figures['seconds']:.1f}", f"{figures['megabytes']:.0f}"]


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", type=Path, help="write the report here")
    parser.add_argument("--no-lifted", action="store_true", help="leave out the second table")
    parser.add_argument("--one", nargs=3, metavar=("WHAT", "ITEMS", "WIDTH"), help="one measurement, as JSON")
    options = parser.parse_args()
    if options.one:
        name, items, width = options.one
        print(json.dumps(measure(name, int(items), int(width))))
        return
    lines = []
    for line in report(not options.no_lifted):
        print(line, flush=True)
        lines.append(line)
    if options.report:
        temporary = options.report.with_suffix(".tmp")
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        temporary.replace(options.report)


if __name__ == "__main__":
    main()
