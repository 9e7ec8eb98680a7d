"""`retrieval doctor`: what is installed and what is wrong with it, each library asked in a process
of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The command with `folder` before everything else on the path."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "retrieval.cli", "doctor", *options],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )


def distribution(folder: Path, name: str, version: str) -> None:
    """Lay down what a package manager leaves of an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_here_all_is_well(tmp_path):
    done = run(tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    assert facts["faults"] == [] and facts["cores"] >= 1
    assert set(facts["runs"]) == {"training", "encoder", "index"}
    by_name = {library["name"]: library for library in facts["libraries"]}
    assert by_name["faiss-cpu"]["extras"] == ["cpu"] and by_name["click"]["extras"] == []
    assert "pytest" not in by_name  # an extra of developers
    assert facts["sees"]["onnxruntime"]["starts"][-1] == "CPUExecutionProvider"


def test_everything_that_is_wrong_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    distribution(tmp_path, "click", "7.0")
    distribution(tmp_path, "onnxruntime-gpu", "1.31.0")
    (tmp_path / "faiss.py").write_text("import os\nos.abort()\n")
    done = run(tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    faults = done.stdout.partition("To mend")[2]
    assert "click 7.0 is installed; retrieval needs >=8.1. Mend it" in faults
    assert "onnxruntime and onnxruntime-gpu overwrite each other's files. Keep one" in faults
    assert "faiss-cpu cannot be used: it ends the process (-6)" in faults
    assert "names no CUDA device (nvidia-smi), and onnxruntime-gpu need one" in faults


def test_a_device_that_stays_unused_is_a_fault(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\nif [ -n "$1" ]; then echo "NVIDIA H100, 550.54"; else echo "| Driver Version:'
        ' 550.54  CUDA Version: 12.4 |"; fi\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    distribution(tmp_path, "faiss-gpu-cuvs", "1.15.1")
    done = run(tmp_path)
    assert done.returncode == 2 and "CUDA 12.4 at most" in done.stdout
    assert "names a device, and training, encoder, index cannot use it" in done.stdout
    assert "NVIDIA H100, 550.54" in done.stdout and "names no CUDA device" not in done.stdout


@pytest.mark.gpu
def test_a_device_that_the_driver_names_is_used_by_torch(tmp_path):
    facts = json.loads(run(tmp_path, "--json").stdout)
    if not facts["devices"]:
        pytest.skip("no CUDA device")
    assert facts["runs"]["training"].startswith("cuda")
