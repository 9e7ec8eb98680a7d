"""The page of thresholds has every constant that a test moves, with the product's values."""

import re
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.scale

TESTS = Path(__file__).parents[1]
ROW = re.compile(r"\| `([\w.]+)\.(_?[A-Z][A-Z0-9_]*)` \| ([^|]+) \| [^|]+ \|(?: ([^|]+) \|)?")
CONSTANT = r"_?[A-Z][A-Z0-9_]+"
MOVES = (
    rf'setattr\(\s*(?:\w+, )?"(?:[\w.]+\.)?({CONSTANT})", ',
    rf"^ *(?:[a-z_]+\._?[A-Z_]+ = )?(?:[a-z_]+\.)({CONSTANT}) = ",
    rf'^ +"({CONSTANT})": [\d_]+,$',
)
# Not sizes or times: exporters, places of files, a rounding limit, and what other packages have
OTHERS = {"EXPORTERS", "DEBIAN", "WEIGHTS", "RAW", "NEGLIGIBLE"}
OTHERS |= {"ENDPOINT", "HF_HUB_CACHE", "HF_HUB_DISABLE_XET", "NUMPY_RANDOM"}


def rows():
    return ROW.findall((Path(__file__).parent / "README.md").read_text())


@pytest.mark.parametrize(("module", "name", "value", "tests"), rows())
def test_a_row_has_the_products_value_and_names_tests_that_exist(module, name, value, tests):
    assert getattr(import_module(module), name) == eval(value)
    for test in re.findall(r"`(\w+/\w+\.py)`", tests):
        assert (TESTS / test).is_file()


def test_every_constant_that_a_test_moves_has_a_row():
    known = OTHERS | {name for _, name, _, _ in rows()}
    for path in TESTS.rglob("*.py"):
        text = path.read_text()
        moved = {name for move in MOVES for name in re.findall(move, text, re.M)}
        assert moved <= known, f"{path.relative_to(TESTS)}: {moved - known}"
