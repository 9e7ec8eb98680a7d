"""The cost of taking feedback: the same searches of two servers, with and without it, in turns.

    python benchmarks/feedback_cost.py # four minutes; writes results/feedback_cost.md
    python benchmarks/feedback_cost.py --only vector --rounds 5 # a part, which is not kept

`retrieval serve` and `retrieval serve --feedback` answer requests over one kept connection, half a
second each, in turns. The measure is the CPU time (user and system) of all processes of a server
per search, from the start of one of its turns to the start of the next: searches are written during
its pause, and paid for. On a busy machine other processes slow some turns, so the figure of a
contestant is the mean of the fastest quarter of its turns. The indexes are those of serve.py, in
benchmarks/work/serve, without its large photos, whose decoding takes most of their time; the first
run also makes them.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench import WORK, arguments, finish, half_width, machine_of, markdown, one_thread, page
from serve import TASKS, Task, ask, started

SECONDS = 0.5
"""Length of a turn."""
PARTS = 6
"""Parts of the turns, for an interval."""


def cpu_of(process: subprocess.Popen[str]) -> float:
    """Return the CPU seconds of a process and its child processes, to the nanosecond."""
    top = psutil.Process(process.pid)
    members = (top, *top.children(recursive=True))
    # The clock of a process in Linux, as glibc's clock_getcpuclockid(3) makes it.
    return sum(time.clock_gettime((~member.pid << 3) | 2) for member in members)


def measure(task: Task, work: Path, rounds: int) -> dict[str, list[float]]:
    """Return the CPU milliseconds per search of each turn, off and on."""
    requests = task.requests()
    copy = work / "with feedback" / task.folder.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(task.folder / "index", copy)
    servers = {"off": (str(task.folder / "index"),), "on": (str(copy), "--feedback")}
    turns: dict[str, list[float]] = {title: [] for title in servers}
    with ExitStack() as stack:
        running = {}
        for title, words in servers.items():
            serve = ("-m", "retrieval.cli", "serve", *words, "--port", "0")
            running[title] = stack.enter_context(started(*serve))
            asyncio.run(ask(running[title][1], requests, 1, 4 * SECONDS))
        begun: dict[str, tuple[float, int]] = {}
        for number in range(rounds + 1):
            for title in sorted(running, reverse=bool(number % 2)):
                process, port = running[title]
                cpu = cpu_of(process)
                if title in begun:
                    earlier, count = begun[title]
                    turns[title].append(round(1000 * (cpu - earlier) / count, 4))
                begun[title] = cpu, asyncio.run(ask(port, requests, 1, SECONDS))
    return turns


def fastest(turns: list[float]) -> float:
    """Return the mean of the fastest quarter of turns."""
    return float(np.mean(sorted(turns)[: max(1, len(turns) // 4)]))


def summary(turns: dict[str, list[float]]) -> tuple[float, float, float, float]:
    """Return the milliseconds off and on, their ratio, and the half-width of its 95 % interval."""
    ratios = [
        fastest(turns["on"][part::PARTS]) / fastest(turns["off"][part::PARTS])
        for part in range(PARTS)
    ]
    return fastest(turns["off"]), fastest(turns["on"]), float(np.mean(ratios)), half_width(ratios)


def render(raw: dict[str, Any]) -> str:
    lines = []
    for name, turns in raw["tasks"].items():
        off, on, ratio, half = summary(turns)
        change = f"{100 * (ratio - 1):+.1f} ± {100 * half:.1f} %"
        lines.append([name, f"{off:.3f}", f"{on:.3f}", change])
    return page(f"""
        # The cost of taking feedback

        `python benchmarks/feedback_cost.py`: CPU milliseconds (user and system) per search over
        HTTP of all processes of `retrieval serve` without and with `--feedback`, in turns of
        {SECONDS:g} s: {raw["rounds"]} of each, of which the fastest quarter counts. The searches
        of a turn are written during the turn or the pause after it, which counts. *On ÷ off* is the
        mean of {PARTS} parts of the turns with its 95 % interval. {raw["machine"]},
        {raw["versions"]}; load average {raw["load"]} at the end, of which the client is a part.

        {markdown(["query", "off", "on", "on ÷ off"], lines)}
    """)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--work", type=Path, default=WORK / "serve", help="folder of indexes and queries"
    )
    parser.add_argument("--only", help="a word of the task's name; the results are not kept")
    parser.add_argument("--rounds", type=int, default=100, help="turns of each contestant")
    options = parser.parse_args()
    one_thread()
    options.work.mkdir(parents=True, exist_ok=True)
    took: dict[str, dict[str, list[float]]] = {}
    for name, make in TASKS.items():
        if (options.only or "") in name and "JPEG" not in name:
            took[name] = measure(make(options.work), options.work, options.rounds)
            print(name, summary(took[name]), flush=True)
    raw = machine_of("faiss-cpu", "onnxruntime", "uvicorn", "starlette")
    raw |= {"rounds": options.rounds, "tasks": took}
    finish("feedback_cost", raw, render(raw), keep=not options.only)


if __name__ == "__main__":
    main()
