"""No file and no function is too long."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_LINES, FUNCTION_LINES = 830, 85
FILES = [
    path for folder in ("retrieval", "plugins") for path in sorted((ROOT / folder).rglob("*.py"))
]


def long_functions(text: str, most: int) -> dict[str, int]:
    """Return each function with more than `most` lines of code, and its number of lines.

    Docstrings, comments and blank lines do not count.
    """
    tree, lines = ast.parse(text), text.splitlines()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    prose = {
        number
        for node in ast.walk(tree)
        if isinstance(node, (*kinds, ast.ClassDef)) and ast.get_docstring(node) is not None
        for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    functions = {}
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            own = set(range(node.lineno, (node.end_lineno or 0) + 1)) - prose
            code = [line for number in own if (line := lines[number - 1].strip())]
            count = sum(line[0] != "#" for line in code)
            if count > most:
                functions[f"{node.name} (line {node.lineno})"] = count
    return functions


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(ROOT).as_posix() for path in FILES])
def test_files_and_functions_are_short(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= FILE_LINES and not long_functions(text, FUNCTION_LINES)
