"""Building an index that was interrupted: it goes on where it stopped, and does again what cannot
be trusted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from PIL import Image
from retrieval.serving.index.index import create_index, open_index

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(makers, tmp_path):
    makers.write_digits(tmp_path / "photos", 40)
    return tmp_path / "photos"


SLOW = textwrap.dedent("""
    import sys, time
    from retrieval.serving.bundle import Bundle
    from retrieval.serving.index.index import create_index
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
    from retrieval.serving.index import adding
    adding._SECONDS = 0
    summary = create_index(sys.argv[3], sys.argv[1], [sys.argv[2]], batch=16, skip_bad=True, progress=False)
    print("resumed", summary.resumed, "skipped", len(summary.skipped))
""")  # noqa: E501


def test_a_killed_run_goes_on_where_it_stopped(makers, bundle_path, tmp_path):
    """Ctrl-C is tested where the command is (test_cli.py)."""
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
    first.kill()
    first.communicate(timeout=20)
    assert (tmp_path / "i.partial").is_dir() and not out.exists()
    again = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert again.returncode == 0, again.stderr
    *batches, last = again.stdout.splitlines()
    assert last.split()[:2] == ["resumed", "62"]
    assert sum(map(int, batches)) == 200 - 62
    assert again.stderr.count("skipped: ") == 2
    assert {path.name for path in tmp_path.iterdir()} - {".i.partial.lock"} == {"i", "photos"}
    with open_index(out, threads=1) as index:
        assert len(index) == 200
        for item in index.scan():
            assert np.array_equal(
                index.vector(item.id), index.bundle.encode_image(item.path).vector[0]
            )


def test_what_changed_meanwhile_is_encoded_again(
    makers, bundle_path, folder, tmp_path, monkeypatch
):
    images = makers.digits()[0]
    monkeypatch.setattr("retrieval.serving.index.creating.rename_whole", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        create_index(tmp_path / "i", bundle_path, [folder], progress=False)
    monkeypatch.undo()
    paths = sorted(folder.rglob("*.png"))
    time.sleep(0.02)  # so that the time of the file differs
    Image.fromarray(images[300]).save(paths[25])
    summary = create_index(tmp_path / "i", bundle_path, [folder], progress=False)
    assert summary.resumed == 40
    with open_index(tmp_path / "i", threads=1) as index:
        for path in paths:
            id = path.relative_to(folder).as_posix()
            assert np.array_equal(index.vector(id), index.bundle.encode_image(path).vector[0])


def test_another_bundle_starts_over(makers, bundle_path, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("retrieval.serving.index.creating.rename_whole", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        create_index(tmp_path / "i", bundle_path, [folder], progress=False)
    monkeypatch.undo()
    other = makers.make_bundle(tmp_path / "other", seed=5)
    summary = create_index(tmp_path / "i", other, [folder], progress=False)
    assert summary.resumed == 0
    with open_index(tmp_path / "i", threads=1) as index:
        item = index.scan()[0]
        assert np.array_equal(index.vector(item.id), index.bundle.encode_image(item.path).vector[0])


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
