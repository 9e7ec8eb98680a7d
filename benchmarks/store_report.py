"""The page of `store.py`, from what it kept: every figure and every sentence about one."""

from __future__ import annotations

import statistics
from typing import Any

from retrieval.serving.index.backends import FLAT_NUMBERS

from store_systems import SYSTEMS
from store_trace import verdict

OURS = "local"
ENOUGH = 0.95
SEARCHES = {
    "1, None": "one query",
    "32, None": "32 queries",
    "1, 1": "one query, 1 % match",
    "1, 10": "one query, 10 % match",
    "1, 50": "one query, 50 % match",
}
WRITES = {
    "adds, 1": "adds, 1 at a time",
    "adds, 100": "adds, 100 at a time",
    "adds, 10000": "adds, 10,000 at a time",
    "deletes, 1": "deletes, 1 at a time",
    "deletes, 100": "deletes, 100 at a time",
}
SAID = {
    "yes": "yes",
    "no": "**no**",
    "all but the journal's removal": "yes, but the removal of SQLite's rollback journal, which is the commit, is not synced: where it is lost, the last transaction is undone",
}
Pair = tuple[float, float]


def survives(kept: dict[str, Any], name: str) -> str:
    """Return whether an acknowledged write survives a power cut: the worse of an add and a delete, as `verdict` says it."""
    found = kept.get("durability", {}).get(name, {})
    hints = SYSTEMS[name].hints
    told = [
        found[kind] | {"unsynced": [file for file in found[kind]["unsynced"] if file not in hints]}
        for kind in ("add", "delete")
        if kind in found
    ]
    said = [verdict(one) for one in told] or ["no"]
    return "no" if "no" in said else next((one for one in said if one != "yes"), "yes")


def each(turns: list[dict[str, Any]] | None) -> Pair | None:
    """Return the median seconds of one item, wall and CPU; None where there are none."""
    found = [turn for turn in turns or [] if turn.get("items")]
    if not found:
        return None
    wall = statistics.median(turn["seconds"] / turn["items"] for turn in found)
    return wall, statistics.median(turn["cpu"] / turn["items"] for turn in found)


def written(kept: dict[str, Any], table: dict[str, Any], name: str, key: str, *, synced: bool) -> Pair | None:
    """Return what one item of a write takes; `synced`: only where it survives a power cut, by itself or as the caller syncs it."""
    writes = table.get("writes", {})
    settle = synced and survives(kept, name) == "no"
    return each(writes.get(f"{key}, {settle}"))


def searched(table: dict[str, Any], key: str) -> Pair | None:
    """Return what one query takes, where enough is found."""
    tuned = table.get("tuned", {}).get(key.split(", ")[1], {})
    return each(table.get("search", {}).get(key)) if tuned.get("recall", 0.0) >= ENOUGH else None


def middle(table: dict[str, Any], key: str) -> float | None:
    """Return the median of a figure of the openings."""
    found = [turn[key] for turn in table.get("open", []) if key in turn]
    return statistics.median(found) if found else None


def opened(table: dict[str, Any]) -> Pair | None:
    """Return the seconds of opening with the first answer."""
    found = [turn for turn in table.get("open", []) if "first" in turn]
    if not found:
        return None
    wall = statistics.median(turn["seconds"] + turn["first"] for turn in found)
    return wall, statistics.median(turn["cpu"] + turn["first_cpu"] for turn in found)


def measures(kept: dict[str, Any], size: str) -> dict[str, dict[str, Pair]]:
    """Return each measure's figures by system, smaller is better, wall and CPU: only what may be compared."""
    tables, found = kept["sizes"][size], {}
    for key, title in SEARCHES.items():
        found[title] = {name: searched(table, key) for name, table in tables.items()}
    for key, title in WRITES.items():
        found[title] = {name: written(kept, table, name, key, synced=True) for name, table in tables.items()}
    found["opening, to the first answer"] = {name: opened(table) for name, table in tables.items()}
    for key, title in (("memory", "memory"), ("bytes", "folder")):
        values = {name: middle(table, key) if key == "memory" else table.get("load", {}).get(key) for name, table in tables.items()}  # fmt: skip
        found[title] = {
            name: (value, value) for name, value in values.items() if value and is_whole(tables[name], size)
        }
    return {title: {name: pair for name, pair in row.items() if pair} for title, row in found.items()}


def is_whole(table: dict[str, Any], size: str) -> bool:
    """Whether a system loaded all items."""
    return str(table.get("load", {}).get("count")) == size


def decides(title: str) -> int:
    """Return what a measure is judged by: 0, wall time, where the disk counts; 1, CPU time, where only the shared cores would differ."""
    return 0 if title in WRITES.values() else 1


def ratios(kept: dict[str, Any], size: str) -> list[tuple[str, str, str, Pair]]:
    """Return measure, our structure, peer, the peer's wall and CPU time over ours; a figure above 1 is to our favour.

    Ours is the better structure of a search, the first one of a write, which does not depend on it, and each one elsewhere.
    """
    found = []
    for title, row in measures(kept, size).items():
        ours = [name for name in row if name.startswith(OURS)]
        if title in SEARCHES.values():
            ours = sorted(ours, key=lambda name: row[name][decides(title)])[:1]
        elif title in WRITES.values():
            ours = sorted(ours)[-1:]
        for own in ours:
            wall, cpu = row[own]
            found += [(title, own, name, (pair[0] / wall, pair[1] / cpu)) for name, pair in row.items() if not name.startswith(OURS)]  # fmt: skip
    return found


def times(value: float) -> str:
    """Return a ratio."""
    return f"{value:,.0f} ×" if value >= 10 else f"{value:.1f} ×" if value >= 1 else f"{value:.2g} ×"


def conclusions(kept: dict[str, Any]) -> list[str]:
    """Return where we lose and where we win, as sentences."""
    lines = []
    for size in sorted(kept["sizes"], key=int):
        found = ratios(kept, size)
        for title, own in dict.fromkeys(row[:2] for row in found):
            by = decides(title)
            rows = sorted((row for row in found if row[:2] == (title, own)), key=lambda row: row[3][by])
            parts = []
            for said, some in (
                ("**loses** to", [row for row in rows if row[3][by] < 1]),
                ("beats", [row for row in rows if row[3][by] >= 1]),
            ):
                if some:
                    parts.append(f"{said} {', '.join(f'{row[2]} ({both(row[3], by)})' for row in some)}")
            earlier = f", at {kept['runs'][size]['commit']}" if size in kept.get("runs", {}) else ""
            lines.append(f"- {int(size):,}{earlier}, {title} ({own}): {'; '.join(parts)}.")
    return lines


def run_of(kept: dict[str, Any], size: str) -> list[str]:
    """Return a sentence about a size that was measured in another run than the newest."""
    run = kept.get("runs", {}).get(size)
    if run is None:
        return []
    return [
        f"Measured in another run, {run['began']} to {run['ended']}, load average {min(run['load'])} to {max(run['load'])}, retrieval at {run['commit']}.",
        "",
    ]


def traced(kept: dict[str, Any]) -> list[str]:
    """Return a sentence about systems whose writes were traced in another run."""
    run = kept.get("traced")
    if run is None:
        return []
    return [f"Traced in another run, {run['began']} to {run['ended']}, in the same versions: {', '.join(run['names'])}.", ""]  # fmt: skip


def exactly(tables: dict[str, Any], size: str, width: int = 128) -> list[str]:
    """Return what exact search costs beside a graph, at the size from which `auto` takes the graph."""
    if int(size) * width != FLAT_NUMBERS:
        return []
    parts = []
    for key in ("1, None", "32, None"):
        flat, graph = (searched(tables[f"local {name}"], key) for name in ("flat", "HNSW"))
        if flat and graph:
            parts.append(
                f"{SEARCHES[key].capitalize()}: {flat[1] * 1e3:,.1f} ms of CPU time a query exactly, {graph[1] * 1e3:,.2f} ms by the graph ({times(flat[1] / graph[1])})"
            )
    return [f"Up to this size, 32 million numbers, `auto` searches exactly, from here on by a graph. {'. '.join(parts)}.", ""]  # fmt: skip


def both(pair: Pair, by: int) -> str:
    """Return the peer's figures over ours, first that which decides."""
    if pair[0] == pair[1]:
        return times(pair[0])
    wall, cpu = times(pair[0]), times(pair[1])
    return f"CPU {cpu}, wall {wall}" if by else f"{wall}, CPU {cpu}"


def milliseconds(pair: Pair | None) -> str:
    """Return "wall (CPU)" in milliseconds."""
    return "–" if pair is None else " (".join(f"{value * 1e3:,.0f}" if value >= 0.1 else f"{value * 1e3:.3g}" for value in pair) + ")"  # fmt: skip


def rate(pair: Pair | None) -> str:
    """Return items a second, of wall and of CPU time."""
    if pair is None:
        return "–"
    wall, cpu = (1 / max(value, 1e-9) for value in pair)
    return f"{round_to(wall)} ({round_to(cpu)})"


def round_to(value: float) -> str:
    """Return a number of three digits."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 10 else f"{value:.2g}"


def search_table(tables: dict[str, Any]) -> list[str]:
    """Return the searches of one size."""
    lines = [f"| system | {' | '.join(SEARCHES.values())} | recall@10: all, 1 %, 10 %, 50 % | ef |", "|---" * (len(SEARCHES) + 3) + "|"]  # fmt: skip
    for name, table in tables.items():
        if not table.get("search"):
            continue
        tuned = [table["tuned"].get(below, {}) for below in ("None", "1", "10", "50")]
        recalls = ", ".join(f"{one['recall']:.3f}" if "recall" in one else "–" for one in tuned)
        efs = "exact" if SYSTEMS[name].exact else ", ".join(str(one.get("ef", "–")) for one in tuned)
        cells = []
        for key in SEARCHES:
            short = table["tuned"].get(key.split(", ")[1], {}).get("recall", 0.0) < ENOUGH
            cells.append(milliseconds(each(table["search"].get(key))) + (" †" if short else ""))
        lines.append(f"| {name} | {' | '.join(cells)} | {recalls} | {efs} |")
    return lines


def write_table(kept: dict[str, Any], tables: dict[str, Any]) -> list[str]:
    """Return the adds and deletes of one size."""
    lines = [f"| system | a write survives a power cut | {' | '.join(WRITES.values())} |", "|---" * (len(WRITES) + 2) + "|"]  # fmt: skip
    for name, table in tables.items():
        if not table.get("writes"):
            continue
        durable = survives(kept, name)
        said = {"no": "no", "yes": "yes"}.get(durable, "nearly")
        cells = [rate(written(kept, table, name, key, synced=False)) for key in WRITES]
        lines.append(f"| {name} | {said} | {' | '.join(cells)} |")
        if durable == "no":
            cells = [rate(written(kept, table, name, key, synced=True)) for key in WRITES]
            lines.append(f"| {name}, its caller syncs what it wrote | yes | {' | '.join(cells)} |")
    return lines


def open_table(tables: dict[str, Any], size: str) -> list[str]:
    """Return loading, opening, memory and size of the folder."""
    lines = ["| system | loaded | items a second | opening, s | first answer, ms | before, MB | memory, MB | folder, MB |", "|---" * 8 + "|"]  # fmt: skip
    for name, table in tables.items():
        load = table.get("load", {})
        if not load:  # the structures that begin with another's folder are measured at the smaller size
            continue
        if "failed" in load:
            lines.append(f"| {name} | failed | | | | | | |")
            continue
        whole = is_whole(table, size)
        speed = round_to(load["added"] / load["seconds"]) if load.get("added") else "–"
        figures = (
            [middle(table, key) for key in ("seconds", "first", "before", "memory")] if whole else [None] * 4
        )
        shown = [
            "–" if value is None else f"{value * scale:{form}}"
            for value, scale, form in zip(
                figures, (1, 1e3, 1, 1), (",.2f", ",.1f", ",.0f", ",.0f"), strict=True
            )
        ]
        lines.append(
            f"| {name} | {load['count']:,} | {speed} | {' | '.join(shown)} | {load['bytes'] / 1e6:,.0f} |"
        )
    return lines


def limit(tables: dict[str, Any]) -> str:
    """Return after how many minutes a load was given up."""
    return " or ".join(f"{one:g}" for one in sorted({t["load"]["minutes"] for t in tables.values() if "minutes" in t.get("load", {})}))  # fmt: skip


def durable_table(kept: dict[str, Any]) -> list[str]:
    """Return what was seen of each system's writes."""
    lines = ["| system | an add writes | a delete writes | syncs, add and delete | not synced when the call returns | survives a power cut | after SIGKILL | loaded with 20,000, then killed at once |", "|---" * 8 + "|"]  # fmt: skip
    for name, found in kept["durability"].items():
        if "failed" in found:
            lines.append(f"| {name} | {found['failed'].strip().splitlines()[-1]} | | | | | | |")
            continue
        add, delete = found["add"], found.get("delete")
        cells = [f"{', '.join(f'`{file}`' for file in one['written'])} ({one['bytes']:,} bytes)" if one else "cannot delete" for one in (add, delete)]  # fmt: skip
        both = [one for one in (add, delete) if one]
        missing = sorted({f"`{file}`" for one in both for file in [*one["unsynced"], *one["names"]]})
        kill = found["kill"]
        left = f"{kill['found']} of {kill['written']} adds there" + ("" if kill["count"] == kill["expected"] and kill["gone"] else f"; {kill['count']:,} items instead of {kill['expected']:,}")  # fmt: skip
        after = found["loaded, then killed"]
        shown = f"{after:,} items" if isinstance(after, int) else f"does not open: {after}"
        lines.append(
            f"| {name} | {cells[0]} | {cells[1]} | {', '.join(str(one['syncs']) for one in both)} | {', '.join(missing) or 'nothing'} | "
            f"{SAID[survives(kept, name)]} | {left} | {shown} |"
        )
    return lines


def render(kept: dict[str, Any]) -> str:
    """Return the page."""
    versions = "; ".join(f"{name}: {', '.join(f'{p} {v}' for p, v in held.items())}" for name, held in kept["versions"].items())  # fmt: skip
    lines = [
        "# The local store and others that are embedded",
        "",
        f"`python benchmarks/store.py`, {kept['began']} to {kept['ended']}. {kept['machine']}; load average {min(kept['load'])} to {max(kept['load'])}: others "
        f"shared the cores, so read the ratios. {kept['vectors']}. Versions: {versions}.",
        "",
        "Each system runs in a process and a virtual environment of its own, held to one core and one thread; only the one that is asked runs, the others are stopped. "
        "Systems are measured in turn, A, B, A, B; figures are medians. A write counts from the NumPy array to the call's return, a search from the array to a "
        f"list of ids. Approximate structures are set to the least `ef` of 16, 32, … 1024 whose recall@10 is {ENOUGH} or more, for each filter by itself; † marks what "
        "does not reach it, and is compared with nothing. A write is compared where it survives a power cut: of a system that does not sync, as its caller syncs the files that changed "
        "after each call. The filter is a range of one whole number. qdrant-client was loaded with SQLite's `synchronous = off`; its writes are measured as it comes.",
        "",
        "## In short",
        "",
        "The peer's time (memory, folder) over ours: above 1, ours is the better. Peers of equal recall and durability only. Searches and opening are judged by "
        "CPU time, since others shared the cores; writes by wall time, since they wait for the disk. In a search ours is the better of its two structures, named in brackets; it "
        "returns whole items with their vectors, the others only ids.",
        "",
        *conclusions(kept),
        "",
        "## What each is",
        "",
        "| system | structure, and how it is written |",
        "|---|---|",
        *(f"| {name} | {system.what} |" for name, system in SYSTEMS.items()),
        "",
        "## Does an acknowledged write survive a power cut?",
        "",
        "`strace` around one add and one delete of one item, acknowledged: what was written, and what no fsync came after before the call returned. "
        "SIGKILL after 122 acknowledged adds, in 22 calls of one and one of 100; opened again and each searched for.",
        "",
        *durable_table(kept),
        "",
        *traced(kept),
        "`acknowledged` of ours holds the number of the last transaction, none of its content, and is written when the transaction is on the disk: a power cut that takes it takes no write.",
    ]
    for size in sorted(kept["sizes"], key=int):
        tables = kept["sizes"][size]
        lines += [
            "",
            f"## {int(size):,} items",
            "",
            *run_of(kept, size),
            *exactly(tables, size),
            "Searches: milliseconds a query, wall (CPU); –: 32 queries would take more than a minute.",
            "",
            *search_table(tables),
            "",
            "Writes: items a second of wall time (of CPU time); –: it cannot, or the call would take more than a minute.",
            "",
            *write_table(kept, tables),
            "",
            f"Loading stopped after {limit(tables)} minutes, on all cores; stores were filled before, partly beside each other and beside other measurements, so their rates are no comparison. Memory is the process's after it opened the store and searched four times; what stands before it, "
            "that with its libraries imported. Medians; the files are in the system's cache.",
            "",
            *open_table(tables, size),
        ]
    return "\n".join([*lines, ""])
