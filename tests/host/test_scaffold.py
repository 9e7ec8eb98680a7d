"""`plugins new`: a package that installs, lists beside ours, passes its own test, trains and exports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from retrieval.errors import PluginError
from retrieval.scaffold import FILES, write_package

CALLS = """
import json, sys
from retrieval.cli import main

for call in json.loads(sys.argv[1]):
    sys.argv = ["retrieval", *call]
    main()
"""


def test_the_package_works_as_it_is_written(
    tmp_path: Path, cli: Callable[..., Any], process: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = cli("plugins", "new", "acme")
    assert made.code == 0 and "retrieval plugins show acme.margin" in made.out
    package, site = tmp_path / "retrieval-acme", tmp_path / "site"
    assert {str(p.relative_to(package)) for p in package.rglob("*") if p.is_file()} == {
        name.format(name="acme") for name in FILES
    }
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
           "--disable-pip-version-check", "--target", str(site), str(package)]  # fmt: skip
    done = subprocess.run(pip, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not list(site.glob("tests*"))

    own = process("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", path=site, cwd=package)
    assert own.code == 0, own.out + own.err
    # several calls in one process: importing torch takes most of the time of each
    calls = [
        ["plugins", "list"],
        ["plugins", "show", "acme.margin"],
        ["train", str(package / "recipe.toml"), "--set", "train.epochs=1", "--output", "run"],
        ["export", "run", "--output", "bundle"],
    ]
    done = process("-c", CALLS, json.dumps(calls), path=site, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.code == 0, done.err
    assert "retrieval-acme 0.1.0" in done.out and "  acme.margin " in done.out and "  pml.margin " in done.out
    assert "near: number = 0.2" in done.out
    assert (tmp_path / "run" / "summary.json").is_file()
    assert json.loads((tmp_path / "bundle" / "manifest.json").read_text())


def test_a_bad_name_or_a_folder_that_exists_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("Acme", "a-b", "1a", "import", "é", "", "_x", "a.b", "pml"):
        with pytest.raises(PluginError):
            write_package(name)
    assert list(tmp_path.iterdir()) == []
    assert write_package("acme", tmp_path / "deep" / "folder") == tmp_path / "deep" / "folder"
    (tmp_path / "retrieval-acme").mkdir()
    with pytest.raises(PluginError, match="exists already"):
        write_package("acme")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def full(self: Path, *arguments: Any, **options: Any) -> int:
        written.append(self)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return 0

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(PluginError, match="cannot be written: No space left on device"):
        write_package("acme", tmp_path / "acme")
    assert len(written) == 3 and list(tmp_path.iterdir()) == []
