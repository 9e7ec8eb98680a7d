"""The pages of `scale.py`: what was measured, the laws of its growth, and what follows for 10⁸ and 10⁹ vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from page_tables import markdown
from published import rows_of, source
from scale_fit import Fit, power, scaled, theory

Lines = list[dict[str, Any]]
LAW = {"flat": ("n", "n"), "sq8": ("n", "n"), "hnsw": ("n·log n", "log n")}
LISTS_LAW = "n + n·√n", "√n"
"""Theory of building and of a query, with a constant each. Of lists: √n centres are learned of 256 vectors a list (n), n vectors are sorted into them (n·√n) and written (n); a query looks at √n centres and some lists of √n."""
COSTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "build, CPU": lambda line: float(line["build"]["cpu"]),
    "bytes": lambda line: float(line["build"]["bytes"]),
    "query, CPU": lambda line: float(line["search"]["cpu"]),
}
LONGEST = 0.05
"""Seconds that the 99th percentile of queries may take."""
MACHINE = {"cores": 16, "memory": 128e9, "disk": 4e12, "network": 1.25e9, "write": 1e9}
BUSY = 0.5
PLANS = ("ours rabitq", "ours ivfpq", "ours ivf", "ours hnsw", "ours sq8")
NAMES = {"ours": "back end", "faiss": "FAISS alone", "store": "local store", "milvus": "Milvus"}


def titled(name: str) -> str:
    """Return a contestant's name on the page."""
    who, _, what = name.partition(" ")
    return f"{NAMES[who]}, `{what}`"


def count(size: int) -> str:
    """Return a size as a reader writes it."""
    return f"{size:,}"


def number(value: float) -> str:
    """Return three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def law(system: str, cost: str) -> str:
    """Return the law that theory says of a contestant's cost."""
    if cost == "bytes":
        return "n"
    building, query = LAW.get(system.split()[-1], LISTS_LAW)
    return building if cost.startswith("build") else query


def points(lines: Lines, system: str, cost: str) -> dict[int, float]:
    """Return a cost by size, smallest first; of queries only where enough was found."""
    found = {line["size"]: COSTS[cost](line) for line in lines if line["system"] == system and (cost != "query, CPU" or line["search"]["enough"])}  # fmt: skip
    return dict(sorted(found.items()))


def order(lines: Lines) -> list[str]:
    """Return contestants as the page shows them."""
    return sorted({line["system"] for line in lines}, key=lambda name: (list(NAMES).index(name.split()[0]), name))  # fmt: skip


def measured(lines: Lines) -> str:
    """Return the table of all that was measured."""
    rows = []
    for line in sorted(lines, key=lambda line: (line["size"], order(lines).index(line["system"]))):
        build, search = line["build"], line["search"]
        point = ", ".join(f"{key} {value}" for key, value in search["point"].items()) or "–"
        tuned = next(one for one in search["tried"] if one["point"] == search["point"])
        rows.append([
            count(line["size"]), titled(line["system"]), number(build["cpu"]), number(build["wall"]), number(build["bytes"] / 1e6), number(search["memory"]["own"] / 1e6), point,
            f"{tuned['recall']:.3f}{'' if search['enough'] else '*'}", f"{search['recall']:.3f}", str(search["queries"]), number(1e3 * search["cpu"]), number(1e3 * search["p50"]), number(1e3 * search["p99"]), f"{max(line['load']):.1f}",
        ])  # fmt: skip
    head = ["vectors", "", "build, CPU s", "build, s", "written, MB", "own memory, MB", "search", "recall@10, tuning", "recall@10", "queries", "CPU, ms", "p50, ms", "p99, ms", "load"]  # fmt: skip
    return markdown(head, rows)


def growth(lines: Lines) -> str:
    """Return the table of laws, for contestants with three sizes or more."""
    rows = []
    for cost in COSTS:
        for system in order(lines):
            costs = points(lines, system, cost)
            if len(costs) < 3:
                continue
            fits = power(costs), theory(costs, law(system, cost))
            rows.append([cost, titled(system), f"{count(min(costs))} to {count(max(costs))}", *(cell for fit in fits for cell in (fit.text, error(fit)))])  # fmt: skip
    if not rows:
        return "No contestant has three sizes yet: no law of it can be judged. The script goes on where it stopped."
    return markdown(["cost", "", "sizes", "power law", "its error", "theory", "its error"], rows)


def error(fit: Fit) -> str:
    """Return a fit's error at the largest size, in percent."""
    return "–" if fit.error is None else percent(fit.error)


def errors(lines: Lines) -> list[str]:
    """Return, for each cost, how far the laws of the back ends were from what was measured at the largest size: the lowest and the highest."""
    out = []
    for cost in COSTS:
        found = {system: points(lines, system, cost) for system in order(lines) if system.startswith("ours")}
        fits = {system: theory(costs, law(system, cost)) for system, costs in found.items() if len(costs) > 2}
        ends = sorted((fit.error, system) for system, fit in fits.items() if fit.error is not None)
        said = [f"{percent(far)} (`{system.split()[1]}`, {count(max(found[system]))} vectors)" for far, system in ends]  # fmt: skip
        out.append(f"- {cost}: from {said[0]} to {said[-1]}")
    return out


def percent(share: float) -> str:
    """Return a share in whole percent, with its sign."""
    return f"{round(100 * share):+d} %"


def missing(lines: Lines, systems: Mapping[str, Any], sizes: tuple[int, ...]) -> list[str]:
    """Return sentences on what was not run."""
    there = {(line["system"], line["size"]) for line in lines}
    out = []
    for name in systems:
        gone = [count(size) for size in sizes if (name, size) not in there]
        if gone:
            out.append(f"- {titled(name)}: {', '.join(gone)}")
    return out


def render(lines: Lines) -> str:
    """Return the page."""
    from scale import ENOUGH, LONG, QUERIES, ROUNDS, SHORT, SIZES, TUNING
    from scale_store import STORES
    from scale_systems import SYSTEMS

    first = lines[0]
    loads = [load for line in lines for load in line["load"]]
    short = any(not line["search"]["enough"] for line in lines)
    return "\n".join([
        "# What an index costs as it grows",
        "",
        f"`python benchmarks/scale.py`, {min(line['when'] for line in lines)[:10]}. {first['machine']}, FAISS {first['faiss']} with {first['options']}; each process on one core and one thread, at low priority, load averages {min(loads):.1f} to {max(loads):.1f}: "
        "others had the cores, too, so CPU seconds are to be compared, and latencies hold what waiting for a core cost. Vectors of 128 numbers at unit length: crops of Fashion-MNIST's training images, as a trained network sees "
        f"them (`benchmarks/crop_vectors.py`); queries are crops of test images, one at a time. Each contestant has √n lists, 16 links, 32 bytes of product codes or one bit a number. A search is tuned with {TUNING} queries: the cheapest of a grid whose recall of the ten nearest is "
        f"{ENOUGH:g} or more by 1.6 standard errors. Recall, CPU and latencies are then those of {QUERIES} others; equal distances count as one another. CPU a query is the least of {ROUNDS} rounds, or up to {SHORT} where they are short; latencies are of each query's best. A round ends after {LONG:g} seconds of CPU: slow searches were asked fewer queries.",
        "",
        "*Written* is without the vectors where a back end reads those of the segment (512 bytes each, mapped); FAISS alone and the stores write them too; Milvus's is without its message queue. *Own memory* is the searching process's, Python and FAISS included, with the server's where there is one, without mapped files. "
        "Milvus is version 2.3.5 as the package `milvus` carries it, asked by pymilvus; its CPU is its client's, its server's, and what its server does besides; searches have its default consistency.",
        "",
        measured(lines),
        "",
        *(["\\* No point of the grid found enough: what is shown is the best of it.", ""] if short else []),
        "## Growth",
        "",
        "A power law and the law that theory gives, each fitted without the largest size, and how far it is from what was measured there.",
        "",
        growth(lines),
        "",
        "## Not run",
        "",
        "Of the contestants and sizes that the script knows, for want of time or memory:",
        "",
        *missing(lines, {**SYSTEMS, **STORES}, SIZES),
        "",
    ])  # fmt: skip


def plan(lines: Lines) -> str:
    """Return the tables of what 10⁸ and 10⁹ vectors take: of a shard that was measured, or by the laws that were fitted."""
    shard = 10_000_000
    rows, totals = [], []
    for system in PLANS:
        costs = {cost: points(lines, system, cost) for cost in COSTS}
        if not all(costs.values()):
            continue
        fits = {cost: (theory if len(found) > 2 else scaled)(found, law(system, cost)) for cost, found in costs.items()}  # fmt: skip
        build, size, query = (costs[cost].get(shard) or careful(fits[cost], shard) for cost in COSTS)
        largest = max(costs["bytes"])
        rows.append([titled(system), count(largest), number(build / 60), number(size / 1e9), number(shard * 512 / 1e9), number(1e3 * query), "; ".join("measured" if shard in costs[cost] else error(fits[cost]) for cost in COSTS)])  # fmt: skip
        for total in (10**8, 10**9):
            totals.append([titled(system), f"10{'⁸' if total == 10**8 else '⁹'}", *machines(total, shard, build, size, query)])  # fmt: skip
    return "\n".join([
        "# A plan for 10⁸ and 10⁹ vectors",
        "",
        "Computed by `benchmarks/scale.py` from what it measured and the laws that theory gives, fitted to it; docs/scale.md says how to read it.",
        "",
        "<!-- errors -->",
        "",
        *errors(lines),
        "",
        "<!-- plan -->",
        "",
        f"One shard of {count(shard)} vectors of 128 numbers: *measured*, or by the laws fitted to the sizes that were. The errors are those of each law when it predicts the largest of these from the smaller; where it was too low, the cost is raised by as much. **–** stands where fewer than three sizes "
        "were measured: then the cost of the largest is grown by the law as a whole, with what does not grow, and nothing is known of the error.",
        "",
        markdown(["structure", "measured up to", "build, CPU minutes", "structure, GB", "vectors, GB", "query, CPU ms", "errors: build; bytes; query"], rows),
        "",
        f"From it, for machines of {MACHINE['cores']} cores, {MACHINE['memory'] / 1e9:.0f} GB of memory, {MACHINE['disk'] / 1e12:.0f} TB of disk and {8 * MACHINE['network'] / 1e9:.0f} Gbit/s, at most {100 * BUSY:.0f} % busy and four fifths full, one copy of each shard, every query asked of every shard. *In memory* holds structures and vectors; "
        "*on disk* holds structures alone, and each query then reads the candidates that are measured again. The 99th percentile is that of a queue (M/M/1) at this load, whose service time is the CPU time of a machine's shards, spread over its cores; the disk's and the network's time come on top. A machine gets "
        f"no more shards than keep it within {1e3 * LONGEST:.0f} ms; where one shard does not, at {100 * BUSY:.0f} %, the machine is kept less busy and answers fewer queries a second; **–** stands where not even an idle one would: such shards are too large for one thread a query. "
        "Rebuilding is of all structures, on all cores of the machines of the first kind; a snapshot is read or written at the network's speed.",
        "",
        markdown(["structure", "vectors", "shards", "machines, in memory", "queries a second", "p99, ms", "machines, on disk", "queries a second", "p99, ms", "rebuild, hours", "snapshot, hours"], totals),
        "",
        "<!-- big-ann -->",
        "",
        table("big_ann_2021"),
        "",
        "<!-- milvus -->",
        "",
        table("milvus_2_1"),
        "",
    ])  # fmt: skip


def table(name: str) -> str:
    """Return published figures as they were printed, with their source."""
    columns, rows = rows_of(name)
    return f"{source(name)}.\n\n" + markdown(["", *columns], [[row, *(f"{value:g}" for value in values)] for row, values in rows.items()])  # fmt: skip


def careful(fit: Fit, size: int) -> float:
    """Return a cost by a law, raised as far as the law was below what was measured at the largest size."""
    return fit.at(size) / min(1.0, 1 + (fit.error or 0.0))


def slowest(shards: int, query: float, busy: float = BUSY) -> float:
    """Return the 99th percentile of seconds on a machine of so many shards, by the formula of a queue of random arrivals and times (M/M/1)."""
    return math.ceil(shards / MACHINE["cores"]) * query * math.log(100) / (1 - busy)


def load_of(shards: int, query: float) -> float:
    """Return how busy a machine of so many shards may be with its 99th percentile within the limit; 0 where it is beyond that without any load."""
    return max(0.0, min(BUSY, 1 - slowest(shards, query, 0.0) / LONGEST))


def machines(total: int, shard: int, build: float, size: float, query: float) -> list[str]:
    """Return shards; machines, queries a second and their 99th percentile with the vectors in memory and on disk; and hours to rebuild and to copy with the first."""
    shards, usable = math.ceil(total / shard), 0.8
    if not load_of(1, query):
        return [str(shards), *["–"] * 8]
    whole = size + 512 * shard
    out, first = [str(shards)], 0
    for each in (whole, size):
        room = min(usable * MACHINE["memory"] / each, usable * MACHINE["disk"] / whole)
        per = max([each for each in range(1, int(room) + 1) if slowest(each, query) <= LONGEST], default=1)
        needed = math.ceil(shards / per)
        per = math.ceil(shards / needed)
        first = first or needed
        busy = load_of(per, query)
        # each query costs every machine its own shards' work
        out += [
            str(needed),
            number(busy * MACHINE["cores"] / (per * query)),
            number(1e3 * slowest(per, query, busy)),
        ]
    hours = shards * build / (first * MACHINE["cores"]) / 3600
    copied = math.ceil(shards / first) * whole / MACHINE["network"] / 3600
    return [*out, number(hours), number(copied)]
