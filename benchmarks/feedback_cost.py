"""The cost of taking feedback: the same searches of two servers, with and without it, in turns.

    python benchmarks/feedback_cost.py # writes results/feedback_cost.md
    python benchmarks/feedback_cost.py --only vector --rounds 5 # a part, which is not kept

One server runs with --feedback and one without; nothing is explored. They take turns of half a
second, and each pair of turns gives a ratio of the CPU time (user and system, of all processes and
threads, with the thread that writes the searches) per request, and of the wall time. Both servers
are started several times, because two processes of the same program differ by a per cent or two.
The indexes are those of serve.py, in benchmarks/work/serve; its large photos are left out, whose
decoding takes most of their time.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench import WORK, arguments, finish, half_width, machine_of, markdown, one_thread, page
from serve import TASKS, ask, cpu_of, started

CONNECTIONS = (1, 8)
Rounds = dict[str, dict[str, list[float]]]
"""Milliseconds per request in each round, by measure and connections, then by "off" and "on"."""


def measure(name: str, work: Path, seconds: float, rounds: int) -> Rounds:
    """Start both servers and let them take turns."""
    task = TASKS[name](work)
    requests = task.requests()
    copy = work / "with feedback" / task.folder.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(task.folder / "index", copy)
    servers = {"off": (task.folder / "index",), "on": (copy, "--feedback")}
    results: Rounds = {}
    with ExitStack() as stack:
        running = {}
        for title, words in servers.items():
            command = ("-m", "retrieval.cli", "serve", *map(str, words), "--port", "0")
            process, line = stack.enter_context(started(*command))
            port = re.search(r":(\d+)/", line)
            assert port is not None, line
            running[title] = process, int(port[1])
            asyncio.run(ask(int(port[1]), requests, 8, 2.0))
        for number in range(rounds):
            for connections in CONNECTIONS:
                # The order alternates, because the machine's speed drifts.
                for title in sorted(running, reverse=bool(number % 2)):
                    process, address = running[title]
                    cpu, began = cpu_of(process), time.perf_counter()
                    count = asyncio.run(ask(address, requests, connections, seconds))
                    wall = time.perf_counter() - began
                    for kind, spent in (("CPU", cpu_of(process) - cpu), ("wall", wall)):
                        turns = results.setdefault(f"{kind}, {connections}", {"off": [], "on": []})
                        turns[title].append(round(1000 * spent / count, 4))
    return results


def summary(starts: list[dict[str, list[float]]]) -> tuple[float, float, float, float]:
    """Return the medians off and on, and the mean over the starts of their median ratio, with the
    half-width of its 95 % interval.
    """
    ratios = [float(np.median(np.divide(start["on"], start["off"]))) for start in starts]
    off, on = (
        statistics.median(value for start in starts for value in start[title])
        for title in ("off", "on")
    )
    return off, on, float(np.mean(ratios)), half_width(ratios)


def render(raw: dict[str, Any]) -> str:
    lines = []
    for name, starts in raw["tasks"].items():
        for key in starts[0]:
            kind, _, connections = key.partition(", ")
            off, on, ratio, half = summary([start[key] for start in starts])
            change = f"{100 * (ratio - 1):+.1f} ± {100 * half:.1f} %"
            lines.append([name, kind, connections, f"{off:.3f}", f"{on:.3f}", change])
    head = ["query", "milliseconds of", "connections", "off", "on", "on ÷ off"]
    return page(f"""
        # The cost of taking feedback

        `python benchmarks/feedback_cost.py`: milliseconds per search of a server without and with
        `--feedback`, medians over {raw["starts"]} starts of both servers with {raw["rounds"]}
        rounds of {raw["seconds"]:g} s each, in turns. *On ÷ off* is the mean over the starts of the
        median ratio within a round, with its 95 % interval over the starts. CPU time is that of all
        processes and threads of the server. {raw["machine"]}, {raw["versions"]}; load average
        {raw["load"]} at the start: the client and other programs share the cores.

        {markdown(head, lines)}
    """)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--work", type=Path, default=WORK / "serve", help="folder of indexes and queries"
    )
    parser.add_argument("--only", help="a word of the task's name; the results are not kept")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=15, help="after each start")
    parser.add_argument("--starts", type=int, default=8, help="of both servers")
    options = parser.parse_args()
    one_thread()
    options.work.mkdir(parents=True, exist_ok=True)
    took: dict[str, list[Rounds]] = {
        name: [] for name in TASKS if (options.only or "") in name and "JPEG" not in name
    }
    for _ in range(options.starts):
        for name, starts in took.items():
            starts.append(measure(name, options.work, options.seconds, options.rounds))
            medians = {key: summary([start[key] for start in starts]) for key in starts[0]}
            print(name, medians, flush=True)
    raw = machine_of("faiss-cpu", "onnxruntime", "uvicorn", "starlette")
    raw |= {"seconds": options.seconds, "rounds": options.rounds, "starts": options.starts}
    raw |= {"tasks": took}
    finish("feedback_cost", raw, render(raw), keep=not options.only)


if __name__ == "__main__":
    main()
