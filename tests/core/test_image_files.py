"""Images in folders are found by content. The log, the run and `index` report the other files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from retrieval.errors import DataError
from retrieval.host.plugins import create
from retrieval.images.decoding import FORMATS
from retrieval.images.image_files import find_images
from sklearn.datasets import load_digits

RECIPE = """
data = { name = "core.image_folder", folder = "photos", skip_bad = true }
split.by = "item"
sampler = { classes = 4, batches = 2 }
backbone = { name = "core.convnet", width = 2, depth = 2, size = 8 }
loss.name = "pml.contrastive"
train.epochs = 1
"""


@pytest.fixture(scope="module")
def digits():
    images = load_digits().images[:120]
    return [Image.fromarray((image * 15.9).astype(np.uint8)) for image in images]


@pytest.fixture
def photos(tmp_path, digits):
    labels = load_digits().target
    folder = tmp_path / "photos"
    for i, image in enumerate(digits):
        place = folder / str(labels[i]) / f"{i:03}"  # no extension
        place.parent.mkdir(parents=True, exist_ok=True)
        image.save(place, format="JPEG")
    (folder / "0" / "notes.txt").write_text("P5 is not an image here")
    (folder / "1" / "scan.jp2").write_bytes(b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40))
    return folder


def test_every_format_is_known_by_its_content(tmp_path, digits):
    for name in FORMATS:
        try:
            digits[0].convert("RGB").resize((32, 32)).save(tmp_path / name.lower(), format=name)
        except KeyError:  # Pillow reads this format but cannot write it
            continue
    actual = find_images(tmp_path)
    written = sorted(path.name.upper() for path in tmp_path.iterdir())
    assert [path.name.upper() for path in actual.images] == written
    assert len(actual.images) >= 7 and not actual.left_out


def test_other_files_are_left_out_with_a_reason(photos, tmp_path):
    os.mkfifo(photos / "2" / "pipe.png")
    (photos / "2" / "old.psd").write_bytes(b"8BPS" + bytes(60))
    (photos / "2" / ".hidden").write_text("x")
    actual = find_images(photos)
    assert len(actual.images) == 120
    assert {reason: [path.name for path in files] for reason, files in actual.left_out.items()} == {
        "not an image": ["notes.txt"],
        "JPEG 2000, which is not supported": ["scan.jp2"],
        "Photoshop, which is not supported": ["old.psd"],
        "not a regular file": ["pipe.png"],
    }
    assert f"{photos}: 1 file is left out (not an image): 0/notes.txt." in actual.notes(photos)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.jp2").write_bytes(b"\xff\x4f\xff\x51")
    with pytest.raises(DataError, match=r"holds no image .*1 file is left out \(JPEG 2000"):
        find_images(tmp_path / "empty")


def test_the_data_set_reports_them_and_unreadable_images(photos, caplog):
    for name in ("0/cut", "1/torn"):
        (photos / name).write_bytes(b"\xff\xd8\xff\xe0 no more")
    data = create("dataset", "core.image_folder", folder=str(photos), skip_bad=True)
    assert len(data) == 120
    assert "(JPEG 2000, which is not supported): 1/scan.jp2." in caplog.text
    assert "2 of 122 images cannot be read and are left out:\n  - " in caplog.text  # a list
    assert sum(note.startswith("left out: ") and "is damaged" in note for note in data.notes) == 2
    assert any("JPEG 2000" in note for note in data.notes)


def test_the_run_and_the_index_report_them(photos, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (photos / "0" / "cut").write_bytes(b"\xff\xd8\xff\xe0 no more")
    Path("r.toml").write_text(RECIPE)
    done = cli("train", "r.toml", "--output", "run")
    assert done.code == 0, done.err
    notes = json.loads(Path("run/run.json").read_text())["notes"]
    assert any("(JPEG 2000, which is not supported): 1/scan.jp2." in note for note in notes)
    left_out = [note for note in notes if note.startswith("left out: ")]
    assert any("photos/0/cut is damaged" in note for note in left_out)
    assert cli("export", "run").code == 0
    done = cli("index", "create", "i", "photos", "--bundle", "run/bundle", "--skip-bad")
    assert done.code == 0 and "Indexed 120 items" in done.out and "1 skipped" in done.out, done.err
    assert "photos: 1 file is left out (not an image): 0/notes.txt." in done.err
