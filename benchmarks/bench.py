"""Helpers that the benchmarks share: options, kept results, pages, the machine, intervals, new
processes, neighbours, and training of recipes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import multiprocessing
import os
import platform
import resource
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

HERE = Path(__file__).parent
RESULTS, RAW = HERE / "results", HERE / "results" / "raw"
DOCS, MODELS = HERE.parent / "docs", HERE.parent / "models"
WORK = HERE / "work"
"""Scratch folders of benchmarks that take long; git ignores them."""
FASHION = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts its files."""
Row = dict[str, Any]


def one_thread() -> None:
    """Compute on one thread, in all libraries and in child processes."""
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    threadpool_limits(1)


# Options and kept results


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a script's docstring unchanged."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def resume_arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for a script that keeps each row in results/raw and resumes from there."""
    parser, fresh = arguments(doc), "measure again in benchmarks/work; the kept rows stay"
    parser.add_argument("--fresh", action="store_true", help=fresh)
    parser.add_argument(
        "--write", action="store_true", help="write the page from the kept rows; run nothing"
    )
    return parser


def icon_options(doc: str | None, quick: Callable[[], object]) -> argparse.Namespace:
    """Return the arguments of a script that embeds icons; with --quick, run `quick` and exit."""
    parser = resume_arguments(doc)
    parser.add_argument("--icons", type=Path, default=Path("package"), help="npm's package")
    parser.add_argument("--quick", action="store_true", help="see above")
    options = parser.parse_args()
    one_thread()
    if options.quick:
        quick()
        raise SystemExit
    return options


def write(path: Path, text: str) -> None:
    """Replace a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_lines(file: Path) -> list[Row]:
    """Return the JSON objects in a file, one per line; [] if the file is missing."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def append(file: Path, row: Row) -> None:
    """Append a JSON object to a file, and print it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(row, flush=True)


class Kept:
    """Rows of results/raw/NAME.jsonl. The columns `keys` identify a row; --fresh starts with no
    rows.
    """

    def __init__(self, name: str, options: argparse.Namespace, keys: Sequence[str]) -> None:
        self.name, self.options, self.keys = name, options, keys
        self.file = (WORK if options.fresh else RAW) / f"{name}.jsonl"
        if options.fresh:
            self.file.unlink(missing_ok=True)
        self.rows = read_lines(self.file)
        self.known = len(self.rows)

    def missing(self, jobs: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield the jobs (tuples of the keys' values) that have no row yet; none with --write."""
        done = {json.dumps([row.get(key) for key in self.keys]) for row in self.rows}
        if not self.options.write:
            yield from (job for job in jobs if json.dumps(job) not in done)

    def add(self, row: Row) -> None:
        """Keep and print a new row, with the commit at which it was measured."""
        row = row | {"commit": commit()}
        append(self.file, row)
        self.rows.append(json.loads(json.dumps(row)))

    def finish(self, text: str) -> None:
        """Print the page, and write it unless --fresh is set."""
        text = with_commits(text, self.rows)
        print(text)
        if not self.options.fresh:
            write(RESULTS / f"{self.name}.md", text)
        again = "" if self.options.fresh or not self.known else " --fresh measures them again."
        new = len(self.rows) - self.known
        print(f"{new} new rows; {self.known} rows are from {self.file.name}.{again}")


def finish(
    name: str,
    raw: Any,
    text: str,
    keep: bool = True,
    folder: Path = RESULTS,
    measured: bool = True,
) -> None:
    """Print a page; with `keep`, write it to NAME.md and the results to raw/NAME.json.

    Both name the current commit if `raw` (a dictionary, or a list of them) was `measured` now.
    """
    for row in rows_of(raw) if measured else ():
        row["commit"] = commit()
    text = with_commits(text, raw)
    if keep:
        write(folder / "raw" / f"{name}.json", json.dumps(raw, indent=1, ensure_ascii=False) + "\n")
        write(folder / f"{name}.md", text)
    print(text)


# The measured commit


@functools.cache
def commit() -> str:
    """Return the short hash of the measured commit.

    "+changes" follows it if files under version control differ, except pages and results, which
    the benchmarks write.
    """

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        line = ["git", "-C", str(HERE), *words]
        return subprocess.run(line, capture_output=True, text=True)

    head = git("rev-parse", "--short", "HEAD")
    if head.returncode:
        return "unknown"
    written = ":(top,exclude)*.md", ":(top,exclude)benchmarks/results"
    clean = git("diff", "--quiet", "HEAD", "--", ":/", *written).returncode == 0
    return head.stdout.strip() + ("" if clean else "+changes")


def rows_of(raw: Any) -> list[Row]:
    """Return the rows of a result, which is a dictionary or a list of them."""
    return [raw] if isinstance(raw, dict) else list(raw)


def with_commits(text: str, raw: Any) -> str:
    """Return a page with a last line that names the commits at which its rows were measured."""
    rows = rows_of(raw)
    commits = dict.fromkeys(row["commit"] for row in rows if "commit" in row)
    if not commits:
        return text
    earlier = "" if all("commit" in row for row in rows) else "; some rows are older"
    return f"{text.rstrip()}\n\nMeasured at commit {', '.join(commits)}{earlier}.\n"


# Pages


def page(text: str) -> str:
    """Return Markdown from an indented template.

    The lines of a paragraph or of a list item are joined; lines of tables stay, and several blank
    lines become one.
    """
    lines: list[str] = [""]
    for line in map(str.strip, text.strip().splitlines()):
        begins = line.startswith(("|", "- ", "#", "```"))
        if begins or not line or not lines[-1] or lines[-1].startswith(("|", "#")):
            lines += [line] if line or lines[-1] else []
        else:
            lines[-1] += f" {line}"
    return "\n".join(lines[1:]) + "\n"


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def half_width(values: Sequence[float], level: float = 0.95) -> float:
    """Return the half-width of Student's interval of the mean; NaN for one value."""
    from scipy.stats import t

    if len(values) < 2:
        return float("nan")
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    return float(t.ppf(0.5 + level / 2, len(values) - 1) * error)


def resampled_half_width(values: Sequence[float], tested: float) -> float:
    """Return the half-width of the 95 % interval of a mean over random splits of the same items.

    The splits share items, so Student's interval is too narrow. `tested` is the share of the items
    that a split tests. Source: Nadeau & Bengio, "Inference for the generalization error", Machine
    Learning 52, 2003: the variance is (1/n + tested / (1 - tested)) s².
    """
    return half_width(values) * float(np.sqrt(1 + len(values) * tested / (1 - tested)))


def decimals(value: float, places: int = 3, sign: bool = False) -> str:
    """Return a number in the format of the tables: ".931", "−.004", "1.250"."""
    text = f"{abs(value):.{places}f}"
    text = text.removeprefix("0") if text.startswith("0.") else text
    minus = value < 0 and float(text) != 0
    return ("−" if minus else "+" if sign else "") + text


def interval(values: Sequence[float], places: int = 3, sign: bool = False) -> str:
    """Return the mean ± the half-width of the 95 % interval, or the only value."""
    mean = decimals(float(np.mean(values)), places, sign)
    return mean if len(values) < 2 else f"{mean} ± {decimals(half_width(values), places)}"


def chosen(rows: Iterable[Row], **values: Any) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in values.items())]


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure atomically."""
    figure.savefig(path.with_suffix(".tmp"), format="png", dpi=90)
    path.with_suffix(".tmp").replace(path)


# Numbers from papers


@functools.cache
def _published() -> dict[str, Any]:
    return tomllib.loads((HERE / "published.toml").read_text(encoding="utf-8"))


def published(table: str, row: str, column: str) -> float:
    """Return a number from a paper; a KeyError names what published.toml lacks."""
    if not has(table, row, column):
        raise KeyError(f"published.toml has no {table}, {row}, {column}.")
    rows, columns = _published()[table]["rows"], _published()[table]["columns"]
    return float(rows[row][columns.index(column)])


def has(table: str, row: str, column: str) -> bool:
    return row in _published()[table]["rows"] and column in _published()[table]["columns"]


# The machine


def machine() -> str:
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def versions(*packages: str) -> str:
    numbers = [f"{name} {version(name)}" for name in packages]
    return ", ".join([*numbers, f"Python {platform.python_version()}"])


def load() -> float:
    return round(os.getloadavg()[0], 1)


def machine_of(*packages: str) -> Row:
    """Return a page's facts about the machine: its name, load, and versions of packages."""
    return {"machine": machine(), "versions": versions(*packages), "load": load()}


def status(field: str) -> int:
    """Return a memory field of this process, such as "VmRSS" or "VmHWM", in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


# New processes


def alone(work: Callable[..., Any], *values: Any, cpu: int | None = None, new: bool = True) -> Any:
    """Run a function in a new process, and return its result.

    Args:
        work: a function of a module; its errors are raised here.
        values: the function's arguments.
        cpu: CPU seconds after which the process is stopped.
        new: whether the process starts afresh; otherwise it is a copy of this one.

    Raises:
        TimeoutError: the process exceeded a limit of CPU seconds (`cpu`, or one that `work` set).
        BrokenProcessPool: the process died for another reason, such as a lack of memory.
    """
    context = multiprocessing.get_context("spawn" if new else "fork")
    try:
        with ProcessPoolExecutor(1, context, initializer=_limit, initargs=(cpu,)) as pool:
            future = pool.submit(work, *values)
            (process,) = pool._processes.values()
            return future.result()
    except BrokenProcessPool:
        if process.exitcode != -signal.SIGXCPU:
            raise
        raise TimeoutError("The process was stopped at its limit of CPU seconds.") from None


def _limit(cpu: int | None) -> None:
    if cpu is not None:
        spent = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (spent + cpu, spent + cpu + 5))


# Neighbours, timing and training


def nearest(
    queries: np.ndarray, references: np.ndarray, k: int, inner: bool = False, own: bool = False
) -> np.ndarray:
    """Return the nearest rows (Q, k) by distance or `inner` product; `own` leaves out the query
    itself.
    """
    norms = 0 if inner else (references**2).sum(1)
    chunks = []
    for start in range(0, len(queries), 500):
        d = norms - 2 * queries[start : start + 500] @ references.T
        query = np.arange(len(d))[:, None]
        if own:
            d[query[:, 0], start + query[:, 0]] = np.inf
        some = np.argpartition(d, k - 1, axis=1)[:, :k]
        chunks.append(some[query, np.argsort(d[query, some], axis=1, kind="stable")])
    return np.concatenate(chunks)


def votes(labels: np.ndarray, near: np.ndarray) -> np.ndarray:
    """Return how many of the nearest 1 … k items are of each class, shape (Q, k, classes)."""
    counts: np.ndarray = np.eye(labels.max() + 1, dtype=np.int16)[labels[near]].cumsum(1)
    return counts


def error(train: np.ndarray, labels: Any, test: np.ndarray, truth: Any, own: bool = False) -> float:
    """Return the 5-nearest-neighbour error by majority vote; ties go to the lower class."""
    near = nearest(test, train, 5, own=own)
    return float((votes(labels, near)[:, -1].argmax(1) != truth).mean())


def in_turns(
    contestants: dict[str, Callable[[], Any]],
    rounds: int,
    cpu_seconds: Callable[[], float] = time.process_time,
) -> dict[str, dict[str, list[float]]]:
    """Return wall and CPU seconds of each contestant in every round, after a warm-up round."""
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"wall": [], "cpu": []} for name in contestants
    }
    for number in range(rounds + 1):
        for name, call in contestants.items():
            wall, cpu = time.perf_counter(), cpu_seconds()
            call()
            if number:
                seconds[name]["wall"].append(time.perf_counter() - wall)
                seconds[name]["cpu"].append(cpu_seconds() - cpu)
    return seconds


def train_and_judge(
    table: dict[str, Any], folder: Path, baseline: bool = False
) -> tuple[dict[str, dict[str, float]], float]:
    """Train a recipe in an empty folder; return its metrics by title, and its CPU seconds."""
    from retrieval.evaluation.evaluate_run import evaluate
    from retrieval.recipe.read import check_recipe
    from retrieval.training.trainer import train_run

    shutil.rmtree(folder, ignore_errors=True)
    began = time.process_time()
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        run = train_run(folder, check_recipe(table), report=len)
        seconds = time.process_time() - began
        return evaluate(run, baseline=baseline).metrics, seconds
