"""The extras for a GPU are of one CUDA: read from the metadata of what they resolve to
(`resolve_gpu.py` writes it).
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def resolve() -> Any:
    path = Path(__file__).with_name("resolve_gpu.py")
    spec = importlib.util.spec_from_file_location("resolve_gpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kept(resolve: Any) -> dict[str, Any]:
    return dict(json.loads(resolve.KEPT.read_text(encoding="utf-8")))


def test_each_of_the_three_says_its_cuda(kept: dict[str, Any], resolve: Any) -> None:
    """A build for the CPU would be of no CUDA, and so of no other."""
    by = {each["name"]: set(resolve.majors(each)) for each in kept["packages"]}
    assert by["torch"] == by["faiss-gpu-cuvs"] == by["nvidia-cuda-runtime"] == {"13"}
    runtime = [
        each
        for each in kept["packages"]
        if each["name"].startswith(("nvidia-cudnn", "nvidia-cufft"))
    ]
    assert len(runtime) == 2  # of onnxruntime-gpu's extras cuda and cudnn, which name them


def test_the_extras_resolve_to_one_cuda_and_one_package_a_module(
    kept: dict[str, Any], resolve: Any
) -> None:
    assert resolve.faults(kept) == []


def test_it_is_of_the_extras_as_they_are(kept: dict[str, Any], resolve: Any) -> None:
    """Where they changed: python tests/host/resolve_gpu.py."""
    assert kept["wanted"] == resolve.wanted()
