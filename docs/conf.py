"""Sphinx settings. Build with: sphinx-build -W -b html docs docs/_build/html."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

project = "retrieval"
copyright = "the authors of retrieval, Apache-2.0"
try:
    release = importlib.metadata.version("embedding-retrieval")
except importlib.metadata.PackageNotFoundError:
    release = "0"

extensions = ["myst_parser"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"retrieval {release}"
nitpicky = True

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
MARK = "<!-- every file of benchmarks/results -->"


def add_results(app: Any, name: str, source: list[str]) -> None:
    """Put every measured result into benchmarks.md, so that a figure is written in one place only."""
    if name == "benchmarks":
        files = sorted(RESULTS.glob("*.md"))
        parts = [f"```{{include}} ../benchmarks/results/{f.name}\n:heading-offset: 1\n```" for f in files]
        source[0] = source[0].replace(MARK, "\n\n".join(parts))


def setup(app: Any) -> None:
    """Connect the above."""
    app.connect("source-read", add_results)
