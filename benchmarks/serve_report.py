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


def _parts(parts: dict[str, float]) -> list[str]:
    exact, index, application = (parts[name] for name in ("exact search", "index", "application"))
    return [
        "## Where the time of a small vector query goes",
        "",
        "`benchmarks/serve_parts.py`, among 900 × 32, in one process without sockets: the least CPU time of short rounds in turn. "
        f"FAISS takes {parts['FAISS']:.0f} µs. Our exact search of the same matrix takes {exact:.0f} µs, in double precision. The index around it takes "
        f"{index - exact:.0f} µs more: a moment of the record, the items of 18 candidates from SQLite, their vectors and distances. The application around "
        f"that takes {application - index:.0f} µs more: reading and checking the request, two hand-overs between the event loop and the thread that searches, "
        "metrics, JSON. The hand-over stays: a search reads the disk, and an event loop that waits for a disk answers nobody.",
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
        f"Asked for {over['asked'] / peak['answered']:.1f} × the peak by 240 connections: "
        f"{over['answered']:,.0f} answered a second, {over['answered'] / peak['answered']:.2f} × the peak ({refused or 'none'} refused, "
        f"{over['failed']:,} without an answer); work begun on {one['begun']:,.0f} requests, on {one['begun late']:,.0f} of them after the deadline of {deadline:g} s.",
    ]


def _median(rows: list[dict[str, float]], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def _ratio(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    return statistics.median(a["cpu"] / b["cpu"] for a, b in zip(mine, theirs, strict=True))
