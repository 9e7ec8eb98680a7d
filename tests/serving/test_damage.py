"""Whole or not at all: bad images, full disks, interruptions, altered files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from limits import files_of_at_most
from PIL import Image
from retrieval.errors import DataError, StoreError
from retrieval.host.files import rename_whole
from retrieval.serving.index.index import create_index, open_index
from retrieval.serving.store.record import FILE as RECORD

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(makers, tmp_path):
    makers.write_digits(tmp_path / "photos", 40)
    return tmp_path / "photos"


def test_bad_images_are_all_found_and_nothing_is_written(makers, folder, bundle_path, tmp_path):
    bad = makers.spoil(folder / "1", 13)
    with pytest.raises(DataError) as caught:
        create_index(tmp_path / "i", bundle_path, [folder], batch=4, progress=False)
    text = str(caught.value)
    assert text.startswith("13 of 53 items cannot be used:")
    assert all(str(path) in text for path in bad[:10])
    assert not any(str(path) in text for path in bad[10:])
    assert "… and 3 more" in text
    assert "--skip-bad" in text
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_bad_images_are_skipped_and_reported_when_asked(
    makers, folder, bundle_path, tmp_path, capsys
):
    bad = makers.spoil(folder / "1", 13)
    large = folder / "1" / "large.png"
    Image.new("1", (6000, 6000)).save(large)
    summary = create_index(
        tmp_path / "i", bundle_path, [folder], batch=4, skip_bad=True, progress=False
    )
    assert (summary.count, len(summary.skipped)) == (40, 14)
    told = capsys.readouterr().err
    assert all(told.count(f"skipped: {path} ") == 1 for path in [*bad, large])
    assert "6000 × 6000 pixels" in told
    with open_index(tmp_path / "i", threads=1) as index:
        for item in index.scan():
            assert np.array_equal(
                index.vector(item.id), index.bundle.encode_image(item.path).vector[0]
            )


def test_only_bad_images_make_no_index(makers, folder, bundle_path, tmp_path):
    shutil.rmtree(folder)
    folder.mkdir()
    makers.spoil(folder, 3)
    with pytest.raises(DataError, match="None of the 3 items can be used"):
        create_index(tmp_path / "i", bundle_path, [folder], skip_bad=True, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_an_existing_output_is_refused_then_replaced(makers, folder, bundle_path, tmp_path):
    out = tmp_path / "i"
    create_index(out, bundle_path, [folder], progress=False)
    before = (out / RECORD).read_bytes()
    opened = open_index(out, threads=1)
    with pytest.raises(StoreError, match=r"exists already.*--replace"):
        create_index(out, bundle_path, [folder / "1"], progress=False)
    makers.spoil(folder / "1", 1)
    with pytest.raises(DataError, match="cannot be used"):
        create_index(out, bundle_path, [folder], replace=True, progress=False)
    assert (out / RECORD).read_bytes() == before
    create_index(out, bundle_path, [folder / "2"], replace=True, progress=False)
    assert (out / RECORD).read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i", "photos"]
    with open_index(out, threads=1) as index:
        assert {item.label for item in index.scan()} == {"2"}
    opened.close()
    for other, says in ((folder, "is not an index"), (tmp_path / "no" / "i", "no folder")):
        with pytest.raises(StoreError, match=says):
            create_index(other, bundle_path, [folder / "2"], replace=True, progress=False)
    assert folder.is_dir()


def test_replacing_without_the_system_call(tmp_path, monkeypatch):
    monkeypatch.setattr("retrieval.host.files._exchanged", lambda one, other: False)
    for name in ("new", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    rename_whole(
        tmp_path / "new", tmp_path / "out", replace=True, exists_error=StoreError("It is there.")
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "new").exists()


def test_a_full_disk_leaves_nothing(makers, bundle_path, tmp_path):
    """Files may not grow beyond a limit that is set for every file of the index in turn."""
    makers.write_digits(tmp_path / "photos", 400)
    out = tmp_path / "whole"
    create_index(out, bundle_path, [tmp_path / "photos"], progress=False)
    sizes = sorted({path.stat().st_size for path in out.rglob("*") if path.is_file()})
    shutil.rmtree(out)
    for limit in [100, *(size - 1 for size in sizes[-4:])]:
        with (
            files_of_at_most(limit),
            pytest.raises(StoreError, match="cannot be written: the disk is full"),
        ):
            create_index(out, bundle_path, [tmp_path / "photos"], progress=False)
        assert [path.name for path in tmp_path.iterdir()] == ["photos"], limit


BUILD = textwrap.dedent("""
    import sys
    from retrieval.errors import StoreError
    from retrieval.serving.index.index import create_index
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        create_index(sys.argv[3], sys.argv[1], [sys.argv[2]], progress=False)
    except StoreError as error:
        print(error)
        sys.exit(2)
""")


def test_of_two_builds_to_one_path_one_wins_and_the_other_is_told(bundle_path, folder, tmp_path):
    command = [sys.executable, "-c", BUILD, str(bundle_path), str(folder), str(tmp_path / "i")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, env=ENVIRONMENT, **pipes) for _ in range(2)]
    assert all(one.stdout.readline() == "ready\n" for one in both)
    for one in both:
        one.stdin.write("\n")
        one.stdin.flush()
    told = [one.communicate(timeout=60)[0] for one in both]
    assert sorted(one.returncode for one in both) == [0, 2], told
    (sentence,) = [text for text in told if text]
    assert "Another process is building this index: " in sentence or "exists already" in sentence
    open_index(tmp_path / "i", threads=1).close()
    assert not list(tmp_path.glob(".*"))


def test_what_appears_meanwhile_is_not_replaced(bundle_path, folder, tmp_path, monkeypatch):
    """Another program puts a folder in the place just before the last step."""
    rename = Path.rename

    def late(path: Path, other: Path) -> Path:
        if other == tmp_path / "i":
            other.mkdir()
            (other / "mine").touch()
        return rename(path, other)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(StoreError, match="exists already"):
        create_index(tmp_path / "i", bundle_path, [folder], progress=False)
    assert [path.name for path in (tmp_path / "i").iterdir()] == ["mine"]
