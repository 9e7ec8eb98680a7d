"""What it costs to open an index that is held in memory, and whether an opening ever mixes two generations.

    python benchmarks/opening.py        # writes results/opening.md; 3 GB of disk in the temporary folder, some minutes

The vectors are random: neither cost depends on what they are. Each opening is in a process of its own, one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from retrieval.serving.index.creating import create_index
from retrieval.serving.index.index import open_index
from retrieval.serving.manifest import DistanceEntry, Input, Manifest, Verified, write_manifest

RESULT = Path(__file__).parent / "results" / "opening.md"
OPEN = """
import json, sys, time
import faiss, onnxruntime
from retrieval.serving.index.index import open_index
import numpy as np
def memory(name):
    text = open("/proc/self/status").read()
    return int(text.split(name + ":")[1].split()[0]) / 1024
before, wall, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
index = open_index(sys.argv[1], threads=1)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
index.search(np.zeros((1, index.manifest.vector), np.float32), 10)
print(json.dumps({"wall": wall, "cpu": cpu, "before": before, "after": memory("VmRSS"), "peak": memory("VmHWM")}))
"""
REPLACE = """
import itertools, sys
from retrieval.serving.index.creating import create_index
for turn in itertools.count():
    name = f"{sys.argv[1]}/{turn % 2 + 1}"
    write_index(f"{name}.bundle", [f"{name}.npz"], f"{sys.argv[1]}/out", replace=True, progress=False)
    print(turn, flush=True)
"""


def make_bundle(folder: Path, width: int, scale: float) -> None:
    """Write a bundle whose encoder multiplies features by a number."""
    folder.mkdir()
    given, out = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", width]) for n in ("input", "vector")
    )
    nodes = [helper.make_node("Mul", ["input", "scale"], ["vector"])]
    held = [numpy_helper.from_array(np.float32(scale), "scale")]
    graph = helper.make_graph(nodes, "graph", [given], [out], held)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9),
        folder / "encoder.onnx",
    )
    manifest = Manifest(
        name="scaled",
        created="2025-01-01T00:00:00+00:00",
        versions={"onnx": onnx.__version__},
        opset=17,
        input=Input(kind="features", dtype="float32", shape=(width,)),
        vector=width,
        normalized=False,
        distance=DistanceEntry(name="Euclidean", exact=True),
        verified=Verified(tolerance=1e-4, largest_difference=0.0, items=1),
    )
    write_manifest(folder, manifest)


def make_index(root: Path, count: int, width: int) -> Path:
    """Build an index of random vectors."""
    make_bundle(root / "bundle", width, 1.0)
    features = np.random.default_rng(0).normal(size=(count, width)).astype(np.float32)
    np.savez(root / "x.npz", features=features)
    create_index(
        root / "index", root / "bundle", [root / "x.npz"], backend="flat", batch=4096, progress=False
    )
    return root / "index"


def costs(index: Path, times: int) -> tuple[list[dict[str, float]], float]:
    """Return what each opening took, and the size of the folder in MB."""
    found = []
    for _ in range(times):
        run = subprocess.run(
            [sys.executable, "-c", OPEN, str(index)], capture_output=True, text=True, check=True
        )
        found.append(json.loads(run.stdout))
    return found, sum(path.stat().st_size for path in index.rglob("*") if path.is_file()) / 1e6


def generations(root: Path, opens: int) -> tuple[int, int, int]:
    """Open an index while another process replaces it; return how many openings mixed two, were refused, and replacements."""
    vectors = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    made = {}
    for number, rows in ((1, 20), (2, 50)):
        make_bundle(root / f"{number}.bundle", 8, float(number))
        np.savez(root / f"{number}.npz", features=vectors[:rows])
        create_index(
            root / "out", root / f"{number}.bundle", [root / f"{number}.npz"], replace=True, progress=False
        )
        with open_index(root / "out", threads=1) as index:
            made[index.bundle.sha256] = number, rows
    rival = subprocess.Popen([sys.executable, "-c", REPLACE, str(root)], stdout=subprocess.PIPE, text=True)
    assert rival.stdout is not None
    rival.stdout.readline()
    mixed = refused = 0
    try:
        for _ in range(opens):
            try:
                with open_index(root / "out", threads=1) as index:
                    number, rows = made[index.bundle.sha256]
                    last = index.search(vectors[rows - 1] * number, 1)[0]
                    mixed += len(index) != rows or last.id != rows - 1 or last.distance != 0
            except Exception:
                refused += 1
    finally:
        rival.terminate()
        turns = len(rival.communicate()[0].splitlines())
    return mixed, refused, turns


def main() -> None:
    """Measure both, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--index", type=Path, help="one of that size which is there already")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--opens", type=int, default=2_091)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        index = given.index or make_index(Path(folder), given.count, given.width)
        found, size = costs(index, given.times)
    with tempfile.TemporaryDirectory() as folder:
        mixed, refused, turns = generations(Path(folder), given.opens)
    middle = {key: statistics.median(one[key] for one in found) for key in found[0]}
    load = os.getloadavg()[0]
    lines = [
        "# Opening an index",
        "",
        f"`python benchmarks/opening.py`, {time.strftime('%Y-%m-%d')}. {platform.machine()}, {os.cpu_count()} cores, load average at "
        f"the end {load:.1f}; Python {platform.python_version()}, NumPy {np.__version__}, faiss {version('faiss-cpu')}, ONNX Runtime {version('onnxruntime')}.",
        "",
        f"An index of {given.count:,} × {given.width} ({size:,.0f} MB of files, back end flat), opened {given.times} times, each in a process of its "
        "own; medians. Everything is read, verified and held.",
        "",
        "| | |",
        "| --- | --- |",
        f"| wall time | {middle['wall']:.2f} s |",
        f"| CPU time | {middle['cpu']:.2f} s |",
        f"| memory before, with the libraries | {middle['before']:.0f} MB |",
        f"| memory after a search | {middle['after']:.0f} MB |",
        f"| most memory, while it opens | {middle['peak']:.0f} MB |",
        "",
        f"A small index opened {given.opens:,} times while another process replaced it {turns:,} times with another one: "
        f"{mixed} openings mixed two generations, {refused} were refused.",
    ]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
