"""Write the tables of docs/aml.md, anml.md, daml.md, indexes.md, mteb.md, oahu.md, recipes.md,
scale.md and stores.md from the benchmarks' results.

    python benchmarks/pages.py        # a test compares the pages with the results

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`. Papers' numbers come
from published.toml, ours from the tables in results/, so that both show the same numbers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import recipes
from bench import DOCS, RESULTS, has, markdown, published, write

MARK = re.compile(r"<!-- figures: ([\w-]+) -->\n.*?<!-- end of figures -->", re.S)
Table = list[dict[str, str]]


# Tables of results


@functools.cache
def tables(result: str) -> dict[str, list[Table]]:
    """Return the tables of results/RESULT.md by heading; rows by column."""
    by_heading: dict[str, list[Table]] = {}
    heading, columns = "", None
    for line in (RESULTS / f"{result}.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            columns = None
            continue
        cells = [cell.strip() for cell in line.strip()[1:-1].split("|")]
        if columns is None:
            columns = cells
            by_heading.setdefault(heading, []).append([])
        elif set("".join(cells)) - set("-: "):
            by_heading[heading][-1].append(dict(zip(columns, cells, strict=True)))
    return by_heading


def rows(result: str, heading: str, number: int = 0) -> Table:
    """Return a table of a result: number `number` under the heading that begins with `heading`."""
    for title, entries in tables(result).items():
        if title.startswith(heading) and number < len(entries):
            return entries[number]
    raise KeyError(f"results/{result}.md has no table {number} under '{heading}'.")


def whole(table: Table, without: tuple[str, ...] = ()) -> str:
    columns = [column for column in table[0] if column not in without]
    return markdown(columns, [[entry[column] for column in columns] for entry in table])


def beside_paper(table: Table, paper: str, titles: dict[str, str], printed: str) -> str:
    """Return a table of means, with the paper's values of some columns in brackets."""
    lines = []
    for entry in table:
        (_, name), *cells = entry.items()
        lines.append([name])
        for method, cell in cells:
            place = (paper, name, titles.get(method, method))
            more = printed.format(published(*place)) if has(*place) else ""
            lines[-1].append(cell.split(" ±")[0] + re.sub(r"(?<!\d)0\.", ".", more))
    return markdown(list(table[0]), lines)


def claimed(first: str, second: str) -> dict[str, str]:
    """Return by set a method's gain over another, where the paper claims one."""
    for entry in rows("methods", "Claimed"):
        if (entry[""], entry["claimed above"]) == (first, second):
            return dict(list(entry.items())[3:])
    raise KeyError(f"results/methods.md does not compare {first} with {second}.")


# The blocks


def aml_held_out() -> str:
    """Differences on sets that a rule chose."""
    parts = {"all": rows("aml_heldout", "All of", 1), "ten a class": rows("aml_heldout", "Ten", 1)}
    lines = [{"items": size, **entry} for size, table in parts.items() for entry in table]
    return whole(lines)


def aml_verification() -> str:
    """AUC of pairs."""
    return f"""{whole(rows("aml_roc", "Verification"))}

AUC over pairs of unseen classes, mean ± Student's 95 % interval over five choices of the classes.
Differences on the same pairs:

{whole(rows("aml_roc", "Verification", 1))}"""


def aml_table_1() -> str:
    """Errors, with the paper's in brackets."""
    titles = {"GMML, t = .5": "GMML", "AML, α, β tuned": "AML", "ITML": "ITML"}
    return beside_paper(rows("aml_table1", "Table 1"), "aml_table_1", titles, " [{:.3f}]")


def anml_losses() -> str:
    """DANML less Multi-Similarity, beside the paper's gain."""
    pair = ("DANML", "Multi-Similarity")
    theirs, base = (published("anml_table_4", loss, "CUB-200-2011") for loss in pair)
    printed = {"the paper, Recall@1 on CUB-200 in points": f"{theirs - base:.1f}"}
    return whole([claimed(*pair) | printed])


def anml_table_2() -> str:
    """Accuracies, with the paper's in brackets."""
    return beside_paper(rows("anml_table2", "Parameters and k"), "anml_table_2", {}, " ({:.1f})")


def daml_real() -> str:
    """Gains of several metrics on real data, and of learned weights over equal ones."""
    title = "Several metrics"
    return f"""{whole(rows("daml_real", title), ("margin, rate",))}

In %, mean ± standard deviation of ten random splits. A gain is the difference to one metric on the
same splits, in points, with its 95 % interval, corrected for splits that share items (Nadeau &
Bengio, Machine Learning 52, 2003). Learned weights minus even ones:

{whole(rows("daml_real", title, 1))}"""


def identify_rates() -> str:
    """Rates of false alarms, and what breaks them."""
    return f"""{whole(rows("identify", "Rate of false alarms"), ("binomial", "inside"))}

*False alarms* is the share of strangers that got a label; *over classes* takes the stranger's class
as the unit, ± Student's 95 % interval. What becomes of known photos at the same rates, beside the
best threshold on the nearest distance, which only somebody finds who has the strangers:

{whole(rows("identify", "Known photos"), ("wrong", "by hand: right", "false"))}"""


def identify_broken() -> str:
    """Rates of false alarms where the assumptions do not hold."""
    return whole(rows("identify", "What breaks it"), ("unknown, told", "unknown, measured"))


def mteb_scores() -> str:
    """MTEB's hit rates beside Recall@1, and its scores of similar names."""
    title = "Image retrieval in MTEB"
    return f"""{whole(rows("mteb_protocol", title))}

A query's own picture is *not alone at the top* if another picture is at least as similar. The next
table shows MTEB scores whose names are similar and whose formulas differ:

{whole(rows("mteb_protocol", title, 1))}"""


def oahu_itself() -> str:
    """OAHU on the paper's set, and its two ways to search."""
    names = ("Euclid", "LEGO", "OAHU, untrained", "OAHU", "OAHU, η .01 τ 1.9")
    measured = {entry[""]: entry for entry in rows("oahu_table3", "OAHU and its baselines")}
    lines = [
        [column, *(re.split(r" ±|,", measured[name][column])[0] for name in names)]
        for column in ("error", "error, 100 references", "AUC of pairs")
    ]
    return f"""{markdown(["", *names], lines)}

Means of three repeats; `benchmarks/results/oahu_table3.md` has the spreads. *Error* is that of
5-nearest-neighbour classification. How η = .01 and τ = 1.9 were chosen was not recorded. In unseen
classes:

{whole(rows("oahu_table3", "Retrieval"))}"""


def oahu_warm() -> str:
    """Gains and losses of the warm start, and how often it leaves Euclid without reason."""
    counts, shuffled, means, _, pixels = (
        whole(rows("oahu_warm", "`oahu.warm` along", number)) for number in range(5)
    )
    return f"""{counts}

With shuffled labels:

{shuffled}

Mean gains with true labels:

{means}

On Fashion-MNIST's pixels with 35,000 references, in each repeat:

{pixels}"""


def stores_beside() -> str:
    """Return the tables of stores, a size each, without what only a developer asks."""
    text = []
    for heading, (table, *_) in tables("engines").items():
        if heading[0].isdigit() and table:
            left_out = ("32 queries", "count a tenth", "add 100", "delete 100", "load")
            text.append(f"{heading}:\n\n{whole(table, left_out)}")
    return "\n\n".join(text)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "aml.md": {
        "aml-held-out": aml_held_out,
        "aml-verification": aml_verification,
        "aml-table-1": aml_table_1,
        "aml-deep": lambda: whole([claimed("AML confusion", "triplet")]),
    },
    "anml.md": {"anml-losses": anml_losses, "anml-table-2": anml_table_2},
    "daml.md": {"daml-real": daml_real},
    "indexes.md": {"identify-rates": identify_rates, "identify-broken": identify_broken},
    "mteb.md": {"mteb-scores": mteb_scores},
    "oahu.md": {"oahu-warm": oahu_warm, "oahu-itself": oahu_itself},
    "recipes.md": recipes.BLOCKS,
    "scale.md": {
        "scale-stores": lambda: whole(rows("scale", "Stores")),
        "scale-photos": lambda: whole(rows("scale", "Photos")),
        "scale-training": lambda: whole(rows("scale", "Training")),
    },
    "stores.md": {"stores": stores_beside},
}


def written(name: str) -> str:
    """Return a page with new blocks.

    Raises:
        KeyError: the page names an unknown block, or lacks one.
    """
    text, blocks = (DOCS / name).read_text(encoding="utf-8"), PAGES[name]
    if missing := set(blocks) ^ set(MARK.findall(text)):
        raise KeyError(
            f"docs/{name} and its script do not have the same blocks: {', '.join(sorted(missing))}."
        )
    end = "<!-- end of figures -->"
    return MARK.sub(
        lambda mark: f"<!-- figures: {mark[1]} -->\n\n{blocks[mark[1]]().strip()}\n\n{end}", text
    )


def main() -> None:
    for name in PAGES:
        write(DOCS / name, written(name))
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
