"""The figures of docs/daml.md."""

from __future__ import annotations

from bench import markdown
from page_tables import rows


def real() -> str:
    """Whether several metrics gain on real data."""
    found = rows("daml_real", "Several metrics")
    head = ["set", "row", "Recall@1", "gain", "MAP@R", "gain of MAP@R"]
    trained = [
        entry for entry in found if entry["gain"] and not entry["row"].startswith("not trained")
    ]
    raw = [entry for entry in found if entry["row"].startswith("not trained")]

    def counted(column: str) -> str:
        ahead, behind = [], []
        for entry in trained:
            middle, half = (float(part) for part in entry[column].split(" ± "))
            name = f"{entry['set']}: {entry['row']} {entry[column]}"
            ahead += [name] if middle - half > 0 else []
            behind += [name] if middle + half < 0 else []
        level = len(trained) - len(ahead) - len(behind)
        gaining, losing = ("; ".join(names) or "none" for names in (ahead, behind))
        return f"gains: {gaining}; losses: {losing}; for {level} the interval holds 0"

    better = [entry["set"] for entry in raw if float(entry["gain"].split(" ± ")[0]) > 0]
    untrained = (
        " Features that are not trained have the higher mean Recall@1 than one metric on"
        f" {', '.join(better)}."
        if better
        else ""
    )
    fragile = "; ".join(
        f"{entry['set']}, {entry['row']} {entry['Recall@1, first']}, now {entry['Recall@1, now']}"
        for entry in rows("daml_real", "Several metrics", 1)
    )
    weighed = "; ".join(
        f"{entry['set']} {entry['Recall@1']} in Recall@1, {entry['MAP@R']} in MAP@R"
        for entry in rows("daml_real", "Several metrics", 2)
    )
    return f"""{markdown(head, [[entry[column] for column in head] for entry in found])}

Ten splits, paired; gains over one metric in points with 95 % intervals, which are somewhat too narrow. Of {len(trained)} comparisons, in Recall@1 {counted("gain")}. In MAP@R {counted("gain of MAP@R")}.{untrained}
Learned weights minus even weights: {weighed}.

**These gains depend on which candidates are tried.** At first six combinations of margin and rate were tried. With all ten, some rows select another one, which changes their gain in Recall@1: {fragile or "none"}. `benchmarks/results/daml_real.md` has
MAP@R, and which of the chosen rates are the lowest or highest tried."""


BLOCKS = {"daml-real": real}
