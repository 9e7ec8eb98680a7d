"""What several tests of scale share."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def pictures(tmp_path_factory, makers):
    """12,000 handwritten digits of 8 × 8 pixels, no two alike, in one folder per class."""
    folder = tmp_path_factory.mktemp("pictures") / "digits"
    images, labels = makers.digits()
    for label in range(10):
        (folder / str(label)).mkdir(parents=True)
    for number in range(12_000):
        turn, row = divmod(number, len(images))
        path = folder / str(labels[row]) / f"{number:05}.png"
        Image.fromarray(images[row] ^ np.uint8(turn)).save(path, compress_level=1)
    return folder
