"""Put benchmarks/ on the module search path: `mteb_protocol` builds the tasks."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return SCRIPTS
