"""Time of OAHU's hand-written step against a straightforward PyTorch loop of the same network, in one process, on one core.

    OMP_NUM_THREADS=1 python benchmarks/oahu_speed.py

The paper's network (784 features, 5 hidden layers of 100, embeddings of 50). Both learn the same triplets from the same weights; in float64 the
weights are compared at the end. Half a minute.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrieval_oahu import OAHU

FEATURES, TAU, RATE, BETA, SMOOTHING = 784, 0.1, 0.3, 0.99, 0.1


class TorchLoop:
    """OAHU as one would write it with autograd: Algorithm 1, line by line."""

    def __init__(self, learner: OAHU, dtype: torch.dtype) -> None:
        h = learner.hidden
        levels = [learner.input_layer_, *learner.layers_]
        self.w = [torch.tensor(m[:, :h], dtype=dtype, requires_grad=True) for m in levels[:-1]]
        self.theta = [torch.tensor(m[:, h:], dtype=dtype, requires_grad=True) for m in levels]
        self.mean, self.scale = (
            torch.tensor(v, dtype=torch.float64) for v in (learner.mean_, learner.scale_)
        )
        self.alpha = torch.full((len(levels),), 1 / len(levels), dtype=torch.float64)
        self.optimizer = torch.optim.SGD([*self.w, *self.theta], lr=RATE)
        self.dtype = dtype

    def step(self, triplet: torch.Tensor) -> None:
        """Learn from one triplet (3, F)."""
        h = ((triplet - self.mean) / self.scale).to(self.dtype)
        losses = []
        for level, theta in enumerate(self.theta):
            f = torch.nn.functional.normalize(h @ theta, dim=1)
            positive, negative = (f[0] - f[1]).norm(), (f[0] - f[2]).norm()
            near = TAU / np.expm1(2.0) * torch.expm1(positive.detach())
            far = (2 - TAU) + TAU / np.expm1(-2.0) * torch.expm1(-negative.detach())
            attractive = torch.relu((positive - near) / (2 - near))
            repulsive = torch.relu(1 - negative / far)
            losses.append((attractive + repulsive) / 2)
            if level < len(self.w):
                h = torch.relu(h @ self.w[level])
        local = torch.stack(losses)
        self.optimizer.zero_grad()
        (self.alpha.to(self.dtype) * local).sum().backward()
        self.optimizer.step()
        changed = self.alpha * BETA ** local.detach().double()
        changed = torch.clamp(changed, min=SMOOTHING / len(changed))
        self.alpha = changed / changed.sum()


def ours(dtype: str, sample: Any) -> OAHU:
    """Return a learner at its start."""
    return OAHU(dtype=dtype).prepare(sample)  # type: ignore[arg-type]


def best(times: list[float]) -> float:
    """Return the least, in microseconds."""
    return min(times) * 1e6


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "oahu_speed.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    sample = rng.standard_normal((500, FEATURES))
    triplets = rng.standard_normal((300, 3, FEATURES))

    exact, loop = ours("float64", sample), TorchLoop(ours("float64", sample), torch.float64)
    exact.partial_fit(triplets)
    for triplet in torch.from_numpy(triplets):
        loop.step(triplet)
    h = exact.hidden
    differences = [np.abs(exact.alpha_ - loop.alpha.numpy()).max()]
    for level, m in enumerate([exact.input_layer_, *exact.layers_]):
        differences.append(np.abs(m[:, h:] - loop.theta[level].detach().numpy()).max())
        if level < len(loop.w):
            differences.append(np.abs(m[:, :h] - loop.w[level].detach().numpy()).max())
    lines = [
        "# OAHU: speed of a step", "",
        "Microseconds of one triplet, the least of five rounds of 300, both sides in turn in one process on one core. 784 features, 5 hidden layers of",
        "100, embeddings of 50. `benchmarks/oahu_speed.py`.", "",
        "| precision | PyTorch loop | `oahu.oahu` | times as fast |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for name in ("float32", "float64"):
        learner, loop = ours(name, sample), TorchLoop(ours(name, sample), getattr(torch, name))
        mine, theirs = [], []
        for _ in range(5):
            started = time.process_time()
            learner.partial_fit(triplets)
            mine.append((time.process_time() - started) / len(triplets))
            rows = torch.from_numpy(triplets)
            started = time.process_time()
            for triplet in rows:
                loop.step(triplet)
            theirs.append((time.process_time() - started) / len(triplets))
        lines.append(
            f"| {name} | {best(theirs):,.0f} | {best(mine):,.0f} | {best(theirs) / best(mine):.1f} |"
        )
    lines += [
        "",
        f"After 300 triplets in float64 the weights of both differ by {max(differences):.1g} at most.",
        "",
    ]
    lines += ["| triplets | seconds | µs a triplet | MB held by the learner |", "| --- | --- | --- | --- |"]
    learner, done, spent = ours("float32", sample), 0, 0.0
    pool = itertools.cycle([rng.standard_normal((250, 3, FEATURES)) for _ in range(4)])
    for count in (2_000, 4_000, 8_000, 16_000):
        while done < count:
            chunk = next(pool)
            started = time.process_time()
            learner.partial_fit(chunk)
            spent += time.process_time() - started
            done += len(chunk)
        held = sum(v.nbytes for v in vars(learner).values() if isinstance(v, np.ndarray)) / 1e6
        lines.append(f"| {count:,} | {spent:.2f} | {spent / count * 1e6:.0f} | {held:.3f} |")
    lines += [
        "",
        f"8,000 triplets more raised the Python heap's peak by {_peak(learner, pool):.2f} MB over what was held, the chunk of 250 included.",
        "",
    ]
    lines.append(
        f"numpy {np.__version__}, torch {torch.__version__}, {platform.machine()}, a machine shared with other work."
    )
    arguments.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _peak(learner: OAHU, pool: Any) -> float:
    tracemalloc.start()
    learner.partial_fit(next(pool))
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(32):
        learner.partial_fit(next(pool))
    return (tracemalloc.get_traced_memory()[1] - before) / 1e6


if __name__ == "__main__":
    main()
