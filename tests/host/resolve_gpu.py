"""What the extra for a GPU resolves to, by pip's own resolver, kept beside this file for the test that reads it.

python tests/host/resolve_gpu.py        on Linux, with pip 24 or newer and a package index; nothing is installed
"""

from __future__ import annotations

import json
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEPT = HERE / "gpu_resolution.json"


def wanted() -> list[str]:
    """What a machine with a GPU asks for: the extra gpu, and torch beside it, of which the metadata alone is looked at. TensorRT's package is a placeholder that downloads another: its name says its CUDA."""
    config = ConfigParser()
    config.read(HERE.parents[1] / "setup.cfg", encoding="utf-8")
    extras = config["options.extras_require"]
    torch = [line for line in extras["train"].split() if line.startswith("torch>")]
    return [*extras["gpu"].split(), *torch]


def reduced(entries: list[dict[str, Any]], lines: list[str]) -> dict[str, Any]:
    """What is kept of pip's report: names, versions, and what each requires without its extras."""
    packages = []
    for entry in entries:
        said = entry["metadata"]
        requires = sorted(line for line in said.get("requires_dist", []) if "extra ==" not in line)
        packages.append({"name": said["name"].lower(), "version": said["version"], "requires": requires})
    return {"wanted": lines, "packages": sorted(packages, key=lambda each: each["name"])}


def resolved(*given: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *given]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return list(json.loads(done.stdout)["install"])


def main() -> None:
    *gpu, torch = wanted()
    entries = [*resolved(*gpu), *resolved("--no-deps", torch)]
    KEPT.write_text(json.dumps(reduced(entries, [*gpu, torch]), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
