"""EMNIST and CIFAR-10, on small files of the published layout."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
from layouts import idx, refused

from retrieval_core import cifar10, emnist


def write_emnist(folder: Path) -> tuple[Any, Any]:
    images = np.random.default_rng(0).integers(0, 256, (7, 28, 28), dtype=np.uint8)
    labels = np.array([0, 46, 10, 3, 3, 1, 2], dtype=np.uint8)
    for split, rows in (("train", slice(0, 5)), ("test", slice(5, 7))):
        # the published images are transposed
        stored = np.ascontiguousarray(images[rows].transpose(0, 2, 1))
        start = folder / f"emnist-balanced-{split}"
        Path(f"{start}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(stored)))
        Path(f"{start}-labels-idx1-ubyte").write_bytes(idx(labels[rows]))
    return images, labels


def test_emnist_is_transposed_back(tmp_path):
    images, labels = write_emnist(tmp_path)
    data = emnist(tmp_path, counts="any")
    assert np.array_equal(data.arrays, images) and list(data.labels) == [str(n) for n in labels]
    assert data.splits == ["train"] * 5 + ["test"] * 2 and data.metadata is None
    assert list(data.keys)[4:6] == ["train/4", "test/0"]


def test_an_incomplete_emnist_is_refused(tmp_path):
    assert "not a folder" in refused(emnist, tmp_path / "none")
    assert "neither emnist-balanced-train-images" in refused(emnist, tmp_path, counts="any")
    write_emnist(tmp_path)
    (tmp_path / "emnist-balanced-test-labels-idx1-ubyte").write_bytes(idx(np.zeros(9, np.uint8)))
    assert "2 images and 9 labels" in refused(emnist, tmp_path, counts="any")
    assert "letters" in refused(emnist, tmp_path, variant="letters")


def write_cifar(folder: Path) -> Any:
    images = np.random.default_rng(1).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    labels = [n % 10 for n in range(12)]
    names = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    for place, name in enumerate(names):
        content = b""
        for row in (2 * place, 2 * place + 1):
            planes = [images[row, :, :, channel].tobytes() for channel in range(3)]
            content += bytes([labels[row]]) + b"".join(planes)
        (folder / name).write_bytes(content)
    return images


def test_cifar10_binary_version(tmp_path):
    images = write_cifar(tmp_path)
    data = cifar10(tmp_path, counts="any")
    assert np.array_equal(data.arrays, images)
    assert list(data.labels)[:3] == ["airplane", "automobile", "bird"]
    assert len(set(data.labels)) == 10 and data.splits == ["train"] * 10 + ["test"] * 2


def test_a_damaged_or_pickled_cifar10_is_refused(tmp_path):
    assert "not a folder" in refused(cifar10, tmp_path / "none")
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x04pickle")
    assert "pickles" in refused(cifar10, tmp_path, counts="any")
    write_cifar(tmp_path)
    whole = (tmp_path / "data_batch_2.bin").read_bytes()
    eleven = b"\x0b" + whole[1:]
    for content, words in (
        (whole[:-1], "records of 3,073"),
        (b"", "records"),
        (eleven, "label 11"),
    ):
        (tmp_path / "data_batch_2.bin").write_bytes(content)
        assert words in refused(cifar10, tmp_path, counts="any")


def test_counts_that_differ_from_the_published_ones_are_refused(tmp_path):
    write_emnist(tmp_path)
    says = "its train side has 112,800 images of 47 classes; here it has 5 images of 4 classes"
    assert says in refused(emnist, tmp_path)
    write_cifar(tmp_path)
    says = "its test side has 10,000 images of 10 classes; here it has 2 images of 2 classes"
    assert says in refused(cifar10, tmp_path)
