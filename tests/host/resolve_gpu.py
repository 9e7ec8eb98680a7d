"""Resolve the extra `gpu` and torch with pip, and record that all packages use one CUDA version.

python tests/host/resolve_gpu.py    on Linux, with pip 24.1 or newer and a package index

Nothing is installed. With --check, or if the packages do not fit together, nothing is written.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from retrieval.base.runtime import FAISS, ONNXRUNTIME

HERE = Path(__file__).parent
KEPT = HERE / "gpu_resolution.json"
RUNTIME = ("nvidia-cuda-runtime", "cuda-toolkit")


def wanted() -> list[str]:
    """Return the requirements of the extra gpu, and that of torch last."""
    config = ConfigParser()
    config.read(HERE.parents[1] / "setup.cfg", encoding="utf-8")
    extras = config["options.extras_require"]
    torch = [line for line in extras["train"].split() if line.startswith("torch>")]
    return [*extras["gpu"].split(), *torch]


def resolved(*requirements: str) -> list[dict[str, Any]]:
    """Return the metadata of the packages that pip would install."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--only-binary=:all:", "--report", "-", *requirements]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [entry["metadata"] for entry in json.loads(done.stdout)["install"]]


def majors(package: dict[str, Any]) -> Iterator[str]:
    """Yield a package's CUDA versions, from names that end in -cuXX and the runtime's version."""
    lines = [line for line in package.get("requires_dist", []) if "extra ==" not in line]
    for needed in map(Requirement, (f"{package['name']}=={package['version']}", *lines)):
        if ending := re.search(r"-cu(\d\d)(-|$)", needed.name):
            yield ending[1]
        if needed.name in RUNTIME:
            bounds = [bound for bound in needed.specifier if bound.operator in (">=", "~=", "==")]
            yield from (bound.version.partition(".")[0] for bound in bounds)


def main() -> None:
    *gpu, torch = wanted()
    packages = [*resolved(*gpu), *resolved("--no-deps", torch)]
    versions = {package["name"].lower(): package["version"] for package in packages}
    cuda = sorted({major for package in packages for major in majors(package)})
    twice = [family for family in (FAISS, ONNXRUNTIME) if len({*family} & {*versions}) != 1]
    if len(cuda) != 1 or twice:
        sys.exit(f"CUDA of {cuda}; not one package a module: {twice}")
    if sys.argv[1:] == ["--check"]:
        names = [name for name in ("torch", *FAISS, *ONNXRUNTIME) if name in versions]
        print(*(f"{name} {versions[name]}" for name in names), sep="\n")
        return
    resolution = {"wanted": wanted(), "cuda": cuda[0], "versions": dict(sorted(versions.items()))}
    KEPT.write_text(json.dumps(resolution, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
