"""The figures of docs/daml.md."""

from __future__ import annotations

from bench import markdown
from page_tables import rows


def real() -> str:
    """Whether several metrics gain on real data."""
    measured = rows("daml_real", "Several metrics")
    columns = ["set", "row", "Recall@1", "gain", "MAP@R", "gain of MAP@R"]
    lines = [
        [clear(entry[name]) if name.startswith("gain") else entry[name] for name in columns]
        for entry in measured
    ]
    better = [
        entry["set"]
        for entry in measured
        if entry["row"].startswith("not trained") and float(entry["gain"].split(" ± ")[0]) > 0
    ]
    untrained = (
        f" On {', '.join(better)}, *not trained* has a higher mean Recall@1 than *one metric*."
        if better
        else ""
    )
    fragile = "; ".join(
        f"{entry['set']} ({entry['row']}) {entry['Recall@1, first']}, now {entry['Recall@1, now']}"
        for entry in rows("daml_real", "Several metrics", 1)
    )
    weighed = "; ".join(
        f"{entry['set']} {entry['Recall@1']}, {entry['MAP@R']}"
        for entry in rows("daml_real", "Several metrics", 2)
    )
    return f"""{markdown(columns, lines)}

In %, mean ± standard deviation of ten random splits. A gain is the difference to one metric on the same splits, in points, with its 95 % interval, and is bold if
the interval leaves out 0. The splits share items, which makes the intervals somewhat too narrow.{untrained}
Learned minus even weights, in Recall@1 and MAP@R: {weighed}.

**The gains depend on the settings tried.** Each row first chose among six combinations of margin and rate, later among ten. Gains in Recall@1 of rows whose choice changed: {fragile or "none"}.
`benchmarks/results/daml_real.md` has these gains in MAP@R, and says which of the chosen rates are the lowest or highest tried."""


def clear(gain: str) -> str:
    """Return a gain "mean ± half width", bold if its interval leaves out 0."""
    if not gain:
        return gain
    middle, half = (float(part) for part in gain.split(" ± "))
    return f"**{gain}**" if abs(middle) > half else gain


BLOCKS = {"daml-real": real}
