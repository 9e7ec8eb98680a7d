"""Several processes that train one model: ours beside pytorch-metric-learning's DistributedLossWrapper, and partial FC's memory.

    python benchmarks/distributed.py              # writes results/distributed.md, from what it measures
    python benchmarks/distributed.py --write      # writes the page again, from results/raw/distributed.json

Each number of processes is started once (gloo, on the loopback) and goes through all cases. Gradients are compared with those of one
process on the whole batch, each contestant's with its own library's. Machines are shared and noisy, so time is that of the processors, not the clock's.
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
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from pytorch_metric_learning import losses as L
from pytorch_metric_learning import miners as M
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper, DistributedMinerWrapper
from retrieval import create
from retrieval.model.model import Model
from retrieval.model.rows import rows_of
from retrieval.recipe.read import check_recipe
from retrieval.run.build import Objective
from retrieval.training.devices import Devices
from retrieval.training.divided import divided_loss
from retrieval.training.memory import Allocated
from retrieval.training.step import Step
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from distributed_report import render
from retrieval_core.partial_fc import PartialFC

RESULTS = Path(__file__).parent / "results"
WORLDS = (1, 2, 4)
SMALL, LARGE = (16, 4, 16), (64, 8, 128)
"""Classes, items of each, and the codes' width: of gradients, of time and memory."""
SHARE = 128
"""Items of a process, where the batch grows with their number."""
FC = (1_000_000, 128, 32)
"""Classes, width and batch of partial FC."""

Case = tuple[
    Callable[[int, int], Any],
    Callable[[], Any] | None,
    str,
    dict[str, Any],
    tuple[str, dict[str, Any]] | None,
]
SIMILAR = ("pml.multi_similarity", {})
CASES: dict[str, Case] = {
    "contrastive": (lambda c, d: L.ContrastiveLoss(), None, "pml.contrastive", {}, None),
    "triplet margin, miner": (
        lambda c, d: L.TripletMarginLoss(margin=0.2), lambda: M.TripletMarginMiner(0.2, "semihard"),
        "pml.triplet_margin", {"margin": 0.2}, ("pml.triplet_margin", {"margin": 0.2, "type_of_triplets": "semihard"}),
    ),
    "multi-similarity, miner": (
        lambda c, d: L.MultiSimilarityLoss(), M.MultiSimilarityMiner, "pml.multi_similarity", {}, SIMILAR,
    ),
    "circle": (lambda c, d: L.CircleLoss(), None, "pml.circle", {}, None),
    "NT-Xent": (lambda c, d: L.NTXentLoss(), None, "pml.nt_xent", {}, None),
    "supervised contrastive": (lambda c, d: L.SupConLoss(), None, "pml.sup_con", {}, None),
    "lifted structure": (lambda c, d: L.LiftedStructureLoss(), None, "pml.lifted_structure", {}, None),
    "proxy-anchor": (lambda c, d: L.ProxyAnchorLoss(c, d), None, "pml.proxy_anchor", {}, None),
    "ArcFace": (lambda c, d: L.ArcFaceLoss(c, d), None, "pml.arc_face", {}, None),
    "cross-batch memory, miner": (
        lambda c, d: L.CrossBatchMemory(L.ContrastiveLoss(), d, 2048, M.MultiSimilarityMiner()), None,
        "pml.cross_batch_memory",
        {"loss": {"name": "pml.contrastive"}, "memory_size": 2048, "miner": {"name": SIMILAR[0]}}, None,
    ),
}  # fmt: skip
LISTED = ("NT-Xent", "lifted structure")
"""Upstream's compare each positive with each negative pair: gigabytes for the larger batches, so they are not measured there."""
SIZED = ("pml.proxy_anchor", "pml.arc_face")


def drawn(sizes: tuple[int, int, int], step: int, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Return a batch: vectors near their classes' middles, and labels, in no order."""
    classes, items, codes = sizes
    generator = torch.Generator().manual_seed(100 + step)
    labels = torch.arange(classes).repeat_interleave(items)
    labels = labels[torch.randperm(len(labels), generator=generator)]
    middles = torch.randn(classes, width or codes, generator=torch.Generator().manual_seed(7))
    return middles[labels] + 1.5 * torch.randn(len(labels), width or codes, generator=generator), labels


class Net(nn.Module):
    """A small network, begun alike on every process."""

    preprocessing = None

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.features = 24
        self.layers = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, 24))

    def forward(self, x: Tensor) -> Tensor:
        """Return features."""
        return self.layers(x)


def parts_of(name: str, sizes: tuple[int, int, int], ours: bool) -> tuple[Any, Any]:
    """Return a case's loss and miner, begun alike everywhere."""
    classes, _, width = sizes
    theirs, their_miner, named, options, miner = CASES[name]
    torch.manual_seed(5)
    if not ours:
        return theirs(classes, width), their_miner() if their_miner else None
    given: dict[str, Any] = {"embedding_size": width, "classes": classes} if named in SIZED else {}
    if named == "pml.cross_batch_memory":
        given = {"embedding_size": width}
    return create("loss", named, **given, **options), create("miner", miner[0], **miner[1]) if miner else None


# --- gradients -------------------------------------------------------------------------------------------


def alone() -> Any:
    """Return what a step asks of Accelerate, of one process."""
    return SimpleNamespace(
        num_processes=1, process_index=0, scaler=None, autocast=nullcontext, prepare_optimizer=lambda each: each,
        backward=lambda loss, inputs: loss.backward(inputs=inputs),
    )  # fmt: skip


def our_gradients(name: str, accelerator: Any, share: slice) -> tuple[Tensor, Tensor]:
    """Return the gradients of network and loss that two of the trainer's steps give."""
    loss, miner = parts_of(name, SMALL, True)
    net = Net(20)
    torch.manual_seed(4)
    model = Model(net, nn.Sequential(nn.Linear(24, SMALL[2])))  # type: ignore[arg-type]
    recipe = check_recipe(
        {"data": {"name": "core.digits"}, "backbone": {"name": "core.convnet"}, "loss": {"name": CASES[name][2], **CASES[name][3]}}
    )  # fmt: skip
    step = Step(model, Objective(loss, miner), recipe, recipe.phases[0], 1, accelerator)
    for number in range(2):
        x, labels = drawn(SMALL, number, 20)
        step.zero_grad()
        step.backward(step.losses(x[share], labels[share]))
    return flat(model), flat(loss)


def their_gradients(name: str, share: slice, efficient: bool | None) -> tuple[Tensor, Tensor]:
    """Return the same of pytorch-metric-learning; without its wrapper where `efficient` is None."""
    loss, miner = parts_of(name, SMALL, False)
    net: nn.Module = nn.Sequential(Net(20))
    torch.manual_seed(4)
    net.append(nn.Linear(24, SMALL[2]))  # type: ignore[operator]
    wrapped: Any = loss
    if efficient is not None:
        net, wrapped = DistributedDataParallel(net), DistributedLossWrapper(loss, efficient=efficient)
        miner = DistributedMinerWrapper(miner, efficient=efficient) if miner else None
    for number in range(2):
        x, labels = drawn(SMALL, number, 20)
        net.zero_grad(), loss.zero_grad()
        codes = net(x[share])
        indices = miner(codes, labels[share]) if miner else None
        wrapped(codes, labels[share], indices).backward()
    return flat(net), flat(loss)


def flat(module: nn.Module) -> Tensor:
    """Return a module's gradients in one row."""
    found = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    return torch.cat(found) if found else torch.zeros(0)


def off(one: Tensor, other: Tensor) -> float | None:
    """Return the largest difference, relative to the largest gradient; None where there are none."""
    return float((one - other).abs().max() / other.abs().max()) if len(other) else None


def gradients(name: str, accelerator: Any, share: slice) -> dict[str, Any]:
    """Return how far each contestant's gradients are from one process's, or why it gives none."""
    found: dict[str, Any] = {}
    expected = our_gradients(name, alone(), slice(None))
    found["ours"] = [
        off(*each) for each in zip(our_gradients(name, accelerator, share), expected, strict=True)
    ]
    expected = their_gradients(name, slice(None), None)
    for efficient in (False, True):
        try:
            given = their_gradients(name, share, efficient)
            found[f"efficient={efficient}"] = [off(*each) for each in zip(given, expected, strict=True)]
        except (ValueError, NotImplementedError, RuntimeError, AssertionError) as error:
            found[f"efficient={efficient}"] = str(error).splitlines()[0][:120] or type(error).__name__
    return found


# --- time and memory -------------------------------------------------------------------------------------


def our_loss(loss: Any, miner: Any, codes: Tensor, labels: Tensor, devices: Devices) -> Tensor:
    """Return the loss as a training step computes it."""
    rows = rows_of(loss, miner is not None) if devices.world > 1 else None
    indices, whole = None, (codes, labels)
    if rows is None or miner is not None:
        whole = devices.share(codes), devices.share(labels)
        indices = miner(*whole) if miner is not None else None
    if rows is not None:
        return divided_loss(loss, rows, codes, labels, indices, devices)
    value: Tensor = loss(*whole, indices) if indices is not None else loss(*whole)
    return value


def contestants(
    name: str, sizes: tuple[int, int, int], devices: Devices
) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return the contestants by name: codes and labels of this process to the loss."""
    loss, miner = parts_of(name, sizes, True)
    found = {"ours": lambda codes, labels: our_loss(loss, miner, codes, labels, devices)}
    if name in LISTED:
        return found
    for efficient in (False, True) if devices.world > 1 else (None,):
        theirs, their_miner = parts_of(name, sizes, False)
        if efficient is not None:
            if efficient and isinstance(theirs, L.CrossBatchMemory):
                continue
            theirs = DistributedLossWrapper(theirs, efficient=efficient)
            their_miner = DistributedMinerWrapper(their_miner, efficient=efficient) if their_miner else None

        def call(codes: Tensor, labels: Tensor, theirs: Any = theirs, mine: Any = their_miner) -> Tensor:
            return theirs(codes, labels, mine(codes, labels) if mine else None)  # type: ignore[no-any-return]

        found[f"efficient={efficient}" if efficient is not None else "theirs"] = call
    return found


def costs(name: str, sizes: tuple[int, int, int], devices: Devices, rounds: int) -> dict[str, Any]:
    """Return each contestant's processor seconds a step, of one process, and the bytes of tensors that it has at most."""
    calls, times = contestants(name, sizes, devices), {}
    found: dict[str, Any] = {}

    def step(call: Any, number: int) -> None:
        codes, labels = drawn(sizes, number)
        size = len(codes) // devices.world
        own = slice(devices.rank * size, (devices.rank + 1) * size)
        call(nn.functional.normalize(codes[own]).requires_grad_(), labels[own]).backward()

    for each in list(calls):
        try:
            with Allocated() as allocated:
                step(calls[each], 0)
            found[each] = {"bytes": allocated.peak}
            times[each] = []
        except (ValueError, NotImplementedError, RuntimeError, AssertionError) as error:
            del calls[each]
            found[each] = {"error": str(error).splitlines()[0][:120] or type(error).__name__}
    for number in range(rounds):
        for each, call in calls.items():
            began = time.process_time()
            step(call, number)
            times[each].append(time.process_time() - began)
    for each, seconds in times.items():
        if seconds:
            found[each]["seconds"] = min(seconds)
    return found


def partial_fc(devices: Devices, sample: float) -> dict[str, Any]:
    """Return what partial FC of very many classes takes of one process: its peak of resident memory, its weights, its time."""
    classes, width, batch = FC
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = PartialFC(width, classes, sample=sample)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1, momentum=0.9)
    own = slice(devices.rank * batch // devices.world, (devices.rank + 1) * batch // devices.world)
    seconds = []
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        codes = torch.randn(batch, width, generator=generator)[own].requires_grad_()
        labels = torch.randint(0, classes, (batch,), generator=generator)[own]
        began = time.process_time()
        loss(devices.gather(codes), devices.gather(labels)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"weights": loss.weight.numel() * 4, "resident": peak * 1024, "seconds": min(seconds)}


# --- processes -------------------------------------------------------------------------------------------


def worker(what: str, rounds: int) -> None:
    """Go through the cases as one process of several, and print what was found as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    devices = Devices(accelerator)
    found: dict[str, Any] = {}
    if what.startswith("fc"):
        found = partial_fc(devices, float(what[2:]))
    else:
        size = SMALL[0] * SMALL[1] // devices.world
        share = slice(devices.rank * size, (devices.rank + 1) * size)
        grown = (SHARE * devices.world // 8, 8, LARGE[2])
        for name in CASES:
            found[name] = {
                "costs": costs(name, LARGE, devices, rounds),
                "grown": costs(name, grown, devices, 0),
            }
            if devices.world > 1:
                found[name]["gradients"] = gradients(name, accelerator, share)
    print(json.dumps(found))


def started(world: int, what: str, rounds: int) -> Any:
    """Return what the first of several processes found."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    running = []
    for rank in range(world):
        group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
        running.append(
            subprocess.Popen(
                [sys.executable, __file__, "--worker", what, "--rounds", str(rounds)],
                env={**os.environ, "OMP_NUM_THREADS": "1", **(group if world > 1 else {})},
                stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    said = []
    for process in running:
        said.append(process.communicate()[0])
        if process.returncode:  # the others wait for it
            for other in running:
                other.kill()
    if any(process.returncode for process in running):
        sys.exit(f"{world} processes failed at {what}")
    return json.loads(said[0].splitlines()[-1])


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--worlds", type=int, nargs="+", default=WORLDS, help="the numbers of processes; 1 is among them"
    )
    parser.add_argument(
        "--without-fc", action="store_true", help="leave partial FC out, which takes 3 GB and minutes"
    )
    parser.add_argument("--go-on", action="store_true", help="keep what an interrupted run has measured")
    parser.add_argument("--write", action="store_true", help="write the page again from what was measured")
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.rounds)
        return
    raw = RESULTS / "raw" / "distributed.json"
    if not given.write:
        measured: dict[str, Any] = {
            "machine": f"{platform.system()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
            f"pytorch-metric-learning {version('pytorch-metric-learning')}",
            "load": [round(os.getloadavg()[1], 1)],
            "sizes": {"small": SMALL, "large": LARGE, "share": SHARE, "fc": FC, "rounds": given.rounds},
            "losses": {},
            "fc": {},
        }
        if given.go_on and raw.is_file():
            measured = json.loads(raw.read_text(encoding="utf-8"))
        for world in given.worlds:
            if str(world) in measured["losses"]:
                continue
            measured["losses"][str(world)] = started(world, "losses", given.rounds)
            raw.write_text(json.dumps(measured, indent=1), encoding="utf-8")
            print(f"losses, {world} processes: measured", flush=True)
        for sample in () if given.without_fc else (0.1, 1.0):
            for world in given.worlds:
                measured["fc"][f"{world} {sample}"] = started(world, f"fc{sample}", 1)
                raw.write_text(json.dumps(measured, indent=1), encoding="utf-8")
                print(f"partial FC, {world} processes: measured", flush=True)
        measured["load"].append(round(os.getloadavg()[1], 1))
        raw.write_text(json.dumps(measured, indent=1), encoding="utf-8")
    text = render(json.loads(raw.read_text(encoding="utf-8")))
    (RESULTS / "distributed.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
