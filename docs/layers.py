"""Draw the floors of the package: each folder with its purpose, and who imports whom, from the
code. Called by generate.py.
"""

from __future__ import annotations

import ast
import html
from collections.abc import Sequence
from pathlib import Path

WIDTH, TOP, HEIGHT, GAP = 860, 34, 40, 8
LEFT, RIGHT = 12, 640  # of a folder's box; arrows are on its right


def name_of(package: Path, file: Path) -> str:
    """The floor that a file stands on: its folder's name, or its own."""
    return file.relative_to(package).with_suffix("").parts[0]


def imports(package: Path) -> set[tuple[str, str]]:
    """Which floor imports which other, also in functions and for type checkers."""
    found: set[tuple[str, str]] = set()
    for file in sorted(package.rglob("*.py")):
        own = name_of(package, file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                modules = (
                    [node.module]
                    if node.module != "retrieval"
                    else [f"retrieval.{a.name}" for a in node.names]
                )
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                continue
            for module in modules:
                parts = module.split(".")
                if parts[0] == "retrieval" and len(parts) > 1 and parts[1] != own:
                    found.add((own, parts[1]))
    return found


def nearest(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows that no path over other floors replaces."""
    below: dict[str, set[str]] = {}
    for upper, lower in arrows:
        below.setdefault(upper, set()).add(lower)

    def reached(name: str) -> set[str]:
        return set().union(*({lower} | reached(lower) for lower in below.get(name, ())))

    return {
        (upper, lower)
        for upper, lower in arrows
        if not any(lower in reached(other) for other in below[upper] - {lower})
    }


def purpose(package: Path, name: str) -> str:
    """The first sentence of a floor's docstring."""
    file = package / name / "__init__.py"
    text = (
        ast.get_docstring(
            ast.parse((file if file.exists() else package / f"{name}.py").read_text("utf-8"))
        )
        or ""
    )
    return text.split("\n")[0].split(". ")[0].rstrip(".")


def draw(package: Path, floors: Sequence[set[str]]) -> str:
    """Return the diagram as SVG: highest floor first, with arcs to the nearest floors that each
    imports.

    Args:
        package: the folder `retrieval`.
        floors: the folders (and files) of each floor, lowest first.
    """
    rows = [name for floor in reversed(floors) for name in sorted(floor)]
    middle = {name: TOP + i * (HEIGHT + GAP) + HEIGHT / 2 for i, name in enumerate(rows)}
    height = TOP + len(rows) * (HEIGHT + GAP) + 6
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            ' font-family="sans-serif">'
        ),
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        (
            f'<text x="{LEFT}" y="21" font-size="13" fill="#444">Each floor imports from lower'
            " floors only. An arc leads to the nearest that it imports.</text>"
        ),
    ]
    for upper, lower in sorted(nearest(imports(package))):
        y, z = middle[upper], middle[lower]
        reach = RIGHT + 18 + 0.42 * abs(z - y)
        lines.append(
            f'<path d="M{RIGHT} {y:g} C{reach:g} {y:g} {reach:g} {z:g} {RIGHT + 6} {z:g}"'
            ' fill="none" stroke="#2a6fb0" stroke-opacity=".5"'
            f' stroke-width="1.3"><title>{label(upper)} imports {lower}</title></path>'
        )
        lines.append(f'<path d="M{RIGHT} {z:g} l8 -4 v8 z" fill="#2a6fb0"/>')
    for name in rows:
        y = middle[name] - HEIGHT / 2
        lines += [
            (
                f'<rect x="{LEFT}" y="{y:g}" width="{RIGHT - LEFT}" height="{HEIGHT}" rx="5"'
                ' fill="#eef4fa" stroke="#9db8d2"/>'
            ),
            (
                f'<text x="{LEFT + 12}" y="{y + 17:g}" font-size="14" font-weight="bold"'
                f' fill="#123">{label(name)}</text>'
            ),
            (
                f'<text x="{LEFT + 12}" y="{y + 32:g}" font-size="11"'
                f' fill="#345">{html.escape(short(purpose(package, name)))}</text>'
            ),
        ]
    return "\n".join([*lines, "</svg>", ""])


def label(name: str) -> str:
    """A floor as a reader knows it."""
    return "retrieval, the face" if name == "__init__" else name


def short(text: str) -> str:
    """Text that fits a box."""
    return text if len(text) <= 112 else f"{text[:111].rsplit(' ', 1)[0]} …"
