import gzip
import struct

import numpy as np
import pytest
from retrieval.data.image_archives import read_idx
from retrieval.errors import DataError

BODY = bytes(range(24))
GOOD = struct.pack(">HBB3I", 0, 8, 3, 2, 3, 4) + BODY


@pytest.mark.parametrize("name", ["images", "images.gz"])
def test_plain_and_gzipped(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(GOOD) if name.endswith(".gz") else GOOD)
    pixels = read_idx(path, 3)
    np.testing.assert_array_equal(pixels, np.arange(24).reshape(2, 3, 4))
    assert pixels.dtype == np.uint8 and pixels.flags.writeable


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not an idx file"),
        (b"\0\0\x08", "not an idx file"),
        (b"PNG!" + GOOD, "not an idx file"),
        (struct.pack(">HBB3I", 0, 13, 3, 2, 3, 4) + BODY, "3 dimensions and numbers of type 0x0d;"),
        (struct.pack(">HBBI", 0, 8, 1, 24) + BODY, "1 dimensions and numbers of type 0x08"),
        (GOOD[:10], "cut short within its header"),
        (GOOD[:-1], "should hold 24 bytes after its header, but holds 23"),
        (GOOD + b"x", "but holds more"),
        (struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 9) + BODY, "the limit is"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_damaged_files(tmp_path, content, sentence, zipped):
    path = tmp_path / ("a.gz" if zipped else "a")
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(DataError, match=sentence):
        read_idx(path, 3)


def test_damaged_compression(tmp_path):
    path = tmp_path / "a.gz"
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 6), dtype=np.uint8)
    whole = gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 4, 5, 6) + pixels.tobytes(), mtime=0)
    for content in (b"not gzip", whole[: len(whole) // 2], whole[:-1], b""):
        path.write_bytes(content)
        with pytest.raises(DataError):
            read_idx(path, 3)
    refused = 0
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        try:  # gzip's header has a few bytes that change nothing
            np.testing.assert_array_equal(read_idx(path, 3), pixels)
        except DataError:
            refused += 1
    assert refused >= len(whole) - 7
    with pytest.raises(DataError, match="No such file"):
        read_idx(tmp_path / "none", 3)
