"""What the benchmarks share: tables, intervals, the machine, kept results, and recipes that are
trained and judged.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t

HERE = Path(__file__).parent
RESULTS = HERE / "results"
RAW = RESULTS / "raw"
WORK = HERE / "work"
"""Scratch folders of benchmarks that take long; git ignores them."""
FASHION = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts its files."""


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a script's docstring as it is written."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def half_width(values: Sequence[float], level: float = 0.95) -> float:
    """Return how far Student's interval reaches to either side of the mean; NaN for one value."""
    if len(values) < 2:
        return float("nan")
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    return float(t.ppf(0.5 + level / 2, len(values) - 1) * error)


def decimals(value: float, places: int = 3, sign: bool = False) -> str:
    """Return a number as the tables write it: ".931", "−.004"; 1 and more keep the digit before the
    point.
    """
    text = f"{abs(value):.{places}f}"
    text = text.removeprefix("0") if text.startswith("0.") else text
    minus = value < 0 and float(text) != 0
    return ("−" if minus else "+" if sign else "") + text


def interval(values: Sequence[float], places: int = 3, sign: bool = False) -> str:
    """Return mean ± half-width of the 95 % interval, or the one value that there is."""
    mean = decimals(float(np.mean(values)), places, sign)
    return mean if len(values) < 2 else f"{mean} ± {decimals(half_width(values), places)}"


def machine() -> str:
    """Return the processor's name and the number of cores."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def versions(*packages: str) -> str:
    """Return the versions of packages and of Python."""
    found = [f"{name} {version(name)}" for name in packages]
    return ", ".join([*found, f"Python {platform.python_version()}"])


def load() -> float:
    """Return the machine's load average of the last minute."""
    return round(os.getloadavg()[0], 1)


def status(field: str) -> int:
    """Return a field of this process's memory, as "VmRSS" or "VmHWM", in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def write(path: Path, text: str) -> None:
    """Replace a file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file's lines; [] without a file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def append(file: Path, row: dict[str, Any], show: bool = True) -> None:
    """Keep one more JSON object, and print it unless `show` is false."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row, ensure_ascii=False) + "\n")
    if show:
        print(row, flush=True)


def resume_arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of a script that keeps each row in results/raw and goes on from there."""
    parser = arguments(doc)
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="measure everything again, in benchmarks/work; what is kept stays as it is",
    )
    return parser


class Kept:
    """Rows of results/raw/NAME.jsonl, or of a new file in benchmarks/work where all is measured
    again.

    Args:
        name: of the benchmark.
        fresh: whether to leave what was kept alone.
    """

    def __init__(self, name: str, fresh: bool) -> None:
        self.name, self.fresh = name, fresh
        self.file = (WORK if fresh else RAW) / f"{name}.jsonl"
        if fresh:
            self.file.unlink(missing_ok=True)
        self.rows = read_lines(self.file)
        self.found = len(self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row that was measured now."""
        append(self.file, row)
        self.rows.append(json.loads(json.dumps(row)))

    def finish(self, page: str) -> None:
        """Print the page, write it unless all was measured again, and say what of it was measured
        now.
        """
        print(page)
        if not self.fresh:
            write(RESULTS / f"{self.name}.md", page)
        print(
            f"{len(self.rows) - self.found} rows were measured now; {self.found} are kept ones of"
            f" {self.file.name}."
            + ("" if self.fresh or not self.found else " --fresh measures all of them again.")
        )


def finish(name: str, raw: Any, page: str) -> None:
    """Keep what was measured as results/raw/NAME.json, write results/NAME.md, and print it."""
    write(RAW / f"{name}.json", json.dumps(raw, indent=1, ensure_ascii=False) + "\n")
    write(RESULTS / f"{name}.md", page)
    print(page)


def nearest(
    queries: np.ndarray, references: np.ndarray, k: int, inner: bool = False, own: bool = False
) -> np.ndarray:
    """Return rows (Q, k), nearest first; `inner` by the largest inner product, `own` leaves out the
    item itself.
    """
    norms = 0 if inner else (references**2).sum(1)
    found = []
    for start in range(0, len(queries), 500):
        d = norms - 2 * queries[start : start + 500] @ references.T
        at = np.arange(len(d))[:, None]
        if own:
            d[at[:, 0], start + at[:, 0]] = np.inf
        some = np.argpartition(d, k - 1, axis=1)[:, :k]
        found.append(some[at, np.argsort(d[at, some], axis=1, kind="stable")])
    return np.concatenate(found)


def votes(labels: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Return how many of the nearest 1 … k items are of each class, (Q, k, classes)."""
    counts: np.ndarray = np.eye(labels.max() + 1, dtype=np.int16)[labels[near]].cumsum(1)
    return counts


def error(train: np.ndarray, labels: Any, test: np.ndarray, truth: Any, own: bool = False) -> float:
    """Return the 5-nearest-neighbour error by plain votes; ties go to the lower class."""
    near = nearest(test, train, 5, own=own)
    return float((votes(labels, near)[:, -1].argmax(1) != truth).mean())


def save_figure(figure: Any, path: Path) -> None:
    """Write a picture of matplotlib as a whole."""
    figure.savefig(path.with_suffix(".tmp"), format="png", dpi=90)
    path.with_suffix(".tmp").replace(path)


def in_turns(
    contestants: dict[str, Callable[[], Any]], rounds: int, warm: bool = True
) -> dict[str, dict[str, list[float]]]:
    """Call each contestant once a round, and return its wall and CPU seconds of every round.

    Args:
        contestants: what is timed, by name.
        rounds: how many calls count.
        warm: whether one more call of each comes first and does not count.
    """
    taken: dict[str, dict[str, list[float]]] = {
        name: {"wall": [], "cpu": []} for name in contestants
    }
    for number in range(rounds + warm):
        for name, call in contestants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            if number >= warm:
                taken[name]["wall"].append(time.perf_counter() - wall)
                taken[name]["cpu"].append(time.process_time() - cpu)
    return taken


def train_and_judge(
    table: dict[str, Any], folder: Path, baseline: bool = False
) -> tuple[dict[str, dict[str, float]], float]:
    """Train a recipe and evaluate it.

    Args:
        table: the recipe.
        folder: the run's; what is there is deleted first.
        baseline: whether the features are evaluated too.

    Returns:
        The figures by title ("trained", and the baseline's), and CPU seconds of training.
    """
    from retrieval.evaluation.evaluate_run import evaluate
    from retrieval.recipe.read import check_recipe
    from retrieval.training.trainer import train

    shutil.rmtree(folder, ignore_errors=True)
    began = time.process_time()
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        run = train(folder, check_recipe(table), report=len)
        seconds = time.process_time() - began
        return evaluate(run, baseline=baseline).metrics, seconds


def child(script: str, *words: object, limit: float | None = None) -> Any:
    """Run a script of this folder in a process of its own, and return the JSON that it prints last.

    Raises:
        RuntimeError: it failed; the message is its last line.
    """
    import subprocess

    line = [sys.executable, str(HERE / script), *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=limit, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1])
    return json.loads(done.stdout.strip().splitlines()[-1])
