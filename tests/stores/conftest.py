from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

_spec = importlib.util.spec_from_file_location(
    "store_makers", Path(__file__).parents[1] / "serving" / "makers.py"
)
_makers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_makers)


@pytest.fixture(scope="session")
def plain_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of images, vectors of 16, without a rescorer. Not to be changed."""
    return _makers.make_bundle(tmp_path_factory.mktemp("bundle") / "bundle")


@pytest.fixture(scope="session")
def other_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one, whose vectors are as wide. Not to be changed."""
    return _makers.make_bundle(tmp_path_factory.mktemp("other") / "bundle", seed=1)


@pytest.fixture(scope="session")
def makers() -> ModuleType:
    """tests/serving/makers.py: real bundles and images on demand."""
    return _makers
