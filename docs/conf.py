"""Sphinx settings. Build with: sphinx-build -W -b html docs docs/_build/html."""

from __future__ import annotations

import importlib.metadata
import logging as standard_logging
import sys
import warnings
from pathlib import Path
from typing import Any

from docutils import nodes
from math_core import LatexError, LatexToMathML
from sphinx.util import logging

project = "retrieval"
copyright = "the authors of retrieval, Apache-2.0"
try:
    release = importlib.metadata.version("embedding-retrieval")
except importlib.metadata.PackageNotFoundError:
    release = "0"

sys.path.insert(0, str(Path(__file__).parent))  # generate.py is an extension of this site
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generate", "twins"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

# Docstrings are written with `code` in single backticks, and types are links only where there is a
# page to go to
default_role = "code"
nitpick_ignore_regex = [("py:.*", ".*")]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
exclude_patterns = ["_build", "skills"]
html_theme = "furo"
html_title = f"retrieval {release}"
nitpicky = True

# Napoleon and MyST call interfaces that Sphinx deprecates
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(sphinx|myst_parser)\.")
warnings.filterwarnings(
    "ignore", category=PendingDeprecationWarning, module=r"(sphinx|myst_parser)\."
)
standard_logging.getLogger("faiss").setLevel(
    standard_logging.WARNING
)  # it says in which file it was found

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
MARK = "<!-- every file of benchmarks/results -->"


def add_results(app: Any, name: str, source: list[str]) -> None:
    """Put every measured result into benchmarks.md: a figure stands in one place only."""
    if name == "benchmarks":
        files = sorted(RESULTS.glob("*.md"))
        options = ":heading-offset: 1\n:relative-images:"
        parts = [f"```{{include}} ../benchmarks/results/{f.name}\n{options}\n```" for f in files]
        source[0] = source[0].replace(MARK, "\n\n".join(parts))


MATHML = LatexToMathML(fancy_error=False)


def add_formula(writer: Any, node: nodes.math | nodes.math_block) -> None:
    """Write a formula as MathML, which browsers typeset by themselves; one that is wrong is a
    warning, and so no page.
    """
    try:
        block = isinstance(node, nodes.math_block)
        writer.body.append(MATHML.convert_with_local_state(node.astext(), displaystyle=block))
    except LatexError as error:
        logging.getLogger(__name__).warning("a formula cannot be read: %s", error, location=node)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Connect the above."""
    app.connect("source-read", add_results)
    app.add_html_math_renderer("mathml", (add_formula, None), (add_formula, None))
