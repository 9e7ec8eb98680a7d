"""Tests that need a CUDA device: `pytest -m gpu`. A skipped test says what is missing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from retrieval.base.runtime import load_faiss, load_libraries, load_onnxruntime
from retrieval.recipe.read import Recipe, check_recipe
from retrieval.store.faiss_backends import gpus_found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder with `gpu`."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device():
    """The device on which torch trains."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return "cuda"


@pytest.fixture(scope="session")
def index_gpus():
    """The number of GPUs that FAISS finds."""
    if not hasattr(load_faiss(), "StandardGpuResources"):
        pytest.skip("this FAISS is built without a GPU: pip install faiss-gpu-cuvs")
    if gpus_found() == 0:
        pytest.skip("FAISS finds no CUDA device")
    return gpus_found()


@pytest.fixture
def encoder_device():
    """The device on which ONNX Runtime runs a bundle."""
    runtime = load_onnxruntime()
    if "CUDAExecutionProvider" not in runtime.get_available_providers():
        pytest.skip("this ONNX Runtime has no CUDA: pip install 'onnxruntime-gpu[cuda,cudnn]'")
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no CUDA device: nvidia-smi is not there")
    load_libraries(runtime)
    return "cuda"


@pytest.fixture(scope="session")
def make():
    """A function that returns a recipe of digits and a small net, with some tables replaced."""

    def build(device: str, **tables: Any) -> Recipe:
        base: dict[str, Any] = {
            "data": {"name": "core.digits"},
            "split": {"by": "class"},
            "sampler": {"classes": 4, "items": 8, "batches": 12},
            "backbone": {"name": "core.convnet"},
            "head": {"embedding_size": 32},
            "loss": {"name": "pml.arc_face"},
        }
        train = {"epochs": 2, "device": device, **tables.pop("train", {})}
        return check_recipe({**base, **tables, "train": train})

    return build


@pytest.fixture(scope="session")
def vectors():
    """Vectors (20,000, 64) in clusters, like those of images of 200 classes."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(200, 64))[random.integers(200, size=20_000)]
    return (centres + 0.5 * random.normal(size=(20_000, 64))).astype(np.float32)
