"""Building an index that was interrupted: it goes on where it stopped, and does again what cannot be trusted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from PIL import Image
from retrieval.serving.index.build import write_index
from retrieval.serving.index.open import open_index

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(makers, tmp_path):
    makers.write_digits(tmp_path / "photos", 40)
    return tmp_path / "photos"


SLOW = textwrap.dedent("""
    import sys, time
    from retrieval.serving.bundle import Bundle
    from retrieval.serving.index.build import write_index
    encode = Bundle.encode
    batches = 0
    def slow(self, inputs, **options):
        global batches
        batches += 1
        print(len(inputs), flush=True)
        if len(sys.argv) > 4 and batches > int(sys.argv[4]):
            time.sleep(100)
        return encode(self, inputs, **options)
    Bundle.encode = slow
    import retrieval.serving.index.journal as journal
    journal._SYNC_SECONDS = 0
    try:
        summary = write_index(sys.argv[1], [sys.argv[2]], sys.argv[3], batch=16, skip_bad=True, progress=False)
    except KeyboardInterrupt:
        sys.exit(130)
    print("resumed", summary.resumed, "skipped", len(summary.skipped))
""")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_goes_on_where_it_stopped(how, makers, bundle_path, tmp_path):
    photos = tmp_path / "photos"
    makers.write_digits(photos, 200)
    makers.spoil(photos / "0", 2)
    out = tmp_path / "i"
    command = [sys.executable, "-c", SLOW, str(bundle_path), str(photos), str(out)]
    first = subprocess.Popen(
        [*command, "4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    for _ in range(5):  # four batches are done, and the fifth hangs
        assert first.stdout.readline()
    rival = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert "Another process is building this index" in rival.stderr
    first.send_signal(how)
    first.communicate(timeout=20)
    assert first.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    left = [".i.lock"] if how == signal.SIGKILL else []  # nobody holds it: it is taken over
    assert sorted(path.name for path in tmp_path.iterdir()) == [*left, "i.partial", "photos"]
    again = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert again.returncode == 0, again.stderr
    *batches, last = again.stdout.splitlines()
    resumed = int(last.split()[1])
    assert resumed == 64
    assert last.split()[3] == "2"
    assert sum(map(int, batches)) == 202 - 64  # the two bad ones were among the first
    assert again.stderr.count("skipped: ") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i", "photos"]
    write_index(bundle_path, [photos], tmp_path / "j", batch=16, skip_bad=True, progress=False)
    for name in ("vectors.npy", "vectors.faiss"):
        assert (out / name).read_bytes() == (tmp_path / "j" / name).read_bytes()


def test_what_changed_meanwhile_is_encoded_again(makers, bundle_path, folder, tmp_path, monkeypatch):
    images = makers.digits()[0]
    monkeypatch.setattr("retrieval.serving.index.build.put_in_place", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_index(bundle_path, [folder], tmp_path / "i", progress=False)
    monkeypatch.undo()
    paths = sorted(folder.rglob("*.png"))
    time.sleep(0.02)  # so that the time of the file differs
    Image.fromarray(images[300]).save(paths[25])
    summary = write_index(bundle_path, [folder], tmp_path / "i", progress=False)
    assert summary.resumed == 25
    with open_index(tmp_path / "i", threads=1) as index:
        for row, path in enumerate(paths):
            assert np.array_equal(index.vector(row), index.bundle.encode_image(path).vector[0])


def test_another_bundle_starts_over(makers, bundle_path, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("retrieval.serving.index.build.put_in_place", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_index(bundle_path, [folder], tmp_path / "i", progress=False)
    monkeypatch.undo()
    other = makers.make_bundle(tmp_path / "other", seed=5)
    summary = write_index(other, [folder], tmp_path / "i", progress=False)
    assert summary.resumed == 0
    with open_index(tmp_path / "i", threads=1) as index:
        assert np.array_equal(index.vector(0), index.bundle.encode_image(index.item(0).path).vector[0])


def test_a_damaged_journal_costs_time_and_nothing_else(bundle_path, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("retrieval.serving.index.build.put_in_place", _interrupt)
    for damage in (b"", b"{}\n", b"\xff\xfe", b'{"bundle": 1}\n[]\n'):
        with pytest.raises(KeyboardInterrupt):
            write_index(bundle_path, [folder], tmp_path / "i", progress=False)
        (tmp_path / "i.partial" / "journal.jsonl").write_bytes(damage)
    journal = tmp_path / "i.partial" / "journal.jsonl"
    with pytest.raises(KeyboardInterrupt):
        write_index(bundle_path, [folder], tmp_path / "i", progress=False)
    journal.write_bytes(journal.read_bytes()[:-20])  # torn in the last line
    os.truncate(
        tmp_path / "i.partial" / "vectors", 30 * 16 * 4 + 5
    )  # and vectors that never reached the disk
    monkeypatch.undo()
    assert write_index(bundle_path, [folder], tmp_path / "i", progress=False).resumed == 30
    open_index(tmp_path / "i", threads=1).close()


@pytest.mark.parametrize("file", ["vectors", "codes", "journal.jsonl"])
def test_a_flipped_bit_of_what_was_done_is_done_again(file, makers, photos, tmp_path, monkeypatch):
    bundle = makers.make_bundle(tmp_path / "b", rescorer=True)
    write_index(bundle, [photos], tmp_path / "whole", progress=False)
    partial = tmp_path / "i.partial"
    for bit in np.random.default_rng(0).integers(0, 8 * 200 * 60, 6):
        monkeypatch.setattr("retrieval.serving.index.build.put_in_place", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_index(bundle, [photos], tmp_path / "i", progress=False)
        monkeypatch.undo()
        content = bytearray((partial / file).read_bytes())
        content[bit // 8] ^= 1 << (bit % 8)
        (partial / file).write_bytes(content)
        assert write_index(bundle, [photos], tmp_path / "i", progress=False).resumed < 200
        for name in ("vectors.npy", "codes.npy", "items.sqlite"):
            assert (tmp_path / "i" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        shutil.rmtree(tmp_path / "i")


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
