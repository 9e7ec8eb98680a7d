"""Names of variables and functions are nouns, not participles or pronouns."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMELESS = {"asked", "at", "each", "few", "figures", "found", "given", "good", "here", "made"}
NAMELESS |= {"meant", "one", "others", "said", "several", "taken", "there", "told", "wanted"}


def nameless(text: str) -> Iterator[str]:
    """Yield a module's variables, arguments, functions, classes and attributes in `NAMELESS`."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case _:
                continue
        if name.strip("_") in NAMELESS:
            yield f"{name} (line {node.lineno})"


def test_names_are_nouns():
    faults = {
        path.relative_to(ROOT).as_posix(): names
        for folder in ("retrieval", "plugins")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (names := list(nameless(path.read_text(encoding="utf-8"))))
    }
    assert not faults
