"""Folders are read by content; what is left out is counted, with its reason, in the log, in the run
and by `index`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from retrieval.errors import DataError
from retrieval.host.plugins import load_plugins
from retrieval.serving.image_files import find_images
from retrieval.serving.images import FORMATS
from sklearn.datasets import load_digits


@pytest.fixture(scope="module")
def digits():
    return [
        Image.fromarray((image * 15.9).astype(np.uint8)) for image in load_digits().images[:120]
    ]


@pytest.fixture
def photos(tmp_path, digits):
    labels = load_digits().target
    folder = tmp_path / "photos"
    for i, image in enumerate(digits):
        place = folder / str(labels[i])
        place.mkdir(parents=True, exist_ok=True)
        image.save(
            place / f"{i:03}", format="JPEG"
        )  # no extension, as cameras' backups and scrapers leave them
    (folder / "0" / "notes.txt").write_text("P5 is not an image here")
    (folder / "1" / "scan.jp2").write_bytes(b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40))
    return folder


def test_every_format_is_known_by_its_content(tmp_path, digits):
    for name in FORMATS:
        try:
            digits[0].convert("RGB").resize((32, 32)).save(tmp_path / name.lower(), format=name)
        except KeyError:  # Pillow reads it and does not write it here
            continue
    actual = find_images(tmp_path)
    assert [path.name.upper() for path in actual.images] == sorted(
        path.name.upper() for path in tmp_path.iterdir()
    )
    assert len(actual.images) >= 7 and not actual.left_out


def test_what_is_left_out_is_counted_with_its_reason(photos, tmp_path):
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


def test_the_dataset_says_so_and_lists_what_cannot_be_read(photos, caplog):
    for name in ("0/cut", "1/torn"):
        (photos / name).write_bytes(b"\xff\xd8\xff\xe0 no more")
    plugins = load_plugins()
    values = {"name": "core.image_folder", "folder": str(photos), "skip_bad": True}
    data = plugins.build("datasets", values)
    assert len(data) == 120
    assert "(JPEG 2000, which is not supported): 1/scan.jp2." in caplog.text
    assert "2 of 122 images cannot be read and are left out:\n  - " in caplog.text  # a list
    assert sum(note.startswith("left out: ") and "is damaged" in note for note in data.notes) == 2
    assert any("JPEG 2000" in note for note in data.notes)


def test_the_run_and_the_index_keep_it(photos, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (photos / "0" / "cut").write_bytes(b"\xff\xd8\xff\xe0 no more")
    Path("r.toml").write_text(
        '[data]\nname = "core.image_folder"\nfolder = "photos"\nskip_bad = true\n[split]\nby ='
        ' "item"\n[sampler]\nclasses = 4\nbatches = 2\n[backbone]\nname = "core.convnet"\nwidth ='
        ' 2\ndepth = 2\nsize = 8\n[loss]\nname = "pml.contrastive"\n[train]\nepochs = 1\n'
    )
    done = cli("train", "r.toml", "--output", "run")
    assert done.code == 0, done.err
    notes = json.loads(Path("run/run.json").read_text())["notes"]
    assert any("(JPEG 2000, which is not supported): 1/scan.jp2." in note for note in notes)
    assert any(
        note.startswith("left out: ") and "photos/0/cut is damaged" in note for note in notes
    )
    assert cli("export", "run").code == 0
    done = cli("index", "create", "i", "photos", "--bundle", "run/bundle", "--skip-bad")
    assert done.code == 0 and "Indexed 120 items" in done.out and "1 skipped" in done.out, done.err
    assert "photos: 1 file is left out (not an image): 0/notes.txt." in done.err
