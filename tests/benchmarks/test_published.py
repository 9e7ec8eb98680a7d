"""Numbers from papers are in benchmarks/published.toml and in no script."""

import ast
import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
TABLES = tomllib.loads((SCRIPTS / "published.toml").read_text(encoding="utf-8"))


def written(code: str) -> set[float]:
    """Return the numbers in a script, including those in its texts."""
    numbers: set[float] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            numbers.add(round(float(node.value), 4))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            numbers |= {round(float(text), 4) for text in re.findall(r"\d*\.\d+", node.value)}
    return numbers


def sets_of_figures() -> Iterator[tuple[str, set[float]]]:
    """Yield the rows and columns of the tables, and the differences of two columns."""
    for name, table in TABLES.items():
        rows = table["rows"]
        for row, values in rows.items():
            yield f"{name}, {row}", set(values)
        columns = list(zip(*rows.values(), strict=True))
        for title, values in zip(table["columns"], columns, strict=True):
            yield f"{name}, {title}", set(values)
        for first, second in itertools.combinations(range(len(columns)), 2):
            gaps = {
                round(abs(b - a), 4) for a, b in zip(columns[first], columns[second], strict=True)
            }
            yield f"{name}, {table['columns'][second]} less {table['columns'][first]}", gaps


def copied(code: str) -> list[str]:
    """Return the published rows, columns and differences (of three numbers or more) in a script."""
    numbers = written(code)
    return [name for name, figures in sets_of_figures() if len(figures) > 2 and figures <= numbers]


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.name)
def test_no_script_holds_a_published_table(script):
    assert not copied(script.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", TABLES)
def test_each_table_has_a_source_and_is_rectangular(name):
    table = TABLES[name]
    assert "Table" in table["source"] and table["what"]
    assert {len(values) for values in table["rows"].values()} == {len(table["columns"])}


def test_a_missing_number_gives_one_sentence():
    from bench import has, published

    assert published("aml_table_1", "vehicle", "AML") == TABLES["aml_table_1"]["rows"]["vehicle"][1]
    assert not has("aml_table_1", "vehicle", "SCML")
    with pytest.raises(KeyError, match="has no aml_table_1, vehicle, SCML"):
        published("aml_table_1", "vehicle", "SCML")
