"""`retrieval doctor`: what is installed and what is wrong with it, each library asked in a process
of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The command with `folder` before everything else on the path."""
    code = (
        "import sys; sys.argv = ['retrieval', 'doctor', *sys.argv[1:]]; from retrieval.cli.app"
        " import main; main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *options],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )


def distribution(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
    """Lay down what a package manager leaves of an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_here_all_is_well(tmp_path: Path) -> None:
    done = run(tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["faults"] == []
    assert set(found["runs"]) == {"training", "encoder", "index"}
    by_name = {library["name"]: library for library in found["libraries"]}
    assert by_name["faiss-cpu"]["extras"] == ["cpu"] and by_name["click"]["extras"] == []
    assert "pytest" not in by_name  # an extra of developers
    assert found["sees"]["onnxruntime"]["starts"][-1] == "CPUExecutionProvider"


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    distribution(tmp_path, "click", "7.0")
    distribution(
        tmp_path, "onnxruntime-gpu", "1.31.0", ("nvidia-cuda-runtime~=13.0; extra == 'cuda'",)
    )
    distribution(tmp_path, "faiss-gpu-cu12", "1.14.1")
    (tmp_path / "faiss.py").write_text("import os\nos.abort()\n")
    done = run(tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    said = done.stdout.partition("To mend")[2]
    assert (
        "click 7.0 is installed; retrieval needs >=8.1. Mend it: pip install 'click>=8.1'" in said
    )
    assert "onnxruntime and onnxruntime-gpu overwrite each other's files. Keep one" in said
    assert "faiss-cpu and faiss-gpu-cu12 overwrite" in said
    assert "faiss-cpu cannot be used: it ends the process (code -6)" in said
    assert "faiss-gpu-cu12: CUDA 12, onnxruntime-gpu: CUDA 13" in said


def test_packages_for_a_gpu_without_one_are_a_fault(tmp_path: Path) -> None:
    distribution(tmp_path, "faiss-gpu-cuvs", "1.15.1", ("nvidia-cuda-runtime<14,>=13.2",))
    if shutil.which("nvidia-smi"):
        pytest.skip("there is a driver")
    done = run(tmp_path)
    assert done.returncode == 2
    assert "faiss-gpu-cuvs is installed, and NVIDIA's driver names no CUDA device" in done.stdout
    assert (
        "pip uninstall -y faiss-gpu-cuvs && pip install 'embedding-retrieval[cpu]'" in done.stdout
    )


def test_a_driver_that_is_older_than_what_is_installed_is_a_fault(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """What nvidia-smi says of a driver for CUDA 12, beside packages of CUDA 13."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\nif [ -n "$1" ]; then echo "NVIDIA H100, 550.54"; else echo "| Driver Version:'
        ' 550.54  CUDA Version: 12.4 |"; fi\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    distribution(tmp_path, "faiss-gpu-cuvs", "1.15.1", ("nvidia-cuda-runtime<14,>=13.2",))
    done = run(tmp_path)
    assert done.returncode == 2
    assert "it runs CUDA 12.4 at most (faiss-gpu-cuvs: CUDA 13" in done.stdout
    assert "NVIDIA H100, 550.54" in done.stdout and "names no CUDA device" not in done.stdout


@pytest.mark.gpu
def test_a_device_that_the_driver_names_is_used_by_torch(tmp_path: Path) -> None:
    found = json.loads(run(tmp_path, "--json").stdout)
    if not found["driver"]:
        pytest.skip("no CUDA device")
    assert found["runs"]["training"].startswith("cuda")
