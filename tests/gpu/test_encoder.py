"""Bundles on CUDA give the CPU's vectors, and a server encodes on CUDA."""

from __future__ import annotations

import threading
import time

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from retrieval.bundle.bundle import Bundle
from retrieval.export.export_run import export
from retrieval.index.index import create_index
from retrieval.training.trainer import train_run

from retrieval_server.server import serve


@pytest.fixture(scope="module")
def bundles(make, tmp_path_factory):
    """A trained run's bundle, in one graph and in two."""
    folder = tmp_path_factory.mktemp("bundles")
    run = train_run(folder / "run", make("auto", train={"epochs": 1}))
    for name, split in (("whole", False), ("split", True)):
        export(run, folder / name, split=split)
    return {name: folder / name for name in ("whole", "split")}


def pixels(bundle: Bundle, rows: int) -> NDArray[np.uint8]:
    shape = bundle.manifest.input.shape
    return np.random.default_rng(0).integers(0, 256, (rows, *shape), dtype=np.uint8)


@pytest.mark.parametrize("name", ["whole", "split"])
def test_vectors_are_those_of_the_cpu(bundles, encoder_device, name):
    bundle, reference = (Bundle.open(bundles[name], device=d) for d in (encoder_device, "cpu"))
    assert bundle.device == encoder_device and bundle.fallback is None
    for rows in (1, 3, 32, 65):
        images = pixels(bundle, rows)
        actual, expected = (b.encode(images, batch_size=rows).vector for b in (bundle, reference))
        assert np.linalg.norm(actual - expected, axis=1).max() < 1e-2, rows  # TF32


def test_threads_encode_at_the_same_time(bundles, encoder_device):
    bundle = Bundle.open(bundles["split"], device=encoder_device)
    images = pixels(bundle, 16)
    expected = bundle.encode(images).vector
    errors: list[float] = []

    def work() -> None:
        for _ in range(20):
            errors.append(float(np.abs(bundle.encode(images).vector - expected).max()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 80 and max(errors) < 1e-3


def test_a_server_encodes_on_the_device(bundles, encoder_device, tmp_path):
    bundle = Bundle.open(bundles["whole"], device="cpu")
    (tmp_path / "photos").mkdir()
    for number, image in enumerate(np.moveaxis(pixels(bundle, 50), 1, -1)):
        Image.fromarray(image.squeeze()).save(tmp_path / "photos" / f"{number}.png")
    create_index(tmp_path / "index", bundles["whole"], tmp_path / "photos", progress=False)
    with serve(tmp_path / "index", port=0, wait=False, device=encoder_device) as serving:
        deadline = time.monotonic() + 120
        answer = httpx.get(f"{serving.url}readyz")
        while answer.status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.1)
            answer = httpx.get(f"{serving.url}readyz")
    assert answer.status_code == 200 and "fallback" not in answer.json()
