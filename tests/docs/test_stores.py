"""What the page of stores says of them is shown by tests that there are, and with the versions that
it names.
"""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from retrieval.plugin import testing

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "stores.md").read_text(encoding="utf-8")


def known() -> set[str]:
    """The names of all tests of stores."""
    files = [
        *(ROOT / "tests" / "stores").glob("test_*.py"),
        *(ROOT / "tests" / "serving").glob("test_*.py"),
    ]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return {*re.findall(r"^ *(?:async )?def (test_\w+)", text, re.M), *dir(testing.StoreSuite)}


def test_every_line_of_the_table_names_tests_that_are_there() -> None:
    rows = PAGE[PAGE.index("| shown by |") :].splitlines()[2:]
    there, lines = known(), 0
    for row in rows:
        if not row.startswith("|"):
            break
        lines += 1
        shown = row.strip("| ").rsplit(" | ", 1)[1]
        names = re.findall(r"`([\w./]*test_[\w./]+)`", shown)
        assert names, f"no test shows: {row}"
        for name in names:
            assert (ROOT / name).is_file() if "/" in name else name in there, (
                f"there is no {name}: {row}"
            )
    assert lines >= 14


@pytest.mark.parametrize(
    ("package", "said"),
    [("milvus", "Milvus {}"), ("pymilvus", "pymilvus {}"), ("qdrant-client", "qdrant-client {}")],
)
def test_the_versions_are_those_that_are_tested(package: str, said: str) -> None:
    pytest.importorskip({"qdrant-client": "qdrant_client"}.get(package, package))
    major, minor, *_ = version(package).split(".")
    assert re.search(re.escape(said.format(f"{major}.{minor}")) + r"\b", PAGE), version(package)
