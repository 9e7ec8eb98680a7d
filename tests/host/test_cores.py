"""The number of cores and threads follows the CPU affinity and the cgroup's quota."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from retrieval.base import machine as of_cores
from retrieval.base.machine import cores, default_threads, limit_threads

ROOT = Path(__file__).parents[2]


def v1(group: str, quota: int) -> dict[str, str]:
    """Return the files of a cgroup of version 1."""
    return {f"{group}/cpu.cfs_quota_us": f"{quota}", f"{group}/cpu.cfs_period_us": "100000"}


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write a file tree like the kernel's: /proc/self/cgroup, and files below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


@pytest.fixture
def machine(monkeypatch):
    """Sixteen cores, all of which this process may use."""
    monkeypatch.setattr(of_cores, "_affinity", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "200000 100000"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000"}, 2),
        ("0::/\n", {"cpu.max": "1000 100000"}, 1),
        ("0::/\n", {"cpu.max": "max 100000"}, 16),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000", "a/cpu.max": "300000 100000"}, 1),
        # In a container, /proc names the host's path, but the container's cgroup is the root.
        ("0::/docker/0123\n", {"cpu.max": "400000 100000"}, 4),
        ("0::/../..\n", {"cpu.max": "400000 100000"}, 4),
        ("3:memory:/\n2:cpu,cpuacct:/\n", v1("cpu,cpuacct", 250000), 3),
        ("1:cpu:/\n0::/\n", v1("cpu", -1), 16),
        ("1:cpuacct,cpu:/a\n", v1("cpu/a", 200000), 2),
        ("1:cpu:/\n0::/\n", {"unified/cpu.max": "200000 100000"}, 2),
        ("0::/\n", {"cpu.max": "no numbers"}, 16),
        ("0::/\n", {"cpu.max": "100000 0"}, 16),
        ("0::/\n", {"cpu.max": ""}, 16),
        ("", {}, 16),
    ],
)
def test_the_quota_of_a_cgroup(groups, files, expected, tmp_path):
    assert cores(tree(tmp_path, groups, files)) == expected


@pytest.mark.usefixtures("machine")
def test_without_cgroups_the_affinity_decides(tmp_path):
    assert cores(tmp_path) == 16
    limit_threads(tmp_path)
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.usefixtures("machine")
def test_a_users_own_number_of_threads_wins(tmp_path, monkeypatch):
    half = tree(tmp_path, "0::/\n", {"cpu.max": "800000 100000"})
    limit_threads(half)
    assert os.environ["OMP_NUM_THREADS"] == "8"
    assert default_threads() == 8
    for setting, threads in (("3", 3), ("4,2", 4), (" 5 ", 5)):
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
        limit_threads(half)
        assert os.environ["OMP_NUM_THREADS"] == setting
        assert default_threads() == threads
    for nonsense in ("", "0", "-1", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", nonsense)
        assert default_threads() == cores()


def result_of(code: str, *, one_core: bool = True) -> Any:
    """Run code in a child where `os.cpu_count` returns 64; return the JSON that it prints."""
    pin = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})" if one_core else ""
    code = f"import json, os\nos.cpu_count = lambda: 64\n{pin}\n{code}"
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, **options)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_every_default_follows_the_affinity():
    numbers = result_of("""
import faiss, torch
import numpy as np
from retrieval.data.datasets import ArrayDataset
from retrieval.data.loading import RawInputs
from retrieval.base.machine import cores, default_threads
from retrieval_server.server import Parts
from retrieval_server.settings import Settings
from retrieval.images.preprocessing import Preprocessing
from retrieval.base.runtime import load_onnxruntime
from retrieval.base.runtime import session_options

onnxruntime = load_onnxruntime()
raw = RawInputs(ArrayDataset(np.zeros((4, 8, 8), np.uint8), list("aabb")), Preprocessing((8, 8), 3), budget=0)
print(json.dumps({
    "cores": cores(),
    "threads": default_threads(),
    "torch": torch.get_num_threads(),
    "FAISS": faiss.omp_get_max_threads(),
    "session": session_options(onnxruntime, None).intra_op_num_threads,
    "explicit session": session_options(onnxruntime, 3).intra_op_num_threads,
    "decoding threads": raw._threads._max_workers,
    "encoder of a server": Parts({}, Settings(workers=1)).threads,
}))
""")  # noqa: E501
    assert numbers.pop("explicit session") == 3 and numbers == dict.fromkeys(numbers, 1)


@pytest.mark.skipif(cores() < 2, reason="one core: a quota limits nothing")
def test_torch_faiss_and_blas_follow_the_quota(tmp_path):
    tree(tmp_path, "0::/\n", {"cpu.max": "100000 100000"})
    numbers = result_of(
        f"""
from pathlib import Path
from retrieval.base.machine import limit_threads
limit_threads(Path({str(tmp_path)!r}))
import faiss, torch, numpy
from threadpoolctl import threadpool_info
print(json.dumps([torch.get_num_threads(), faiss.omp_get_max_threads(), *(p["num_threads"] for p in threadpool_info())]))
""",  # noqa: E501
        one_core=False,
    )
    assert set(numbers) == {1}


def test_no_other_module_counts_cores():
    counts = re.compile(r"cpu_count|sched_getaffinity|hardware_concurrency")
    files = [*(ROOT / "retrieval").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]
    users = [path for path in files if counts.search(path.read_text(encoding="utf-8"))]
    assert users == [ROOT / "retrieval/base/machine.py"]
