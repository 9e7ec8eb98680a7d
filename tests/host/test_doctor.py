"""`retrieval doctor`: what is installed, and what is wrong with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def run(tmp_path, process):
    """Run `retrieval doctor` with modules and distributions of the folder first."""
    where = {"path": tmp_path, "cwd": tmp_path, "OMP_NUM_THREADS": "1"}
    return lambda *options: process("-m", "retrieval.cli", "doctor", *options, **where)


def distribution(folder: Path, name: str, version: str) -> None:
    """Write the metadata of an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_this_environment_has_no_faults(run):
    done = run("--json")
    assert done.code == 0, done.out + done.err
    facts: dict[str, Any] = json.loads(done.out)
    assert facts["faults"] == [] and facts["cores"] >= 1
    assert set(facts["runs"]) == {"training", "encoder", "index"}
    by_name = {library["name"]: library for library in facts["libraries"]}
    assert by_name["faiss-cpu"]["extras"] == ["cpu"] and by_name["click"]["extras"] == []
    assert "pytest" not in by_name  # an extra of developers
    assert facts["sees"]["onnxruntime"]["starts"][-1] == "CPUExecutionProvider"


def test_all_faults_are_reported_at_once(tmp_path, run, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    distribution(tmp_path, "click", "7.0")
    distribution(tmp_path, "onnxruntime-gpu", "1.31.0")
    (tmp_path / "faiss.py").write_text("import os\nos.abort()\n")
    done = run()
    assert done.code == 2 and "Traceback" not in done.err
    faults = done.out.partition("To mend")[2]
    assert "click 7.0 is installed; retrieval needs >=8.1. Mend it" in faults
    assert "onnxruntime and onnxruntime-gpu overwrite each other's files. Keep one" in faults
    assert "faiss-cpu cannot be used: it ends the process (-6)" in faults
    assert "names no CUDA device (nvidia-smi), but onnxruntime-gpu need one" in faults


def test_an_unused_device_is_a_fault(tmp_path, run, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\n[ -n "$1" ] && echo "NVIDIA H100, 550.54" && exit\n'
        'echo "| Driver Version: 550.54  CUDA Version: 12.4 |"\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    distribution(tmp_path, "faiss-gpu-cuvs", "1.15.1")
    done = run()
    assert done.code == 2 and "CUDA 12.4 at most" in done.out
    assert "names a device, but training, encoder, index cannot use it" in done.out
    assert "NVIDIA H100, 550.54" in done.out and "names no CUDA device" not in done.out


@pytest.mark.gpu
def test_torch_uses_the_device(run):
    facts = json.loads(run("--json").out)
    if not facts["devices"]:
        pytest.skip("no CUDA device")
    assert facts["runs"]["training"].startswith("cuda")
