"""The figures of docs/aml.md, anml.md, daml.md, oahu.md and recipes.md: blocks between marks, made
of what the benchmarks kept.

    python benchmarks/pages.py        # writes them; a test compares

A block reads `<!-- figures: NAME -->` … `<!-- end of figures -->`. Papers' figures come from
published.toml, ours from results/.
"""

from __future__ import annotations

import re
from pathlib import Path

import page_aml
import page_anml
import page_daml
import page_oahu
import recipes

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {
    "aml.md": page_aml.BLOCKS,
    "anml.md": page_anml.BLOCKS,
    "daml.md": page_daml.BLOCKS,
    "oahu.md": page_oahu.BLOCKS,
    "recipes.md": recipes.BLOCKS,
}
MARK = re.compile(r"<!-- figures: ([\w-]+) -->\n.*?<!-- end of figures -->", re.S)


def written(name: str) -> str:
    """Return a page with its blocks made anew.

    Raises:
        KeyError: the page names a block that there is not, or lacks one.
    """
    text, blocks = (DOCS / name).read_text(encoding="utf-8"), PAGES[name]
    if missing := set(blocks) ^ {found[1] for found in MARK.finditer(text)}:
        raise KeyError(
            f"docs/{name} and its script do not have the same blocks: {', '.join(sorted(missing))}."
        )
    return MARK.sub(
        lambda found: (
            f"<!-- figures: {found[1]} -->\n\n{blocks[found[1]]().strip()}\n\n<!-- end of"
            " figures -->"
        ),
        text,
    )


def main() -> None:
    for name in PAGES:
        temporary = DOCS / f".{name}.tmp"
        temporary.write_text(written(name), encoding="utf-8")
        temporary.replace(DOCS / name)
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
