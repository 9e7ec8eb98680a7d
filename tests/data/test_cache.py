import os
import tempfile
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
from retrieval.data.datasets import ArrayDataset, Dataset, FileDataset
from retrieval.errors import DataError
from retrieval.images.preprocessing import Preprocessing
from torch import Tensor

PRE = Preprocessing((6, 6), 1, (0.0,), (1.0,))


class Net:
    """A backbone that counts its items and may be interrupted."""

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


def compute(
    net: Any, data: Dataset, preprocessing: Preprocessing = PRE, **options: Any
) -> NDArray[np.float32]:
    settings = {"width": 3, "fingerprint": "net 1", "device": "cpu", "batch_size": 8} | options
    return frozen_features(net, data, preprocessing, **settings)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RETRIEVAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def data():
    pixels = np.random.default_rng(0).integers(0, 256, (37, 6, 6), dtype=np.uint8)
    return ArrayDataset(pixels, ["a"] * 37)


@pytest.fixture
def plain(data):
    """The same features by plain loops."""
    rows = [
        [float(np.mean(image, dtype=np.float64)), float(image.max()), float(image[0, 0])]
        for image in data.arrays
    ]
    return np.array(rows, dtype=np.float32)


@pytest.fixture
def whole(data):
    """The features, computed into the cache."""
    return np.array(compute(Net(), data))


def entry(cache: Path) -> Path:
    (folder,) = (cache / "features").iterdir()
    return folder


def computed_items(data: Dataset, expected: NDArray[np.float32], **options: Any) -> int:
    """Check that the features are as expected; return how many items the backbone got."""
    net = Net()
    np.testing.assert_array_equal(compute(net, data, **options), expected)
    return net.items


def test_features_are_computed_once(data, plain):
    net = Net()
    first = compute(net, data)
    np.testing.assert_allclose(first, plain, rtol=1e-6)
    assert first.dtype == np.float32 and net.items == 37
    second = compute(net, data)
    np.testing.assert_array_equal(first, second)
    second[0] = -1  # reaches memory only
    np.testing.assert_array_equal(first, compute(net, data))
    assert net.items == 37


def test_an_interrupted_run_continues(data, cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("RETRIEVAL_CACHE", str(cache / "other"))
        whole = compute(Net(), data)
    with pytest.raises(KeyboardInterrupt):
        compute(Net(fail_after=16), data)
    with (entry(cache) / "sums").open("ab") as sums:
        sums.write(b"half")  # the checksum that was being written
    assert computed_items(data, whole) == 37 - 16
    assert computed_items(data, whole) == 0


def test_a_damaged_block_is_computed_again(data, cache, caplog, whole):
    file = entry(cache) / "features.f32"
    content = bytearray(file.read_bytes())
    for position in range(0, len(content), 50):
        damaged = bytearray(content)
        damaged[position] ^= 16
        file.write_bytes(damaged)
        caplog.clear()
        assert computed_items(data, whole) == (8 if position < 32 * 12 else 5)
        assert "1 of 5 blocks of cached features" in caplog.text
        assert file.read_bytes() == content


@pytest.mark.parametrize("size", [0, 222, None])
def test_a_truncated_or_missing_file_is_computed_again(data, cache, size, caplog, whole):
    file = entry(cache) / "features.f32"
    assert file.stat().st_size == 444
    if size is None:
        file.unlink()
    else:
        os.truncate(file, size)
    assert computed_items(data, whole) == (21 if size == 222 else 37)
    assert "damaged" in caplog.text


@pytest.mark.parametrize("sums", [b"", bytes(80), b"x" * 80, b"y" * 999])
def test_damaged_checksums_are_not_trusted(data, cache, sums, whole):
    (entry(cache) / "sums").write_bytes(sums)
    assert computed_items(data, whole) == 37
    assert computed_items(data, whole) == 0


def test_whatever_could_change_a_feature_makes_another_entry(data, whole):
    other = ArrayDataset(data.arrays.copy(), data.labels)
    assert computed_items(other, whole) == 0
    other.arrays[36, 5, 5] ^= 1
    fewer = ArrayDataset(data.arrays[:30], ["a"] * 30)
    for changed, options in [
        (other, {}),
        (fewer, {}),
        (data, {"fingerprint": "net 2"}),
        (data, {"batch_size": 9}),
        (data, {"preprocessing": Preprocessing((6, 6), 1, (0.1,), (1.0,))}),
    ]:
        net = Net()
        compute(net, changed, **options)
        assert net.items == len(changed)


def test_a_changed_file_is_another_content(tmp_path):
    files = [tmp_path / f"{i}.png" for i in range(3)]
    for i, file in enumerate(files):
        Image.new("L", (6, 6), i).save(file)
    data = FileDataset(files, ["a"] * 3)
    first = compute(Net(), data)
    assert first[:, 0].tolist() == [0, 1, 2] and computed_items(data, first) == 0
    Image.new("L", (6, 6), 77).save(files[1])
    os.utime(files[1], ns=(1, 1))
    assert compute(Net(), data)[:, 0].tolist() == [0, 77, 2]
    files[2].unlink()
    with pytest.raises(DataError, match=r"2\.png cannot be read"):
        compute(Net(), data)


def test_unknown_content_is_not_kept(cache, caplog, monkeypatch):
    class Unknown(Dataset):
        labels = keys = ("a", "b")

        def __getitem__(self, index):
            return Image.new("L", (6, 6), index + 5)

    for _ in range(2):
        net = Net()
        assert compute(net, Unknown())[:, 0].tolist() == [5, 6]
        assert net.items == 2
    assert "for this run only" in caplog.text
    assert not cache.exists()
    monkeypatch.setattr(tempfile, "tempdir", str(cache))
    with pytest.raises(DataError, match="set TMPDIR to another folder"):
        compute(Net(), Unknown())


def test_features_must_be_finite_rows(data):
    def infinite(x):
        if x[0, 0, 0, 0] == data.arrays[8, 0, 0]:
            return torch.full((len(x), 2), torch.inf)
        return x.flatten(1)[:, :2].float()

    with pytest.raises(DataError, match=r"features of 8 are not finite"):
        compute(infinite, data, width=2)
    with pytest.raises(DataError, match="shape"):
        compute(lambda x: x.float(), data, fingerprint="map")
    with pytest.raises(NotImplementedError, match="forward"):  # no fault of the cache
        compute(torch.nn.Module(), data, fingerprint="none")


def test_a_cache_that_cannot_be_written(data, cache):
    cache.touch()
    with pytest.raises(DataError, match="set RETRIEVAL_CACHE to another folder"):
        compute(Net(), data)


def test_a_full_disk_is_a_sentence_and_the_next_run_continues(data, plain):
    # The third block does not fit.
    with files_of_at_most(300), pytest.raises(DataError, match="Features cannot be kept in"):
        compute(Net(), data)
    net = Net()
    np.testing.assert_allclose(compute(net, data), plain, rtol=1e-6)
    assert 0 < net.items < 37


def test_two_at_once_compute_once(data, caplog):
    class Slow(Net):
        def __call__(self, x):
            time.sleep(0.05)
            return super().__call__(x)

    nets = [Slow(), Slow()]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda net: compute(net, data), nets)
    assert sorted(net.items for net in nets) == [0, 37]
    np.testing.assert_array_equal(first, second)
    assert "Waiting for another process" in caplog.text


def test_a_cache_that_is_cut_short_while_it_is_read_ends_the_command_with_a_sentence(process):
    code = """
import os, sys, numpy as np, torch
from pathlib import Path
from retrieval.data.cache import frozen_features
from retrieval.data.datasets import ArrayDataset
from retrieval.images.preprocessing import Preprocessing

pixels = np.random.default_rng(0).integers(0, 256, (4000, 6, 6), dtype=np.uint8)
features = frozen_features(
    lambda x: x.flatten(1).float(), ArrayDataset(pixels, ["a"] * 4000),
    Preprocessing((6, 6), 1, (0.0,), (1.0,)),
    width=36, fingerprint="net", device="cpu", batch_size=100,
)
features[0] = 1  # reaches memory only
tensor = torch.from_numpy(features)
print(tensor[0].sum().item(), flush=True)
(path,) = Path(os.environ["RETRIEVAL_CACHE"]).rglob("features.f32")
os.truncate(path, 4096)
print(tensor.sum().item())
"""
    done = process("-c", code)
    assert (done.code, done.out) == (2, "36.0\n")
    assert done.err.endswith("was cut short while it was read. Run the command again.\n")
    assert "Traceback" not in done.err
