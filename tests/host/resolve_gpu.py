"""What the extra for a GPU resolves to, by pip's own resolver, kept beside this file for the test
that reads it.

python tests/host/resolve_gpu.py            on Linux, with pip 24.1 or newer and a package index;
nothing is installed python tests/host/resolve_gpu.py --check    writes nothing, and says what does
not fit together today
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
from retrieval.serving.runtime import FAISS, ONNXRUNTIME

HERE = Path(__file__).parent
KEPT = HERE / "gpu_resolution.json"
RUNTIME = ("nvidia-cuda-runtime", "cuda-toolkit")


def wanted() -> list[str]:
    """What a machine with a GPU asks for: the extra gpu, and torch beside it."""
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
        packages.append(
            {"name": said["name"].lower(), "version": said["version"], "requires": requires}
        )
    return {"wanted": lines, "packages": sorted(packages, key=lambda each: each["name"])}


def resolved(*given: str) -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--only-binary=:all:",
        "--report",
        "-",
        *given,
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return list(json.loads(done.stdout)["install"])


def majors(package: dict[str, Any]) -> Iterator[str]:
    """The CUDA majors that a package is of, or asks for: by its name's ending, or the runtime's
    version.
    """
    if ending := re.search(r"-cu(\d\d)(-|$)", package["name"]):
        yield ending[1]
    if package["name"] in RUNTIME:
        yield package["version"].partition(".")[0]
    for line in package["requires"]:
        needed = Requirement(line)
        if ending := re.search(r"-cu(\d\d)$", needed.name):
            yield ending[1]
        if needed.name in RUNTIME:
            for bound in needed.specifier:
                if bound.operator in (">=", "~=", "=="):
                    yield bound.version.partition(".")[0]


def faults(kept: dict[str, Any]) -> list[str]:
    """What does not fit together: CUDA of two majors, two packages of one module, a bound that is
    not met.
    """
    packages = kept["packages"]
    versions = {each["name"]: each["version"] for each in packages}
    found = []
    if len(of := {major for each in packages for major in majors(each)}) != 1:
        found.append(f"CUDA of several majors: {sorted(of)}")
    for family in (FAISS, ONNXRUNTIME):
        if len(both := sorted(set(family) & set(versions))) != 1:
            found.append(f"not one package gives the module: {both}")
    plain = [re.sub(r"-cu\d\d$", "", name) for name in versions]
    found += [f"{name} is there twice" for name in sorted(set(plain)) if plain.count(name) > 1]
    for line in kept["wanted"]:
        needed = Requirement(line)
        if needed.name not in versions or versions[needed.name] not in needed.specifier:
            found.append(f"{line} is not met")
    return found


def main() -> None:
    *gpu, torch = wanted()
    entries = [*resolved(*gpu), *resolved("--no-deps", torch)]
    found = reduced(entries, [*gpu, torch])
    if sys.argv[1:] == ["--check"]:
        for each in found["packages"]:
            if each["name"] in ("torch", *FAISS, *ONNXRUNTIME):
                print(each["name"], each["version"])
        sys.exit("\n".join(faults(found)) or 0)
    KEPT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
