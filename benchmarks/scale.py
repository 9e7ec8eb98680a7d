"""What an index of 10⁶ to 10⁹ items needs: bytes, CPU time and machines, from measurements.

    python benchmarks/scale.py             # computes results/scale.md and docs/scale.md
    python benchmarks/scale.py --measure   # also measures training in one process and in two

The constants are those of other benchmarks: results/raw/engines.json has each store at two sizes or
more, serve.json the CPU time in which EfficientNet-Lite0 embeds a photo, ray_embedding.json that of
a Ray cluster. Everything beyond the largest size that was measured is computed, not measured.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

import pages
from bench import (
    DOCS,
    MODELS,
    RAW,
    arguments,
    finish,
    machine_of,
    markdown,
    one_thread,
    page,
    write,
)

SIZES = [10**6, 10**7, 10**8, 10**9]
CORES = 16
MEMORY = 48e9
DISK = 1e12
"""A machine: bytes of memory and disk that an index may take, of 64 GB and 2 TB. A migration takes
as much disk again."""
RATE = 100
BUSY = 0.5
"""Searches a second, and the share of the cores' time that they may take."""
SHORT, LONG = 20, 80
"""Batches of two epochs; their difference has no start of a process in it."""
CLASSES = 5
ITEMS = 24
"""A batch of the recipe `fashion-mnist`."""
GRAPHS = ("folder, hnsw", "Postgres, graph", "Milvus, graph")
EXACT = ("folder, flat", "Postgres, exact", "Milvus, exact")


# Constants


def raw(name: str) -> Any:
    return json.loads((RAW / f"{name}.json").read_text(encoding="utf-8"))


class System:
    """What a store takes, as a function of its items: a line through the smallest and the largest
    measured size, in the number of items or, for the search of a graph, in its logarithm.
    """

    def __init__(self, name: str, sizes: dict[str, Any]) -> None:
        self.name = name
        measured = {int(size): systems[name] for size, systems in sizes.items() if name in systems}
        rows = sorted(measured.items())
        self.sizes = [size for size, _ in rows]
        self.rows = [row for _, row in rows]

    def line(self, values: list[float], items: float, log: bool = False) -> float:
        """Return the value at a number of items; it grows and is never below the smallest."""
        at = [math.log(size) if log else size for size in self.sizes]
        slope = max(0.0, (values[-1] - values[0]) / (at[-1] - at[0]))
        return values[0] + slope * ((math.log(items) if log else items) - at[0])

    def disk(self, items: float) -> float:
        """Return the bytes of an index."""
        return self.line([row["MB"] * 2**20 for row in self.rows], items)

    def memory(self, items: float) -> float:
        """Return the bytes that searches read: Milvus holds them, others read files."""
        if self.name.startswith("Milvus"):
            return self.line([row["memory"] * 2**20 for row in self.rows], items)
        return self.disk(items)

    def search(self, items: float) -> float:
        """Return the CPU seconds of a search."""
        cpu = [row["search 1"]["cpu"] / 1000 for row in self.rows]
        return self.line(cpu, items, log=self.name in GRAPHS)

    def build(self, items: float) -> float:
        """Return the CPU seconds of loading and of the graph, which takes N log N."""
        last = self.rows[-1]
        seconds = last["load"]["cpu"] * items / 1000 / 1000
        if "graph" in last:
            size = self.sizes[-1]
            growth = items * math.log(items) / (size * math.log(size))
            seconds += last["graph"]["cpu"] / 1000 * growth
        return float(seconds)

    def machines(self, items: float) -> int:
        """Return the machines that hold an index and answer `RATE` searches a second.

        Each holds as many items, and answers each search.
        """

        def enough(count: int) -> bool:
            part = items / count
            return (
                self.memory(part) <= MEMORY
                and self.disk(part) <= DISK
                and RATE * self.search(part) <= BUSY * CORES
            )

        most = 1
        while not enough(most):
            most *= 2
        low = most // 2
        while most - low > 1:
            middle = (low + most) // 2
            if enough(middle):
                most = middle
            else:
                low = middle
        return most


def photo_seconds() -> float:
    """Return the CPU seconds in which EfficientNet-Lite0 embeds a JPEG."""
    tasks = raw("serve")["tasks"]
    (rows,) = (task["by hand"] for name, task in tasks.items() if name.startswith("EfficientNet"))
    return float(np.median([row["cpu"] for row in rows])) / 1000


# Tables


def amount(value: float, unit: str) -> str:
    """Return two digits or more of a number, and its unit."""
    if value < 10:
        return f"{value:.1f} {unit}"
    return f"{value:,.0f} {unit}"


def size(value: float) -> str:
    for unit, length in (("TB", 1e12), ("GB", 1e9)):
        if value >= length:
            return amount(value / length, unit)
    return amount(value / 1e6, "MB")


def duration(seconds: float) -> str:
    for unit, least, length in (("days", 172_800, 86_400), ("hours", 7200, 3600), ("min", 120, 60)):
        if seconds >= least:
            return amount(seconds / length, unit)
    if seconds >= 1:
        return amount(seconds, "s")
    return amount(1000 * seconds, "ms")


def power(items: int) -> str:
    digits = str(round(math.log10(items))).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"


def stores_table() -> str:
    sizes = raw("engines")["sizes"]
    lines = []
    for items in SIZES:
        for name in EXACT + GRAPHS:
            system = System(name, sizes)
            lines.append(
                [
                    power(items),
                    name,
                    size(system.disk(items)),
                    size(system.memory(items)),
                    duration(system.build(items)),
                    duration(system.search(items)),
                    f"{system.machines(items):,}",
                ]
            )
    head = ["items", "store", "disk", "memory", "CPU time to build", "CPU time of a search"]
    return markdown([*head, f"machines for {RATE} searches a second"], lines)


def photos_table(training: dict[str, Any]) -> str:
    """Return the table of embedding and training, by machines."""
    each = photo_seconds()
    step = training["seconds an image"]["2"]
    lines = []
    for items in SIZES:
        cells = [duration(items * each / CORES / machines) for machines in (1, 10, 100)]
        epochs = [duration(items * step / CORES / machines) for machines in (1, 10, 100)]
        lines.append([power(items), *cells, *epochs])
    head = ["photos"]
    for work in ("embedding", "an epoch"):
        head += [f"{work}, {machines} machine{'s' * (machines > 1)}" for machines in (1, 10, 100)]
    return markdown(head, lines)


def training_table(training: dict[str, Any]) -> str:
    alone, two = (training["seconds an image"][count] for count in ("1", "2"))
    line = [f"{1000 * alone:.2f}", f"{1000 * two:.2f}", f"{two / alone:.2f} ×"]
    return markdown(["one process, CPU ms an image", "two processes", "two against one"], [line])


def render(training: dict[str, Any]) -> str:
    head = page(f"""
        # What a million to a billion items need

        `python benchmarks/scale.py` computes this from engines.json, serve.json and scale.json in
        benchmarks/results/raw. Vectors have 128 numbers. A machine has {CORES} cores and
        lends an index {MEMORY / 1e9:.0f} GB of memory and {DISK / 1e12:.0f} TB of disk; searches
        may take half of its cores' time. Training was measured on: {training["machine"]},
        {training["versions"]}, load {training["load"]}.
    """)
    tables = {
        "Stores": stores_table(),
        "Photos": photos_table(training),
        "Training in two processes": training_table(training),
    }
    return head + "".join(f"\n## {title}\n\n{table}\n" for title, table in tables.items())


# Training


def training_seconds(processes: int, batches: int) -> float:
    """Return the CPU seconds of a short training in some processes, with their start."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        command += ["-m", "retrieval.cli"]
        recipe = MODELS / "fashion-mnist" / "recipe.toml"
        command += ["train", str(recipe), "--output", f"{folder}/run"]
        command += ["--set", f"sampler.batches={batches}"]
        subprocess.run(command, check=True)
    return spent() - before


def measure() -> dict[str, Any]:
    """Return the CPU seconds of an image in a training step, by the number of processes."""
    images = (LONG - SHORT) * CLASSES * ITEMS
    return {
        **machine_of("torch", "accelerate"),
        "seconds an image": {
            str(count): (training_seconds(count, LONG) - training_seconds(count, SHORT)) / images
            for count in (1, 2)
        },
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--measure", action="store_true", help="measure training again")
    options = parser.parse_args()
    one_thread()
    if options.measure:
        training = measure()
    else:
        training = raw("scale")
    finish("scale", training, render(training), measured=options.measure)
    write(DOCS / "scale.md", pages.written("scale.md"))


if __name__ == "__main__":
    main()
