"""Put benchmarks/ on the module search path, because its scripts are not a package."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return SCRIPTS
