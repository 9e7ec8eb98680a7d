"""How long `import retrieval` and `retrieval --help` take, each in a process of its own.

    python benchmarks/startup.py --repeat 21 --write

Prints medians of wall and CPU time (user + system), beside a Python that does nothing, and which heavy modules were
loaded (none should be). Wall time counts other work on the machine; CPU time hardly does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

CALLS = {
    "python, nothing": ["-c", "pass"],
    "import retrieval": ["-c", "import retrieval"],
    "retrieval --help": ["-m", "retrieval.cli", "--help"],
    "retrieval train --help": ["-m", "retrieval.cli", "train", "--help"],
    "retrieval plugins --help": ["-m", "retrieval.cli", "plugins", "--help"],
}
HEAVY = ("torch", "numpy", "PIL", "pydantic", "onnxruntime", "faiss", "sklearn", "pytorch_metric_learning")
RESULTS = Path(__file__).parent / "results" / "startup.md"


def once(arguments: list[str]) -> tuple[float, float]:
    """Return wall and CPU seconds of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def heavy(arguments: list[str]) -> list[str]:
    """Return the heavy modules that a call loads, by Python's own report of imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], check=True, capture_output=True, text=True
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    return [name for name in HEAVY if name in loaded]


def main() -> None:
    """Measure, print a table, and write it with `--write`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=21, help="processes of each kind")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} too")
    options = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CALLS}
    for _ in range(
        options.repeat + 1
    ):  # in turn, so that all meet the same load; the first round warms the file cache
        for name, arguments in CALLS.items():
            times[name].append(once(arguments))
    lines = [
        "| call | wall, median | wall, fastest | CPU, median | heavy modules |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, arguments in CALLS.items():
        walls, cpus = zip(*times[name][1:], strict=True)
        cells = [statistics.median(walls), min(walls), statistics.median(cpus)]
        found = ", ".join(heavy(arguments)) or "none"
        lines.append(f"| `{name}` | {' | '.join(f'{x:.3f} s' for x in cells)} | {found} |")
    setting = {
        "python": platform.python_version(), "processors": os.cpu_count(), "processes of each kind": options.repeat,
        "load average, 1 min": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    text = "\n".join(lines)
    print(text, json.dumps(setting), sep="\n\n")
    if options.write:
        note = "\n".join(f"- {name}: {value}" for name, value in setting.items())
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(
            f"# Start-up\n\n`python benchmarks/startup.py --repeat {options.repeat} --write`; the aim is under 0.3 s.\n\n"
            f"{text}\n\n{note}\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
