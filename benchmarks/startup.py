"""How long `import retrieval` and `retrieval --help` take, each in a process of its own.

    python benchmarks/startup.py --repeat 21 --write

Prints medians of wall and CPU time (user + system), beside a Python that does nothing, and which heavy modules were
loaded (none should be, but for what trains). Wall time counts other work on the machine; CPU time hardly does. Modules are
compiled once, before the first round that counts.
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
RECIPE = Path(__file__).parents[1] / "models" / "digits" / "recipe.toml"
TRAINING = {
    "import torch": ["-c", "import torch"],
    "import torch, torchvision": ["-c", "import torch, torchvision"],
    "retrieval check": ["-m", "retrieval.cli", "check", str(RECIPE)],
}
HEAVY = ("torch", "numpy", "PIL", "pydantic", "onnxruntime", "faiss", "sklearn", "pytorch_metric_learning")
RESULTS = Path(__file__).parent / "results" / "startup.md"


def compiling() -> dict[str, str]:
    """Return this environment, in which Python keeps what it has compiled."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def once(arguments: list[str]) -> tuple[float, float]:
    """Return wall and CPU seconds of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=compiling())
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


def table(calls: dict[str, list[str]], repeat: int) -> str:
    """Return a table of calls, each in so many processes, in turn: so all meet the same load. A first round, which warms the file cache, does not count."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeat + 1):
        for name, arguments in calls.items():
            times[name].append(once(arguments))
    lines = [
        "| call | wall, median | wall, fastest | CPU, median | heavy modules |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, arguments in calls.items():
        walls, cpus = zip(*times[name][1:], strict=True)
        cells = [statistics.median(walls), min(walls), statistics.median(cpus)]
        found = ", ".join(heavy(arguments)) or "none"
        lines.append(f"| `{name}` | {' | '.join(f'{x:.3f} s' for x in cells)} | {found} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, and write it with `--write`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=21, help="processes of each kind")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name} too")
    options = parser.parse_args()
    light, training = table(CALLS, options.repeat), table(TRAINING, options.repeat)
    setting = {
        "python": platform.python_version(), "processors": os.cpu_count(), "processes of each kind": options.repeat,
        "load average, 1 min": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    text = f"{light}\n\nBefore training: `retrieval check` of the recipe `models/digits`; the aim is under 4 s of CPU time.\n\n{training}"
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
