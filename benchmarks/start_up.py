"""CPU time of commands from the start of Python to their end.

    python benchmarks/start_up.py                  # about two minutes
    python benchmarks/start_up.py --old FOLDER     # beside an earlier checkout, which takes turns

Each run is a new process with one thread. Modules are compiled before the first measured run, as
in an installed package.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import HERE, arguments, finish, machine_of, markdown, page

ROOT = HERE.parent
RECIPE = ROOT / "models" / "digits" / "recipe.toml"
COMMANDS: dict[str, tuple[list[str], float | None]] = {
    "`import numpy`": (["-c", "import numpy"], None),
    "`import torch`, garbage collection off": (
        ["-c", "import gc; gc.disable(); import torch"],
        None,
    ),
    "`import retrieval`": (["-c", "import retrieval"], 0.03),
    "`retrieval --help`": (["-m", "retrieval.cli", "--help"], 0.15),
    "`retrieval check models/digits/recipe.toml`": (
        ["-m", "retrieval.cli", "check", str(RECIPE)],
        1.5,
    ),
}
"""Arguments of Python for each row, and the CPU seconds wanted."""


def seconds(words: list[str], checkout: Path, folder: Path) -> float:
    """Run Python once with a checkout's packages; return the CPU seconds, user and system."""
    environment = os.environ | {
        "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'plugins'}",
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "PYTHONDONTWRITEBYTECODE": "",
        "OMP_NUM_THREADS": "1",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(checkouts: dict[str, Path], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each command by checkout; checkouts and commands take turns."""
    took: dict[str, dict[str, list[float]]] = {
        title: {side: [] for side in checkouts} for title in COMMANDS
    }
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds + 1):
            for title, (words, _) in COMMANDS.items():
                for side, checkout in checkouts.items():
                    value = seconds(words, checkout, Path(name))
                    if number:
                        took[title][side].append(value)
    return took


def render(raw: dict[str, Any]) -> str:
    sides = next(iter(raw["seconds"].values()))
    lines = []
    for title, rows in raw["seconds"].items():
        wanted = COMMANDS[title][1]
        medians = [f"{statistics.median(rows[side]):.2f} ({min(rows[side]):.2f})" for side in sides]
        lines.append([title, *medians, "" if wanted is None else f"{wanted:.2f}"])
    return page(f"""
        # Start-up

        `python benchmarks/start_up.py`: CPU seconds, user and system, of a new process of Python;
        the median of {raw["rounds"]} runs in turn, and the least. {raw["machine"]}, one thread,
        {raw["versions"]}; load average {raw["load"]} at the start.

        {markdown(["command", *sides, "wanted"], lines)}

        `retrieval check` builds the recipe's parts and runs one training batch, so it imports
        torch, whose own import is the second row.
    """)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--old", type=Path, help="an earlier checkout to measure beside this one")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    checkouts = {"this checkout": ROOT}
    if options.old is not None:
        checkouts["earlier checkout"] = options.old.resolve()
    raw = machine_of("torch", "numpy", "pytorch-metric-learning", "scipy")
    raw |= {"rounds": options.rounds, "seconds": measure(checkouts, options.rounds)}
    finish("start_up", raw, render(raw))


if __name__ == "__main__":
    main()
