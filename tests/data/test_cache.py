import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from limits import files_of_at_most
from numpy.typing import NDArray
from PIL import Image
from retrieval.data.cache import frozen_features
from retrieval.data.datasets import ArrayDataset, FileDataset
from retrieval.errors import DataError
from retrieval.model.contracts import Dataset
from retrieval.serving.images import Preprocessing
from torch import Tensor

PRE = Preprocessing((6, 6), 1, (0.0,), (1.0,))


class Net:
    """Counts what it is asked for; may be interrupted."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.items = 0
        self.fail_after = fail_after

    def __call__(self, x: Tensor) -> Tensor:
        if self.fail_after is not None and self.items >= self.fail_after:
            raise KeyboardInterrupt
        self.items += len(x)
        return torch.stack(
            [x.float().mean((1, 2, 3)), x.float().amax((1, 2, 3)), x[:, 0, 0, 0].float()], 1
        )


def compute(net: Any, data: Dataset, folder: Path | None, **options: Any) -> NDArray[np.float32]:
    settings = {"width": 3, "fingerprint": "net 1", "device": "cpu", "batch": 8}
    settings |= {"progress": False, "folder": folder} | options
    return frozen_features(net, data, settings.pop("preprocessing", PRE), **settings)


@pytest.fixture
def data():
    pixels = np.random.default_rng(0).integers(0, 256, (37, 6, 6), dtype=np.uint8)
    return ArrayDataset(pixels, ["a"] * 37)


def plain(data: ArrayDataset) -> NDArray[np.float32]:
    """The same features by plain loops."""
    rows = [
        [float(np.mean(image, dtype=np.float64)), float(image.max()), float(image[0, 0])]
        for image in data.arrays
    ]
    return np.array(rows, dtype=np.float32)


def entry(folder: Path) -> Path:
    (found,) = (folder / "features").iterdir()
    return found


def test_computed_once_then_read(data, tmp_path):
    net = Net()
    first = compute(net, data, tmp_path)
    np.testing.assert_allclose(first, plain(data), rtol=1e-6)
    assert first.dtype == np.float32 and net.items == 37
    second = compute(net, data, tmp_path)
    assert net.items == 37
    np.testing.assert_array_equal(first, second)
    second[0] = -1  # the caller's own copy
    np.testing.assert_array_equal(first, compute(net, data, tmp_path))
    assert net.items == 37


def test_interrupted_it_goes_on(data, tmp_path):
    whole = compute(Net(), data, tmp_path / "other")
    with pytest.raises(KeyboardInterrupt):
        compute(Net(fail_after=16), data, tmp_path)
    with (entry(tmp_path) / "sums").open("ab") as sums:
        sums.write(b"half")  # the checksum that was being written
    net = Net()
    np.testing.assert_array_equal(compute(net, data, tmp_path), whole)
    assert net.items == 37 - 16
    net = Net()
    compute(net, data, tmp_path)
    assert net.items == 0


def test_a_damaged_block_is_computed_again(data, tmp_path, caplog):
    whole = np.array(compute(Net(), data, tmp_path))
    file = entry(tmp_path) / "features.f32"
    content = bytearray(file.read_bytes())
    for position in range(0, len(content), 50):
        damaged = bytearray(content)
        damaged[position] ^= 16
        file.write_bytes(damaged)
        net = Net()
        caplog.clear()
        np.testing.assert_array_equal(compute(net, data, tmp_path), whole)
        assert net.items == (8 if position < 32 * 12 else 5)
        assert "1 of 5 blocks of cached features" in caplog.text
        assert file.read_bytes() == content


@pytest.mark.parametrize("cut", ["half", "empty", "gone"])
def test_a_file_cut_short(data, tmp_path, cut, caplog):
    whole = np.array(compute(Net(), data, tmp_path))
    file = entry(tmp_path) / "features.f32"
    if cut == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2 if cut == "half" else 0)
    np.testing.assert_array_equal(compute(Net(), data, tmp_path), whole)
    assert "damaged" in caplog.text


@pytest.mark.parametrize("sums", [b"", b"nonsense", bytes(80), b"x" * 80, b"y" * 999])
def test_damaged_checksums_are_not_trusted(data, tmp_path, sums):
    whole = np.array(compute(Net(), data, tmp_path))
    (entry(tmp_path) / "sums").write_bytes(sums)
    net = Net()
    for _ in range(2):
        np.testing.assert_array_equal(compute(net, data, tmp_path), whole)
        assert net.items == 37


def test_whatever_could_change_a_feature_makes_another_entry(data, tmp_path):
    compute(Net(), data, tmp_path)
    other = ArrayDataset(data.arrays.copy(), data.labels)
    net = Net()
    compute(net, other, tmp_path)  # the same content
    assert net.items == 0
    other.arrays[36, 5, 5] ^= 1
    fewer = ArrayDataset(data.arrays[:30], ["a"] * 30)
    for changed, options in [
        (other, {}),
        (fewer, {}),
        (data, {"fingerprint": "net 2"}),
        (data, {"batch": 9}),
        (data, {"preprocessing": Preprocessing((6, 6), 1, (0.1,), (1.0,))}),
    ]:
        net = Net()
        compute(net, changed, tmp_path, **options)
        assert net.items == len(changed)


def test_a_changed_file_is_another_content(tmp_path):
    files = [tmp_path / f"{i}.png" for i in range(3)]
    for i, file in enumerate(files):
        Image.new("L", (6, 6), i).save(file)
    data = FileDataset(files, ["a"] * 3)
    assert compute(Net(), data, tmp_path / "cache")[:, 0].tolist() == [0, 1, 2]
    net = Net()
    compute(net, data, tmp_path / "cache")
    assert net.items == 0
    Image.new("L", (6, 6), 77).save(files[1])
    os.utime(files[1], ns=(1, 1))
    assert compute(net, data, tmp_path / "cache")[:, 0].tolist() == [0, 77, 2]
    files[2].unlink()
    with pytest.raises(DataError, match=r"2\.png cannot be read"):
        compute(net, data, tmp_path / "cache")


def test_unknown_content_is_not_kept(tmp_path, caplog):
    class Secret(Dataset):
        labels = keys = ("a", "b")

        def __getitem__(self, index):
            return Image.new("L", (6, 6), index + 5)

    for _ in range(2):
        net = Net()
        assert compute(net, Secret(), tmp_path)[:, 0].tolist() == [5, 6]
        assert net.items == 2
    assert "for this run only" in caplog.text
    assert not list(tmp_path.iterdir())


def test_features_must_be_finite_rows(data, tmp_path):
    def infinite(x):
        if x[0, 0, 0, 0] == data.arrays[8, 0, 0]:
            return torch.full((len(x), 2), torch.inf)
        return x.flatten(1)[:, :2].float()

    with pytest.raises(DataError, match=r"features of 8 are not finite"):
        compute(infinite, data, tmp_path, width=2)
    with pytest.raises(DataError, match="shape"):
        compute(lambda x: x.float(), data, tmp_path, fingerprint="map")
    with pytest.raises(NotImplementedError, match="forward"):  # no fault of the cache
        compute(torch.nn.Module(), data, tmp_path, fingerprint="none")


def test_a_cache_that_cannot_be_written(data, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="set RETRIEVAL_CACHE to another folder"):
        compute(Net(), data, tmp_path / "file")


def test_a_disk_that_fills_up(data, tmp_path):
    says = "Features cannot be kept in"
    with files_of_at_most(300), pytest.raises(DataError, match=says):  # nor the third block
        compute(Net(), data, tmp_path)
    net = Net()
    np.testing.assert_allclose(compute(net, data, tmp_path), plain(data), rtol=1e-6)
    assert 0 < net.items < 37


def test_two_at_once_compute_once(data, tmp_path, caplog):
    class Slow(Net):
        def __call__(self, x):
            time.sleep(0.05)
            return super().__call__(x)

    nets = [Slow(), Slow()]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda net: compute(net, data, tmp_path), nets)
    assert sorted(net.items for net in nets) == [0, 37]
    np.testing.assert_array_equal(first, second)
    assert "Waiting for another process" in caplog.text
