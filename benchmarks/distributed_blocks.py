"""A process's rows of a loss, computed at once or in blocks that are computed once more for the gradient: time and memory of both.

    python benchmarks/distributed_blocks.py [BATCH…]       # writes results/distributed_blocks.md
    python benchmarks/distributed_blocks.py --write        # writes the page again, from results/raw/distributed_blocks.json

One process computes what one of four would of a batch of so many items, without what they tell one another. `retrieval.training.divided.PLAIN` follows from it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from retrieval.model.rows import row_sums, rows_of
from retrieval.training.memory import Allocated
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distributed import drawn, parts_of

RESULTS = Path(__file__).parent / "results"
WORLD, WIDTH, ROUNDS = 4, 128, 5
CASES = ("contrastive", "multi-similarity, miner", "circle", "NT-Xent", "supervised contrastive")


def share(name: str, batch: int, blocks: int) -> Callable[[], None]:
    """Return what computes the first process's rows and their gradient: at once with one block, else each block twice."""
    sizes = (batch // 8, 8, WIDTH)
    vectors, labels = drawn(sizes, 0)
    codes = nn.functional.normalize(vectors)
    loss, miner = parts_of(name, sizes, True)
    indices = miner(codes, labels) if miner else None
    kind = rows_of(loss, miner is not None)
    assert kind == "anchors", name

    def block(rows: Tensor, every: Tensor, own: Tensor, at: int) -> Any:
        return row_sums(loss, "anchors", rows, own, (every, labels), at, indices)

    def run() -> None:
        every, size = codes.clone().requires_grad_(), -(-batch // WORLD // blocks)
        total: Any = 0
        for at in range(0, batch // WORLD, size):
            given = every[at : at + size], every, labels[at : at + size], at
            sums, _ = block(*given) if blocks == 1 else checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False)  # fmt: skip
            total = total + sums.sum()
        total.backward()

    return run


def measured(name: str, batch: int) -> dict[str, dict[str, float]]:
    """Return processor seconds, the least of some rounds in turn, and the most bytes of tensors, of both forms."""
    forms = {"at once": share(name, batch, 1), "in blocks": share(name, batch, WORLD)}
    found: dict[str, dict[str, float]] = {}
    for form, run in forms.items():
        with Allocated() as allocated:
            run()
        found[form] = {"bytes": allocated.peak, "seconds": float("inf")}
    for _ in range(ROUNDS):
        for form, run in forms.items():
            began = time.process_time()
            run()
            found[form]["seconds"] = min(found[form]["seconds"], time.process_time() - began)
    return found


def render(raw: dict[str, Any]) -> str:
    """Return the page."""
    rows = []
    for key, found in raw["found"].items():
        batch, name = key.split(" ", 1)
        once, blocks = found["at once"], found["in blocks"]
        rows.append(
            f"| {batch} | {name} | {int(batch) ** 2 // WORLD / 2**20:.2f} | {1e3 * once['seconds']:.0f} | {1e3 * blocks['seconds']:.0f} | {blocks['seconds'] / once['seconds']:.1f} | {once['bytes'] / 1e6:.1f} | {blocks['bytes'] / 1e6:.1f} |"
        )
    return f"""# Rows of a loss at once, or in blocks

`python benchmarks/distributed_blocks.py`; one process, one thread, load average {raw["load"]}: processor time, the least of {raw["rounds"]} in turn. It computes what one of {WORLD} processes would: a quarter of the
batch's rows against all of them, 8 items a class, codes of {WIDTH}. *In blocks* each of {WORLD} blocks is computed once more for its gradient; *at once* nothing is.

| batch | loss | numbers of a matrix, in 2²⁰ | at once, ms | in blocks, ms | ratio | at once, MB | in blocks, MB |
|--:|---|--:|--:|--:|--:|--:|--:|
{chr(10).join(rows)}

Blocks never take less time at these sizes, only less memory. So a process computes its rows at once up to 2²⁰ numbers, where a loss takes some 20 to 50 MB, and in blocks above.
"""


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("batches", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    parser.add_argument("--write", action="store_true", help="write the page again from what was measured")
    given = parser.parse_args()
    file = RESULTS / "raw" / "distributed_blocks.json"
    if not given.write:
        torch.set_num_threads(1)
        found = {f"{batch} {name}": measured(name, batch) for batch in given.batches for name in CASES}
        file.write_text(json.dumps({"load": round(os.getloadavg()[0]), "rounds": f"{ROUNDS} rounds", "found": found}, indent=1) + "\n", encoding="utf-8")  # fmt: skip
    (RESULTS / "distributed_blocks.md").write_text(
        render(json.loads(file.read_text(encoding="utf-8"))), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
