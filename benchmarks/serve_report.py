"""The page of `serve.py`."""

from __future__ import annotations

import statistics
from typing import Any

TARGET_RAW = 1.05
TARGET_BARE = 1.3
NAMES = {
    "ours": "`retrieval serve`",
    "bare": "bare ASGI application",
    "flask": "Flask, as clip-retrieval",
    "qdrant": "Qdrant's shape",
}


def render(found: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    about = found["about"]
    lines = [
        "# The server beside the same work by hand",
        "",
        f"`benchmarks/serve.py`: CPU milliseconds (user and system) a request of all processes of a server, the median of {about['rounds']} rounds of "
        f"{about['seconds']} s, contestants in turn in each round; requests a second and latency are wrk's. "
        "*By hand* is ONNX Runtime and FAISS in a loop with one thread, decoding with Pillow, no server. "
        "*Bare* is an ASGI application under uvicorn, uvloop and httptools that only reads the same upload. "
        "The target is 1.05 × by hand with EfficientNet-Lite0, and by hand plus 1.3 × bare with the others.",
        "",
        f"{about['machine']}; {about['versions']}. {_company(about['load'])} The client shares the cores, so that requests a second are not what the server could do alone. "
        "What is still under way when a round ends counts as CPU time and not as a request, which flatters nobody and weighs on the slowest at 32 connections.",
        *(["", about["note"]] if about.get("note") else []),
    ]
    for name, one in found["works"].items():
        lines += ["", f"## {name[:1].upper()}{name[1:]}", "", *_work(one, about["deadline"])]
    return "\n".join([*lines, "", *_parts(found["parts"])]) + "\n"


def _parts(parts: dict[str, Any]) -> list[str]:
    small, large, photo = parts["small"], parts["large"], parts["photo"]
    exact, index, application = (small[name] for name in ("exact search", "index", "application"))
    alone, refusal = small["application alone"], small["refusal"]
    by_hand = sum(photo[name] for name in ("decoding by hand", "encoder by hand", "FAISS"))
    ours = sum(photo[name] for name in ("decoding here", "decoding there", "encoder", "index"))
    return [
        "## Where the time of a query goes",
        "",
        "`benchmarks/serve_parts.py`, in one process without sockets: the least CPU time of short rounds in turn, at a load average of "
        f"{parts['load']}.",
        "",
        f"A vector among 900 × 32: FAISS takes {small['FAISS']:.0f} µs. Our exact search of the same matrix takes {exact:.0f} µs, in float32 and, of what may "
        f"be nearest, in double precision. The index around it takes {index - exact:.0f} µs more: whether anybody has written since, which is a question to "
        "SQLite, the vectors of 18 candidates and their distances, and ten answers from items in memory. The application around that takes "
        f"{application - index:.0f} µs more; over an index that answers at once it takes {alone:.0f} µs, and the rest is the processor's caches, which one empties "
        f"for the other. A request that a full queue refuses takes {refusal:.0f} µs.",
        "",
        "What is left of the application, by profile: no part stands out. The hand-over to the thread that searches and back takes some 20 µs; the body's JSON, its model and its array 10; "
        "ten answers and their JSON 10; the request's record and its figures 9; who asks and what they may 3. At one connection all of it costs about half as much again: a thread that slept "
        "finds the processor's caches cold. The hand-over stays: a search reads the disk, and an event loop that waits for a disk answers nobody.",
        "",
        f"A vector among 100,000 × 128: FAISS takes {large['FAISS']:,.0f} µs, our exact search of the same matrix {large['exact search']:,.0f}, and the index, "
        f"which reads a compact companion in the vectors' place, {large['index']:,.0f}.",
        "",
        f"A JPEG of 640 × 480 to EfficientNet-Lite0: by hand decoding takes {photo['decoding by hand'] / 1000:.2f} ms, the encoder "
        f"{photo['encoder by hand'] / 1000:.2f} and FAISS {photo['FAISS'] / 1000:.2f}. In the library the process that decodes takes "
        f"{photo['decoding there'] / 1000:.2f} ms and the one that asks it {photo['decoding here'] / 1000:.2f}, the encoder {photo['encoder'] / 1000:.2f} and the index "
        f"{photo['index'] / 1000:.2f}: together {ours / by_hand:.2f} × by hand, before HTTP.",
    ]


def _work(one: dict[str, Any], deadline: float) -> list[str]:
    rounds = one["rounds"]
    by_hand = _median(rounds["raw"], "cpu")
    lines = [
        f"{one['items']:,} items, exact search, the 10 nearest. By hand: {by_hand:.3f} ms.",
        "",
        "| contestant | connections | CPU ms | × by hand | requests/s | p50 ms | p99 ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for key, of in rounds.items():
        if key == "raw":
            continue
        name, connections = key.split()
        cpu = _median(of, "cpu")
        ratio = f"{_ratio(of, rounds['raw']):.2f}" if name != "bare" else ""
        lines.append(
            f"| {NAMES[name]} | {connections} | {cpu:.3f} | {ratio} | {_median(of, 'answered'):,.0f} | "
            f"{_median(of, 'p50'):.2f} | {_median(of, 'p99'):.2f} |"
        )
    return [*lines, "", *_targets(one), "", *_strained(one["strained"], deadline)]


def _targets(one: dict[str, Any]) -> list[str]:
    """Return how far the work is from raw × 1.05, or raw plus 1.3 × bare, at each number of connections."""
    rounds, said = one["rounds"], []
    for key in rounds:
        name, _, connections = key.partition(" ")
        if name != "ours":
            continue
        ours, bare, by_hand = rounds[key], rounds[f"bare {connections}"], rounds["raw"]
        allowed = statistics.median(
            mine["cpu"] / (hand["cpu"] + TARGET_BARE * theirs["cpu"])
            for mine, theirs, hand in zip(ours, bare, by_hand, strict=True)
        )
        more = statistics.median(
            (mine["cpu"] - hand["cpu"]) / theirs["cpu"]
            for mine, theirs, hand in zip(ours, bare, by_hand, strict=True)
        )
        said.append(
            f"{connections}: {allowed:.2f} × (by hand + {TARGET_BARE} × bare), "
            + (f"by hand + {more:.1f} × bare" if more > 0 else "less than by hand")
        )
    return [f"Ours by connections — {'; '.join(said)}."]


def _company(load: float) -> str:
    """Return what a load average says of the figures."""
    if load <= 2:
        return f"Nothing else ran (load average {load} at the start)."
    return (
        f"Others used the same cores (load average {load} at the start): CPU times are several times those of a quiet machine, "
        "and latencies and requests a second say little; ratios within a round are what is compared."
    )


def _strained(one: dict[str, Any], deadline: float) -> list[str]:
    peak, steady, over = one["peak"], one["at 70 %"], one["overload"]
    refused = ", ".join(f"{count:,.0f} by {reason}" for reason, count in sorted(one["refused"].items()))
    return [
        f"Peak {peak['answered']:,.0f} requests a second. At {steady['asked'] / peak['answered']:.0%} of it, at random moments: "
        f"p50 {steady['p50']:.2f} ms, p99 {steady['p99']:.2f} ms. "
        + _asked(over, peak["answered"])
        + f"{over['answered']:,.0f} answered a second, {over['answered'] / peak['answered']:.2f} × the peak{_level(one)} ({refused or 'none'} refused, "
        f"{over['failed']:,} without an answer); work begun on {one['begun']:,.0f} requests, on {one['begun late']:,.0f} of them after the deadline of {deadline:g} s.",
    ]


def _level(one: dict[str, Any]) -> str:
    """Return what the overload's goodput is beside that of the same client at the peak's rate; empty for older runs."""
    if "at the peak" not in one:
        return ""
    return f", {one['overload']['answered'] / one['at the peak']['answered']:.2f} × what the same client has answered at the peak's rate"


def _asked(over: dict[str, float], peak: float) -> str:
    """Return what was asked for: at moments of the client's own, or, in older runs, by connections that wait for their answers."""
    if "due" not in over:
        return f"Asked for {over['asked'] / peak:.1f} × the peak by 240 connections: "
    return (
        f"Asked at a constant rate of {over['due'] / peak:.1f} × the peak, {over['sent'] / peak:.1f} × of which found one of 1,000 connections free and were sent: "
        f"half of the answers came within {over['p50']:,.0f} ms of their moment, 99 % within {over['p99']:,.0f}; "
    )


def _median(rows: list[dict[str, float]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def _ratio(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    return statistics.median(a["cpu"] / b["cpu"] for a, b in zip(mine, theirs, strict=True))
