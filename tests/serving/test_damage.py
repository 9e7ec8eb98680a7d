"""Whole or not at all: bad images, full disks, interruptions, altered files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from retrieval.errors import DataError, StoreError
from retrieval.host import files
from retrieval.serving.index import items as items_module
from retrieval.serving.index.build import write_index
from retrieval.serving.index.files import SUMS, put_in_place
from retrieval.serving.index.open import open_index

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(makers, tmp_path):
    makers.write_digits(tmp_path / "photos", 40)
    return tmp_path / "photos"


def test_bad_images_are_all_found_and_nothing_is_written(makers, folder, bundle_path, tmp_path):
    bad = makers.spoil(folder / "1", 13)
    with pytest.raises(DataError) as caught:
        write_index(bundle_path, [folder], tmp_path / "i", batch=4, progress=False)
    text = str(caught.value)
    assert text.startswith("13 of 53 items cannot be used:")
    assert all(str(path) in text for path in bad[:10])
    assert not any(str(path) in text for path in bad[10:])
    assert "… and 3 more" in text
    assert "--skip-bad" in text
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_bad_images_are_skipped_and_reported_when_asked(makers, folder, bundle_path, tmp_path, capsys):
    bad = makers.spoil(folder / "1", 13)
    large = folder / "1" / "large.png"
    Image.new("1", (6000, 6000)).save(large)
    summary = write_index(bundle_path, [folder], tmp_path / "i", batch=4, skip_bad=True, progress=False)
    assert (summary.count, len(summary.skipped)) == (40, 14)
    told = capsys.readouterr().err
    assert all(told.count(f"skipped: {path} ") == 1 for path in [*bad, large])
    assert "6000 × 6000 pixels" in told
    with open_index(tmp_path / "i", threads=1) as index:
        for row in range(40):
            item = index.item(row)
            assert np.array_equal(index.vector(row), index.bundle.encode_image(item.path).vector[0])


def test_only_bad_images_make_no_index(makers, folder, bundle_path, tmp_path):
    shutil.rmtree(folder)
    folder.mkdir()
    makers.spoil(folder, 3)
    with pytest.raises(DataError, match="None of the 3 items can be used"):
        write_index(bundle_path, [folder], tmp_path / "i", skip_bad=True, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_an_existing_output_is_refused_then_replaced(makers, folder, bundle_path, tmp_path):
    out = tmp_path / "i"
    write_index(bundle_path, [folder], out, progress=False)
    before = (out / SUMS).read_bytes()
    opened = open_index(out, threads=1)
    with pytest.raises(StoreError, match=r"exists already.*--replace"):
        write_index(bundle_path, [folder / "1"], out, progress=False)
    makers.spoil(folder / "1", 1)
    with pytest.raises(DataError, match="cannot be used"):
        write_index(bundle_path, [folder], out, replace=True, progress=False)
    assert (out / SUMS).read_bytes() == before
    write_index(bundle_path, [folder / "2"], out, replace=True, progress=False)
    assert (out / SUMS).read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i", "photos"]
    with open_index(out, threads=1) as index:
        assert {index.item(row).label for row in range(len(index))} == {"2"}
    # who had the old one open still searches it
    assert opened.search(opened.vector(7), 1)[0].id == 7
    opened.close()
    for other, says in ((folder, "is not an index"), (tmp_path / "no" / "i", "no folder")):
        with pytest.raises(StoreError, match=says):
            write_index(bundle_path, [folder / "2"], other, replace=True, progress=False)
    assert folder.is_dir()


def test_replacing_without_the_system_call(tmp_path, monkeypatch):
    monkeypatch.setattr("retrieval.host.files._rename", lambda one, other, how: False)
    for name in ("new", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    put_in_place(tmp_path / "new", tmp_path / "out", replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "new").exists()


def test_any_flipped_bit_of_any_file_of_an_index_is_noticed(makers, photos, tmp_path):
    bundle = makers.make_bundle(tmp_path / "b", rescorer=True, subspaces=True)
    out = tmp_path / "i"
    write_index(bundle, [photos / "1"], out, backend="hnsw", progress=False)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    assert len(files) == 10
    random = np.random.default_rng(0)
    for path in files:
        content = path.read_bytes()
        for bit in random.integers(0, 8 * len(content), 12):
            altered = bytearray(content)
            altered[bit // 8] ^= 1 << (bit % 8)
            path.write_bytes(altered)
            with pytest.raises(StoreError, match=r"damaged|cannot be read"):
                open_index(out)
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(StoreError, match="damaged"):
            open_index(out)
        path.unlink()
        with pytest.raises(StoreError, match=r"damaged|is not an index"):
            open_index(out)
        path.write_bytes(content)
    # a list of checksums with a file left out is noticed, too
    sums = (out / SUMS).read_text().splitlines(keepends=True)
    for number in range(len(sums)):
        (out / SUMS).write_text("".join(sums[:number] + sums[number + 1 :]))
        if "rescorer" in sums[number] or "encoder" in sums[number]:
            continue  # the bundle's own manifest holds these
        with pytest.raises(StoreError, match="does not list"):
            open_index(out)
    (out / SUMS).write_text("".join(sums))
    open_index(out, threads=1).close()
    check = subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=out, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


def test_no_index_is_a_sentence(tmp_path):
    with pytest.raises(StoreError, match="no such folder"):
        open_index(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"no index\.json"):
        open_index(tmp_path)


LIMITED = textwrap.dedent("""
    import resource, sys
    from retrieval.errors import StoreError
    from retrieval.serving.index.build import write_index
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
    try:
        write_index(sys.argv[2], [sys.argv[3]], sys.argv[4], progress=False)
    except StoreError as error:
        print(error)
        sys.exit(7)
""")


def test_a_full_disk_leaves_nothing(makers, bundle_path, tmp_path):
    """Files may not grow beyond a limit that is set for every file of the index in turn."""
    makers.write_digits(tmp_path / "photos", 400)
    out = tmp_path / "whole"
    write_index(bundle_path, [tmp_path / "photos"], out, progress=False)
    sizes = sorted({path.stat().st_size for path in out.rglob("*") if path.is_file()})
    shutil.rmtree(out)
    for limit in [100, *(size - 1 for size in sizes[-4:])]:
        command = [
            sys.executable,
            "-c",
            LIMITED,
            str(limit),
            str(bundle_path),
            str(tmp_path / "photos"),
            str(out),
        ]
        run = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
        assert run.returncode == 7, run.stderr
        assert "cannot be written: the disk is full" in run.stdout
        assert run.stdout.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["photos"], limit


@contextmanager
def small_disk(folder: Path, kilobytes: int):
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a small disk needs root"
)
def test_a_really_full_disk_leaves_nothing(makers, bundle_path, tmp_path):
    makers.write_digits(tmp_path / "photos", 400)
    outcomes = set()
    for kilobytes in (8, 24, 60, 100, 140, 1000):
        with small_disk(tmp_path / f"disk{kilobytes}", kilobytes) as disk:
            try:
                write_index(bundle_path, [tmp_path / "photos"], disk / "i", progress=False)
            except StoreError as error:
                outcomes.add(str(error).partition(": ")[2].partition(" (")[0])
                assert not list(disk.iterdir())
            else:
                with open_index(disk / "i", threads=1) as index:
                    assert len(index) == 400
                outcomes.add("fits")
    assert outcomes == {"the disk is full", "fits"}


def test_what_the_disk_alters_after_the_last_look_is_noticed(bundle_path, photos, tmp_path, monkeypatch):
    """A bit that flips in the finished vectors, before the sums are made over them."""

    def write(path: Path, items: object) -> None:
        items_module.write_items(path, items)
        with (path.parent / "vectors.npy").open("r+b") as file:
            file.seek(1000)
            byte = file.read(1)[0]
            file.seek(1000)
            file.write(bytes([byte ^ 1]))

    monkeypatch.setattr("retrieval.serving.index.assembly.write_items", write)
    with pytest.raises(StoreError, match="The numbers of item 13 were altered on the disk"):
        write_index(bundle_path, [photos], tmp_path / "i", progress=False)
    assert not list(tmp_path.iterdir())


BUILD = textwrap.dedent("""
    import sys
    from retrieval.errors import StoreError
    from retrieval.serving.index.build import write_index
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        write_index(sys.argv[1], [sys.argv[2]], sys.argv[3], progress=False)
    except StoreError as error:
        print(error)
        sys.exit(2)
""")


def test_of_two_builds_to_one_path_one_wins_and_the_other_is_told(bundle_path, folder, tmp_path):
    for turn in range(3):
        out = tmp_path / f"i{turn}"
        both = [
            subprocess.Popen(
                [sys.executable, "-c", BUILD, str(bundle_path), str(folder), str(out)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=ENVIRONMENT,
            )
            for _ in range(2)
        ]
        assert all(one.stdout.readline() == "ready\n" for one in both)
        for one in both:
            one.stdin.write("\n")
            one.stdin.flush()
        told = [one.communicate(timeout=60)[0] for one in both]
        assert sorted(one.returncode for one in both) == [0, 2], told
        (sentence,) = [text for text in told if text]
        assert "Another process is building this index: process " in sentence or "exists already" in sentence
        open_index(out, threads=1).close()
        assert not list(tmp_path.glob(".*"))


def test_what_appears_meanwhile_is_not_replaced(bundle_path, folder, tmp_path, monkeypatch):
    """Someone who knows nothing of the lock puts a folder in the place, just before the last step."""
    rename = files._rename

    def late(one: Path, other: Path, how: int) -> bool:
        other.mkdir()
        (other / "mine").touch()
        return rename(one, other, how)

    monkeypatch.setattr(files, "_rename", late)
    with pytest.raises(StoreError, match="exists already"):
        write_index(bundle_path, [folder], tmp_path / "i", progress=False)
    assert [path.name for path in (tmp_path / "i").iterdir()] == ["mine"]
