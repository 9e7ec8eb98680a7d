"""The figures of docs/oahu.md that come from results/oahu_warm.md."""

from __future__ import annotations

from page_tables import markdown, row, rows

RESULT, HEADING = "oahu_warm", "`oahu.warm` along"
COUNTS, MEANS, SETS, FASHION = range(4)


def warm() -> str:
    """What the warm start gains, where it loses, and the form before it."""
    counts, means = rows(RESULT, HEADING, COUNTS), rows(RESULT, HEADING, MEANS)
    head = ["", "earlier form", "present form"]
    before, now = (row(counts, _=name) for name in ("before", "now"))
    lines = [
        ["streams", before["streams"], now["streams"]],
        ["somewhere below Euclid's accuracy by more than .005", before["anywhere below −.005"], now["anywhere below −.005"]],
        ["the same, beyond the noise of the queries", before["beyond noise"], now["beyond noise"]],
        ["lowest point of any stream", before["lowest gain"], now["lowest gain"]],
        ["Recall@1 somewhere below by more than .005", before["Recall@1 anywhere below −.005"], now["Recall@1 anywhere below −.005"]],
        ["MAP@R so", before["MAP@R so"], now["MAP@R so"]],
        ["streams that left Euclid", before["ever left Euclid"], now["ever left Euclid"]],
    ]  # fmt: skip
    for point in ("100", "1,000", "10,000", "all five"):
        found = row(means, triplets=point)
        title = "mean gain over all points" if point == "all five" else f"mean gain after {point} triplets"
        lines.append([title, found["before: accuracy"], found["now: accuracy"]])
    return "\n\n".join([markdown(head, lines), lost(), fashion()])


def lost() -> str:
    """Where another figure than accuracy is lost."""
    found = [
        f"{entry['set']} ({entry['features']}: accuracy {entry['now']}, Recall@1 {entry['now: Recall@1']}, MAP@R {entry['MAP@R']})"
        for entry in rows(RESULT, HEADING, SETS)
        if min(float(entry["now: Recall@1"]), float(entry["MAP@R"])) < -0.005
    ]
    if not found:
        return "No set loses Recall@1 or MAP@R by more than .005 on average."
    return (
        "**It is judged by what several neighbours say, and promises nothing of Recall@1 or MAP@R.** After 10,000 triplets, the means of the seeds, these lose one of the two: "
        f"{'; '.join(found)}."
    )


def fashion() -> str:
    """The gain on pixels."""
    table = rows(RESULT, HEADING, FASHION)
    said = [
        f"{name} {row(table, triplets='10,000', version=version)['gain of accuracy']}"
        for name, version in (("present form", "now"), ("earlier form", "before"))
        if version in {entry["version"] for entry in table}
    ]
    return (
        "Fashion-MNIST's pixels, 35,000 references, gain of 5-nearest-neighbour accuracy after 10,000 triplets in each repeat: "
        f"{'; '.join(said)}."
    )


BLOCKS = {"oahu-warm": warm}
