"""`plugins new` writes a package that installs, passes its own test, trains and exports."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from retrieval.errors import PluginError
from retrieval.host.scaffold import EXAMPLES, package_files, write_package

# Builds the wheels of all packages in one process, because starting pip for each takes long.
BUILD = """
import os, sys
from setuptools import build_meta

wheels, *folders = sys.argv[1:]
for folder in folders:
    os.chdir(folder)
    build_meta.build_wheel(wheels)
"""
# Runs all tests and commands in one process, because importing torch takes long.
CALLS = """
import json, sys
import pytest

calls, own = map(json.loads, sys.argv[1:])
if pytest.main(own):
    sys.exit("a package's own test fails")
from retrieval.cli.app import main

for call in calls:
    sys.argv = ["retrieval", *call]
    main()
"""


def test_a_bad_name_or_an_existing_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("Acme", "a-b", "1a", "import", "é", "", "_x", "a.b", "pml"):
        with pytest.raises(PluginError):
            write_package(name)
    assert list(tmp_path.iterdir()) == []
    assert write_package("acme", tmp_path / "deep" / "folder") == tmp_path / "deep" / "folder"
    (tmp_path / "retrieval-acme").mkdir()
    with pytest.raises(PluginError, match="exists already"):
        write_package("acme")


KINDS = list(EXAMPLES)


def test_a_package_of_every_kind_installs_and_works(tmp_path, cli, process, monkeypatch):
    from PIL import Image
    from sklearn.datasets import load_digits

    monkeypatch.chdir(tmp_path)
    outcome = cli("plugins", "new", "acme")  # a loss by default
    assert outcome.code == 0 and "retrieval plugins show acme.margin" in outcome.out
    package = tmp_path / "retrieval-acme"
    files = {str(p.relative_to(package)) for p in package.rglob("*") if p.is_file()}
    assert files == set(package_files("acme"))
    for kind in KINDS:
        outcome = cli("plugins", "new", f"my_{kind}", "--kind", kind)
        assert outcome.code == 0
        assert f"retrieval plugins show my_{kind}.{EXAMPLES[kind][1]}" in outcome.out
    several = ["--kind", "loss", "--kind", "augmentation", "--kind", "index", "--kind", "loss"]
    outcome = cli("plugins", "new", "many", *several)
    assert outcome.code == 0 and "retrieval plugins show many.negative" in outcome.out
    assert "retrieval train retrieval-many/augmentation.toml" in outcome.out
    many = tmp_path / "retrieval-many"
    names = {str(path.relative_to(many)) for path in many.rglob("*.*") if path.is_file()}
    assert names >= {"loss.toml", "augmentation.toml", "tests/test_loss.py"}
    assert "index.toml" not in names and "retrieval_many/index.py" in names
    site = tmp_path / "site"
    folders = [package, *(tmp_path / f"retrieval-my_{kind}" for kind in KINDS), many]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    pip += ["--no-index", "--disable-pip-version-check", "--target", str(site)]
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    built = process("-c", BUILD, wheels, *folders[1:])  # pip builds the first
    assert built.code == 0, built.err
    pip += [str(package), *map(str, wheels.iterdir())]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not list(site.glob("tests*"))
    own = ["-q", "-W", "error", "-p", "no:cacheprovider", "--import-mode=importlib"]
    own += [str(folder / "tests") for folder in folders]

    for row, image in enumerate(load_digits().images[:30]):
        Image.fromarray((image * 15.9).astype("uint8")).save(tmp_path / f"{row}.png")
    trained = [kind for kind in KINDS if kind not in ("index", "store")]
    calls = [["plugins", "list"], ["plugins", "show", "acme.margin"]]
    for kind in trained:
        options = ["--set", "train.epochs=1", "--set", "sampler.batches=3"]
        if kind not in ("backbone", "learner"):  # their recipes have another backbone
            options += ["--set", "backbone.size=8"]
        recipe = str(tmp_path / f"retrieval-my_{kind}" / "recipe.toml")
        calls += [
            ["train", recipe, *options, "--output", f"run_{kind}"],
            ["evaluate", f"run_{kind}"],
        ]
    recipe = str(package / "recipe.toml")
    calls.append(["train", recipe, "--set", "train.epochs=1", "--output", "run"])
    calls.append(["check", str(many / "augmentation.toml")])
    calls.append(["plugins", "show", "many.matrix"])
    images, by = [f"{row}.png" for row in range(30)], ["--bundle", "bundle"]
    address = f"journal://{tmp_path}/items"
    calls += [
        ["export", "run_backbone", "--output", "bundle"],
        ["index", "create", "i", *images, *by, "--backend", "my_index.matrix"],
        ["search", "i", "7.png", "-k", "3", "--json"],
        ["index", "create", address, *images, *by],
        ["search", f"my_store.{address}", "8.png", "-k", "3", "--json"],
    ]
    settings = {"path": site, "cwd": tmp_path, "seconds": 300, "OMP_NUM_THREADS": "1"}
    done = process("-c", CALLS, json.dumps(calls), json.dumps(own), **settings)
    assert done.code == 0, done.out + done.err
    for text in ("retrieval-acme 0.1.0", "  acme.margin ", "  pml.margin ", "near: number = 0.2"):
        assert text in done.out
    assert (tmp_path / "run" / "summary.json").is_file()
    for kind in trained:
        recipe = (tmp_path / f"run_{kind}" / "recipe.toml").read_text()
        assert f"my_{kind}.{EXAMPLES[kind][1]}" in recipe
        run = tmp_path / f"run_{kind}"
        figures = json.loads((run / "evaluation-test.json").read_text())["metrics"]["trained"]
        assert 0 < figures["map_at_r"] <= 1
        assert ("my_metric.reciprocal_rank" in figures) == (kind == "metric")
    assert "30 items" in done.out and '"id": "8.png"' in done.out
    assert json.loads((tmp_path / "bundle" / "manifest.json").read_text())
    assert '"id": "7.png"' in done.out and "my_index.matrix" in done.out
