"""The documentation builds without a warning, and reaches every page."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest


def test_every_page_is_in_the_contents(root: Path) -> None:
    contents = set(re.findall(r"^[a-z]+$", (root / "docs" / "index.md").read_text(encoding="utf-8"), re.M))
    assert contents == {page.stem for page in (root / "docs").glob("*.md")} - {"index"}


def test_sphinx_has_no_warning(root: Path, tmp_path: Path) -> None:
    for module in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(module, reason="the documentation needs pip install 'embedding-retrieval[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-d", str(tmp_path / "trees"), "-b", "html",
         str(root / "docs"), str(tmp_path / "html")], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = html.unescape((tmp_path / "html" / "benchmarks.html").read_text(encoding="utf-8"))
    for result in (root / "benchmarks" / "results").glob("*.md"):
        title = re.search(r"^# (.+)$", result.read_text(encoding="utf-8"), re.M)
        assert title
        assert title[1].split("`")[0].strip() in page
