"""Ask pip what the extra `gpu` resolves to beside torch, and refuse two CUDA versions or twin modules.

Nothing is installed, and only what brings CUDA is asked for: `python .ci/extras.py`. Needs the package index.
"""

import configparser
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from retrieval.serving.runtime import FAISS, ONNXRUNTIME  # noqa: E402

config = configparser.ConfigParser()
config.read(ROOT / "setup.cfg", encoding="utf-8")
extras = {name: text.split("\n")[1:] for name, text in config["options.extras_require"].items()}
wanted = extras["gpu"] + [line for line in extras["train"] if line.startswith("torch")]
command = [
    sys.executable,
    "-m",
    "pip",
    "install",
    "--quiet",
    "--dry-run",
    "--ignore-installed",
    "--only-binary=:all:",
    "--report",
    "-",
]
done = subprocess.run([*command, *wanted], stdout=subprocess.PIPE, check=True)
chosen = {
    entry["metadata"]["name"]: entry["metadata"]["version"] for entry in json.loads(done.stdout)["install"]
}

majors: dict[str, str] = {}
for name, version in chosen.items():
    if ending := re.search(r"-cu(\d\d)$", name):
        majors[name] = ending[1]
    elif name in ("cuda-toolkit", "nvidia-cuda-runtime"):
        majors[name] = version.partition(".")[0]
faults = [
    f"{' and '.join(twins)} install the same module"
    for family in (FAISS, ONNXRUNTIME)
    if len(twins := sorted(set(family) & set(chosen))) != 1
]
if len(set(majors.values())) != 1:
    faults.append(f"CUDA versions differ: {majors}")
for name in ("torch", *FAISS, *ONNXRUNTIME):
    if name in chosen:
        print(f"{name} {chosen[name]}")
print(f"{len(majors)} packages of CUDA {', '.join(sorted(set(majors.values())))}")
sys.exit("\n".join(faults) or 0)
