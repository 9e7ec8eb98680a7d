"""An index is created as a whole or not at all: bad images, full disks, kills, altered files."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from limits import files_of_at_most
from PIL import Image
from retrieval.base.files import rename_whole
from retrieval.bundle.bundle import Bundle
from retrieval.errors import BundleError, DataError, StoreError
from retrieval.index import adding
from retrieval.index.index import create_index, open_index
from retrieval.store.record import RECORD_FILE as RECORD

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(makers, tmp_path):
    makers.write_digits(tmp_path / "photos", 40)
    return tmp_path / "photos"


def test_bad_images_are_all_found_and_nothing_is_written(makers, folder, bundle_path, tmp_path):
    bad = makers.spoil(folder / "1", 13)
    with pytest.raises(DataError) as caught:
        create_index(tmp_path / "i", bundle_path, [folder], batch_size=4, progress=False)
    text = str(caught.value)
    assert text.startswith("13 of 53 items cannot be used:") and "--skip-bad" in text
    assert [str(path) in text for path in bad] == [True] * 10 + [False] * 3
    assert "… and 3 more" in text
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def holds_what_it_encodes(index) -> None:
    for item in index.scan():
        own = index.bundle.encode_image(item.path).vector[0]
        assert np.array_equal(index.vector(item.id), own)


def test_bad_images_are_skipped_and_reported_when_asked(
    makers, folder, bundle_path, tmp_path, capsys
):
    bad = [*makers.spoil(folder / "1", 13), folder / "1" / "large.png"]
    Image.new("1", (6000, 6000)).save(bad[-1])
    options = {"batch_size": 4, "skip_bad": True}
    create_index(tmp_path / "quiet", bundle_path, [folder], progress=False, **options)
    assert capsys.readouterr().err == ""
    summary = create_index(tmp_path / "i", bundle_path, [folder], **options)
    assert (summary.count, len(summary.skipped)) == (40, 14)
    told = capsys.readouterr().err
    assert all(told.count(f"skipped: {path} ") == 1 for path in bad)
    assert "6000 × 6000 pixels" in told
    with open_index(tmp_path / "i", threads=1) as index:
        holds_what_it_encodes(index)


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
    with pytest.raises(StoreError, match="is not an index"):
        create_index(folder, bundle_path, [folder / "2"], replace=True, progress=False)
    assert folder.is_dir()


def test_replacing_without_the_system_call(tmp_path, monkeypatch):
    monkeypatch.setattr("retrieval.base.files._exchange", lambda first, second: False)
    for name in ("new", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    rename_whole(
        tmp_path / "new", tmp_path / "out", replace=True, exists_error=StoreError("It is there.")
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "new").exists()


def test_a_full_disk_leaves_nothing(makers, bundle_path, tmp_path):
    """Files are limited to just below the size of each large file of the index."""
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
    from retrieval.index.index import create_index
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
    assert all(process.stdout.readline() == "ready\n" for process in both)
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    told = [process.communicate(timeout=60)[0] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], told
    (sentence,) = [text for text in told if text]
    assert "Another process is building this index: " in sentence or "exists already" in sentence
    open_index(tmp_path / "i", threads=1).close()
    assert not list(tmp_path.glob(".*"))


def test_what_appears_meanwhile_is_not_replaced(bundle_path, folder, tmp_path, monkeypatch):
    """Another program creates the output folder just before the last step."""
    rename = Path.rename

    def late(path, other):
        if other == tmp_path / "i":
            other.mkdir()
            (other / "mine").touch()
        return rename(path, other)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(StoreError, match="exists already"):
        create_index(tmp_path / "i", bundle_path, [folder], progress=False)
    assert [path.name for path in (tmp_path / "i").iterdir()] == ["mine"]


# An interrupted `create` is continued; items that have changed are embedded again.


def test_a_killed_run_goes_on_where_it_stopped(makers, bundle_path, tmp_path, killed, monkeypatch):
    photos, out, encode, parent = tmp_path / "photos", tmp_path / "i", Bundle.encode, os.getpid()
    makers.write_digits(photos, 200)
    makers.spoil(photos / "0", 2)
    batches = []  # of this process, without those of the killed child

    def counted(self, inputs, **options):
        batches.append(len(inputs))
        if os.getpid() != parent and len(batches) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(self, inputs, **options)

    def create():
        return create_index(
            out, bundle_path, [photos], batch_size=16, skip_bad=True, progress=False
        )

    monkeypatch.setattr(Bundle, "encode", counted)
    monkeypatch.setattr(adding, "_SECONDS", 0)
    killed(create)
    assert (tmp_path / "i.partial").is_dir() and not out.exists()
    summary = create()
    assert (summary.resumed, len(summary.skipped), sum(batches)) == (62, 2, 200 - 62)
    assert {path.name for path in tmp_path.iterdir()} - {".i.partial.lock"} == {"i", "photos"}
    with open_index(out, threads=1) as index:
        assert len(index) == 200
        holds_what_it_encodes(index)


@pytest.fixture
def interrupted(folder, bundle_path, tmp_path, monkeypatch):
    """Path of an index whose creation Ctrl-C interrupted just before the last step."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("retrieval.index.creating.rename_whole", interrupt)
        with pytest.raises(KeyboardInterrupt):
            create_index(tmp_path / "i", bundle_path, [folder], progress=False)
    return tmp_path / "i"


def test_what_changed_meanwhile_is_encoded_again(interrupted, makers, bundle_path, folder):
    time.sleep(0.02)  # the file gets another time
    Image.fromarray(makers.digits()[0][300]).save(sorted(folder.rglob("*.png"))[25])
    summary = create_index(interrupted, bundle_path, [folder], progress=False)
    assert summary.resumed == 40
    with open_index(interrupted, threads=1) as index:
        assert len(index) == 40
        holds_what_it_encodes(index)


def test_another_bundle_starts_over(interrupted, makers, folder, tmp_path):
    other = makers.make_bundle(tmp_path / "other", seed=5)
    summary = create_index(interrupted, other, [folder], progress=False)
    assert summary.resumed == 0
    with open_index(interrupted, threads=1) as index:
        holds_what_it_encodes(index)


# Files that change under an open bundle: the verified bytes are used.


def rewritten(path: Path) -> None:
    """Overwrite a file in place, as `cp` does."""
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes(255 - byte for byte in content))


def test_an_open_bundle_runs_as_before(makers, tmp_path):
    path = makers.make_bundle(tmp_path / "b")
    bundle = Bundle.open(path, threads=1)
    pixels = makers.digits()[0][:5, None]
    before = bundle.encode(pixels).vector
    rewritten(path / "encoder.onnx")
    assert np.array_equal(bundle.encode(pixels).vector, before)


def test_the_copy_in_an_index_is_the_bundle_that_made_it(makers, photos, tmp_path):
    path = makers.make_bundle(tmp_path / "b")
    bundle = Bundle.open(path, threads=1)
    shutil.rmtree(path)
    makers.make_bundle(path, seed=3)
    with pytest.raises(BundleError, match="was changed while it was in use"):
        create_index(tmp_path / "i", bundle, [photos / "1"], progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]
