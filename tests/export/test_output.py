"""A bundle appears whole or not at all: interruption, a kill, a full disk, something in the way."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest
import torch
from limits import files_of_at_most
from retrieval.base.progress import showing
from retrieval.bundle.bundle import Bundle
from retrieval.errors import BundleError
from retrieval.export.export_model import export_model, whole_bundle
from retrieval.model.model import Model
from torch import nn

SCRIPT = """
import sys, time
import numpy as np
from torch import nn
from retrieval.base.progress import showing
from retrieval.export.export_model import export_model
from retrieval.model.contracts import Backbone
from retrieval.model.model import Model

class Vectors(Backbone):
    features = 64
    def forward(self, x):
        return x

def pause(step, number, of):
    if step.startswith("opening"):
        print("written", flush=True)
        time.sleep(60)

items = np.random.default_rng(0).normal(size=(20, 64))
with showing(pause):
    export_model(Model(Vectors(), nn.Linear(64, 300)), items, sys.argv[1] + "/b", name="b",
                 variants=["fp16"])
"""


def visible(folder):
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def test_a_killed_export_leaves_no_bundle_under_its_name(tmp_path):
    (tmp_path / "out").mkdir()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, tmp_path / "out"], **pipes)
    assert process.stdout.readline() == "written\n", process.stderr.read()
    assert visible(tmp_path / "out") == []
    hidden = (tmp_path / "out").glob(".*.part/content/*")
    assert {path.name for path in hidden} == {"encoder.onnx", "encoder_fp16.onnx"}
    process.kill()
    process.communicate(timeout=30)
    assert visible(tmp_path / "out") == []


def test_a_full_disk_is_one_sentence(parts, vectors, tmp_path):
    model = Model(parts.Vectors(), nn.Linear(64, 300))
    with ExitStack() as disk:

        def fill(step, number, of):  # torch writes files of its own before
            if step.startswith("opening"):
                disk.enter_context(files_of_at_most(100))

        with showing(fill), pytest.raises(BundleError) as caught:
            export_model(model, vectors[0], tmp_path / "b", name="b")
    assert "cannot be written: File too large. Nothing was left behind." in str(caught.value)
    assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_bundle_stays_unless_it_is_replaced_by_a_whole_one(linear, vectors, parts, tmp_path):
    target = tmp_path / "b"
    first = export_model(linear, vectors[0], target, name="first")
    head = nn.Linear(64, 4)
    with torch.no_grad():
        head.bias.fill_(torch.inf)
    faulty = Model(parts.Vectors(), head)
    for model, replace, says in (
        (linear, False, r"exists\. Replace it with --replace"),
        (faulty, True, "NaN or infinity"),
    ):
        with pytest.raises(BundleError, match=says):
            export_model(model, vectors[0], target, name="second", replace=replace)
        assert Bundle.open(target, threads=1).manifest == first
    (tmp_path / "link").symlink_to("b")
    second = export_model(linear, vectors[0], tmp_path / "link", name="second", replace=True)
    assert Bundle.open(target, threads=1).manifest == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "link"]
    assert (tmp_path / "link").is_symlink()


def test_of_two_exports_to_one_path_one_is_refused(linear, vectors, tmp_path):
    """The second begins and ends while the first is at work: neither replaces the other unasked."""
    target, written = tmp_path / "b", []

    def second(step, number, of):
        if not written:
            written.append(None)
            written[0] = export_model(linear, vectors[0], target, name="second")

    with showing(second), pytest.raises(BundleError, match=r"exists\. Replace it with --replace"):
        export_model(linear, vectors[0], target, name="first")
    assert Bundle.open(target, threads=1).manifest == written[0]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_of_two_replacements_at_once_each_is_whole(tmp_path):
    """The second begins and ends while the first is at work."""
    target = tmp_path / "b"
    for name in ("first", "second"):  # of none, and of a bundle
        with whole_bundle(target, replace=True) as outer:
            (outer / "manifest.json").write_text(name)
            with whole_bundle(target, replace=True) as inner:
                (inner / "manifest.json").write_text("inner")
                (inner / "more").touch()
            assert {path.name for path in target.iterdir()} == {"manifest.json", "more"}
        assert [path.name for path in target.iterdir()] == ["manifest.json"]
        assert (target / "manifest.json").read_text() == name
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_only_a_bundle_is_replaced(linear, vectors, tmp_path):
    folder, file = tmp_path / "thesis", tmp_path / "file"
    folder.mkdir()
    (folder / "chapter.tex").write_text("years of work")
    file.write_text("")
    for target, words in ((folder, "is not a bundle"), (file, "is a file")):
        with pytest.raises(BundleError, match=words):
            export_model(linear, vectors[0], target, name="b", replace=True)
    assert (folder / "chapter.tex").read_text() == "years of work"


def test_replacing_never_leaves_a_moment_without_a_bundle(tmp_path):
    """Another process looks without pause while the folder is replaced a hundred times."""
    target = tmp_path / "b"
    missing, stop = [], threading.Event()

    def fill(text):
        with whole_bundle(target, replace=True) as folder:
            (folder / "manifest.json").write_text(text)

    def look():
        while not stop.is_set():
            try:
                (target / "manifest.json").read_text()
            except FileNotFoundError:
                missing.append(1)

    fill("0")
    watcher = threading.Thread(target=look)
    watcher.start()
    for number in range(100):
        fill(str(number))
    stop.set()
    watcher.join()
    if sys.platform.startswith("linux"):
        assert not missing
    assert (target / "manifest.json").read_text() == "99"
