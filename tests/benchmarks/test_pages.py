"""Tables of results on pages are written by a script. Numbers on five pages name their source."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["aml.md", "anml.md", "daml.md", "oahu.md", "recipes.md"]
FENCE = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)
GENERATED = re.compile(r"<!-- figures: ([\w-]+) -->.*?<!-- end of figures -->", re.S)
FIGURE = re.compile(r"(?<![\w.^])[+−-]?\d*\.\d+(?![\w.])|\d+ (?:%|times|points|minutes|seconds)")
SOURCE = re.compile(r"benchmarks/|tests/|\bthe paper|Eq \d|\]\(benchmarks\.md\)")


def without_source(text: str) -> list[str]:
    """Return the paragraphs, list items and table rows of a page that hold a figure and name no
    source; what is generated or code is left out.
    """
    text = GENERATED.sub("", FENCE.sub("", text))
    pieces = re.split(r"\n\s*\n|\n(?=[-|] ?)", text)
    plain = [re.sub(r"`[^`]*`", lambda m: m[0] if "/" in m[0] else "", piece) for piece in pieces]
    return [piece for piece in plain if FIGURE.search(piece) and not SOURCE.search(piece)]


@pytest.mark.parametrize("name", [*PAGES, "indexes.md", "mteb.md", "scale.md", "stores.md"])
def test_the_blocks_show_the_results(name):
    import pages

    assert pages.written(name) == (DOCS / name).read_text(encoding="utf-8"), (
        "python benchmarks/pages.py"
    )


@pytest.mark.parametrize("name", PAGES)
def test_a_number_outside_the_blocks_names_its_source(name):
    assert without_source((DOCS / name).read_text(encoding="utf-8")) == []
