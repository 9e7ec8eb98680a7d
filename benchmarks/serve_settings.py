"""What two settings of the server gain: `--together` with each structure, and `--processes`; contestants in turn in one run.

    python benchmarks/image_vectors.py --cache FOLDER/vectors
    python benchmarks/serve_settings.py --cache FOLDER/serve --vectors FOLDER/vectors --output benchmarks/results/serve_settings.md

The works are those of `serve.py`, in the same cache; wrk asks. All servers of a work run for as long as it is measured.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

from retrieval.serving.index.index import Index
from retrieval.serving.store.structure import Wanted

from serve_data import Work, works
from serve_load import Contestant, Seen

AMONG = "vector among 100,000 × 128"
SPREAD = ("vector among 900 × 32", "small net, PNG of 16 × 16", "EfficientNet-Lite0, JPEG of 640 × 480")
STRUCTURES: dict[str, dict[str, int]] = {"flat": {}, "hnsw": {}, "ivf": {}}
BATCH = "retrieval_search_batch"


class Round(NamedTuple):
    """One contestant in one round.

    Attributes:
        seen: by wrk.
        batch: queries that were searched for at once, on average.
    """

    seen: Seen
    batch: float


Rounds = dict[str, list[Round]]


def with_structure(work: Work, backend: str, folder: Path) -> Work:
    """Return a work over a copy of its index with another structure."""
    made = folder / backend
    made.mkdir()
    with Index.open(work.folder / "index", threads=1) as index:
        index.snapshot(made / "index")
    (made / "queries").symlink_to(work.folder / "queries")
    with Index.open(made / "index", threads=2) as index:
        index.store.restructure(Wanted(backend, STRUCTURES[backend]))
        index.store.compact()
    return Work(made, None, work.many)


def measure(
    work: Work, contestants: Mapping[str, tuple[str, ...]], connections: int, seconds: float, rounds: int
) -> Rounds:
    """Return what each server did in each round."""
    found: Rounds = {name: [] for name in contestants}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(closing(Contestant("ours", work, options)))
            for name, options in contestants.items()
        }
        for turn in range(rounds + 1):  # the first one warms them up
            for name, server in servers.items():
                before = server.metrics()
                seen = server.load(connections, seconds)
                after = server.metrics()
                count, queries = (
                    after[f"{BATCH}_{what}"] - before[f"{BATCH}_{what}"] for what in ("count", "sum")
                )
                if turn:
                    found[name].append(Round(seen, queries / max(1, count)))
    return found


def median(rounds: list[Round], what: Callable[[Round], float]) -> float:
    """Return the middle of a figure over the rounds."""
    return statistics.median(map(what, rounds))


def against(found: Rounds, one: str, other: str, what: Callable[[Round], float]) -> str:
    """Return the middle of the ratios of two contestants, round by round, and the least and largest."""
    ratios = [what(mine) / what(theirs) for mine, theirs in zip(found[one], found[other], strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def row(name: str, who: str, rounds: list[Round]) -> str:
    """Return a line of a table."""
    figures = (
        f"{median(rounds, lambda one: one.seen.cpu):.2f}",
        f"{median(rounds, lambda one: one.seen.answered):,.0f}",
        f"{median(rounds, lambda one: one.seen.p50):.1f}",
        f"{median(rounds, lambda one: one.seen.p99):.1f}",
        f"{median(rounds, lambda one: one.batch):.1f}",
    )
    return f"| {name} | {who} | {' | '.join(figures)} |"


HEAD = [
    "| {} | {} | CPU ms a request | requests/s | p50 ms | p99 ms | queries at once |",
    "| --- | --- | --: | --: | --: | --: | --: |",
]


def together(work: Work, connections: int, seconds: float, rounds: int) -> list[str]:
    """Measure `--together` with each structure."""
    settings = {
        name: ("--together", name, "--waiting", "64", "--probe-seconds", "60") for name in ("1", "32")
    }
    table, said = [line.format("structure", "`--together`") for line in HEAD], []
    with tempfile.TemporaryDirectory(dir=work.folder.parent) as folder:
        for backend in STRUCTURES:
            found = measure(
                with_structure(work, backend, Path(folder)), settings, connections, seconds, rounds
            )
            table += [row(backend, who, one) for who, one in found.items()]
            said.append(
                f"- {backend}: with 32, {against(found, '32', '1', lambda one: one.seen.cpu)} × the CPU time a request and "
                f"{against(found, '32', '1', lambda one: one.seen.answered)} × the requests a second of one by one"
            )
            print(said[-1], flush=True)
            shutil.rmtree(Path(folder) / backend)
    return [
        "## Searches that wait, done together",
        "",
        f"{work.many:,} × 128, vectors as queries, {connections} connections. Medians; in the list the middle of the rounds' own ratios, and their span:",
        "",
        *said,
        "",
        *table,
        "",
    ]


def spread(
    made: Mapping[str, Callable[[], Work]], connections: int, seconds: float, rounds: int
) -> list[str]:
    """Measure `--processes`."""
    settings = {
        name: ("--processes", name, "--waiting", "64", "--probe-seconds", "60") for name in ("1", "2")
    }
    table, said = [line.format("request", "`--processes`") for line in HEAD], []
    for name in SPREAD:
        found = measure(made[name](), settings, connections, seconds, rounds)
        table += [row(name, who, one) for who, one in found.items()]
        said.append(
            f"- {name}: two processes, {against(found, '2', '1', lambda one: one.seen.answered)} × the requests a second of one, for "
            f"{against(found, '2', '1', lambda one: one.seen.cpu)} × the CPU time a request"
        )
        print(said[-1], flush=True)
    return [
        "## Several processes",
        "",
        f"{connections} connections. The client takes its part of the same {os.cpu_count()} cores, so that two processes cannot do twice as much on a quiet machine. "
        "On a busy one they get a larger part of it than one does: there the requests a second flatter them, and the CPU time does not.",
        "",
        *said,
        "",
        *table,
        "",
    ]


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, required=True, help="folder for indexes and queries")
    parser.add_argument("--vectors", type=Path, required=True, help="folder of image_vectors.py")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    made, load = works(given.cache, given.vectors), os.getloadavg()[0]
    rest = given.connections, given.seconds, given.rounds
    parts = [*together(made[AMONG](), *rest), *spread(made, *rest)]
    text = "\n".join(
        [
            "# What `--together` and `--processes` gain",
            "",
            f"`benchmarks/serve_settings.py`: {given.rounds} rounds of {given.seconds:g} s, contestants in turn in each, wrk as client. {platform.machine()}, {os.cpu_count()} cores, "
            f"Python {platform.python_version()}. Load average {load:.1f} before, {os.getloadavg()[0]:.1f} at the end, with the benchmark's own.",
            "",
            *parts,
        ]
    )
    print(text)
    if given.output:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
