"""The page of `onnx_speed.py`, from what it kept: every figure and every sentence about one."""

from __future__ import annotations

import json
from typing import Any


def pair(times: list[float]) -> str:
    """Return "wall (CPU)" in milliseconds."""
    return f"{times[0]:.2f} ({times[1]:.2f})"


def ratio(row: dict[str, Any], which: int) -> float:
    """Return torch eager's time over ONNX Runtime's: of the wall (0), of the CPU (1)."""
    return float(row["eager"][which] / row["onnx"][which])


def conclusions(kept: dict[str, Any]) -> list[str]:
    """Return what the tables say, as sentences."""
    rows, sentences = kept["encoders"], []
    if rows:
        least, most = (choose(rows, key=lambda row: ratio(row, 1)) for choose in (min, max))
        sentences.append(
            f"- In CPU time ONNX Runtime is {ratio(least, 1):.1f} to {ratio(most, 1):.1f} times as fast as torch eager on this machine: least for "
            f"{least['encoder']} (batch {least['batch']}, {least['threads']} threads), most for {most['encoder']} (batch {most['batch']}, {most['threads']} threads)."
        )
    for variant in ("int8", "fp16"):
        gains, drifts = [], []
        for row in kept["variants"]:
            if row["variant"] == variant:
                whole = next(
                    r for r in kept["variants"] if (r["encoder"], r["variant"]) == (row["encoder"], "float32")
                )
                gains += [a[1] / b[1] for a, b in zip(whole["times"], row["times"], strict=True)]
                drifts.append(
                    f"{row['cosine_mean']:.3f} on average, {row['cosine_min']:.3f} at worst ({row['encoder']})"
                )
        if gains:
            sentences.append(
                f"- {variant} takes the CPU time of float32 divided by {min(gains):.1f} to {max(gains):.1f}; the cosine of its vectors to float32's is {'; '.join(drifts)}."
            )
    return sentences


def render(kept: dict[str, Any]) -> str:
    """Return the page."""
    load = kept["load"]
    lines = [
        "# ONNX Runtime and torch",
        "",
        f"`python benchmarks/onnx_speed.py`. {kept['machine']}; {json.dumps(kept['versions'])}. Load average at the start "
        f"{load['encoders']} (encoders), {load['variants']} (variants). Threads sleep instead of spinning in both. Where the load is above 0 others shared the "
        f"cores: wall times are upper bounds, and CPU times and their ratio are what to read.{kept.get('note', '')}",
        "",
        *conclusions(kept),
        "",
        "## Encoders: ONNX Runtime against torch eager",
        "",
        "Milliseconds a batch, median, wall (CPU); the ratio is torch's time over ONNX Runtime's.",
        "",
        "| encoder | threads | batch | torch eager | channels_last | ONNX Runtime | ratio, wall | ratio, CPU |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['encoder']} | {row['threads']} | {row['batch']} | {pair(row['eager'])} | {pair(row['channels_last'])} "
        f"| {pair(row['onnx'])} | {ratio(row, 0):.1f} | {ratio(row, 1):.1f} |"
        for row in kept["encoders"]
    ]
    lines += [
        "",
        "## torch's two exporters",
        "",
        "CPU seconds of a whole export with its verification on 32 items (the first one includes loading the exporter); "
        "milliseconds of the graph for one item at one thread, wall (CPU).",
        "",
        "| encoder | exporter | nodes | export, CPU s | run | largest difference from torch |",
        "|---|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['encoder']} | {row['exporter']} | {row['nodes']} | {row['export_cpu']:.1f} | {pair(row['run'])} | {row['difference']:.0e} |"
        for row in kept["exporters"]
    ]
    lines += [
        "",
        "## Variants: speed and drift",
        "",
        "Drift against the float32 encoder's vectors on held-out items (never those that calibrated); Recall@1 with query = gallery. "
        "Milliseconds at one thread, wall (CPU).",
        "",
        "| encoder | variant | MB | cosine, mean | cosine, worst | Recall@1 | batch 1 | batch 8 | batch 32 |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in kept["variants"]:
        drift = (
            "1 | 1" if row["variant"] == "float32" else f"{row['cosine_mean']:.5f} | {row['cosine_min']:.5f}"
        )
        lines.append(
            f"| {row['encoder']} ({row['items']} items, {row['calibrated']} calibrated) | {row['variant']} | {row['mb']:.2f} | {drift} | "
            f"{row['recall_at_1']:.3f} | {' | '.join(pair(times) for times in row['times'])} |"
        )
    return "\n".join([*lines, ""])
