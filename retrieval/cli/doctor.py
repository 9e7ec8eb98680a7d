"""`retrieval doctor`: versions, devices, where work runs, and what is broken.

Each library is imported in its own process, so that a crash on import is reported as a fault.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from importlib.metadata import requires, version
from typing import Any

import click

from retrieval.base.machine import cores
from retrieval.base.runtime import FAISS, ONNXRUNTIME, installed_packages, nvidia_smi
from retrieval.cli import say, say_json
from retrieval.cli.common import JSON

DISTRIBUTION = "embedding-retrieval"
_SECONDS = 120  # time-out per library; a first import of torch from a slow disk takes long
_DEVELOPERS = {"docs", "test"}  # extras that no user needs

# An ONNX graph of one Identity node, to test whether an execution provider really starts.
_IDENTITY = (
    "08083a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a020801620f0a0179120a0a0808"
    "0112040a02080142040a001011"
)
# For each library, code that assigns a report to `out`; `works` says whether it uses a CUDA device.
_ASK = {
    "torch": """
import torch
out = {"cuda": torch.version.cuda, "works": bool(torch.version.cuda) and torch.cuda.is_available()}
""",
    "onnxruntime": f"""
import onnxruntime
offered = onnxruntime.get_available_providers()
wanted = [p for p in ("CUDAExecutionProvider", "CPUExecutionProvider") if p in offered]
onnxruntime.set_default_logger_severity(4)
if "CUDAExecutionProvider" in offered and hasattr(onnxruntime, "preload_dlls"):
    onnxruntime.preload_dlls()
session = onnxruntime.InferenceSession(bytes.fromhex("{_IDENTITY}"), providers=wanted)
starts = session.get_providers()
out = {{"offers": offered, "starts": starts, "works": "CUDA" in starts[0]}}
""",
    "faiss": """
import faiss
gpu = hasattr(faiss, "StandardGpuResources")
out = {"built for a GPU": gpu, "works": gpu and faiss.get_num_gpus() > 0}
""",
}


def examine() -> dict[str, Any]:
    """Return facts about this environment; `faults` has one sentence per fault, with a remedy."""
    libraries = _libraries()
    faults = [fault for library in libraries for fault in _version_faults(library)]
    sees: dict[str, Any] = {}
    runs: dict[str, str] = {}
    # each part runs in a library of which several distributions exist, for CPUs and for GPUs
    for part, module, family in (
        ("training", "torch", ("torch",)),
        ("encoder", "onnxruntime", ONNXRUNTIME),
        ("index", "faiss", FAISS),
    ):
        names = installed_packages(family)
        if len(names) > 1:
            keep = next((name for name in names if "gpu" in name), names[0])
            faults.append(
                f"{' and '.join(names)} overwrite each other's files. Keep one: "
                f"pip uninstall -y {' '.join(names)} && pip install {keep}"
            )
        if names:
            answer = _ask(_ASK[module])
            if isinstance(answer, str):
                faults.append(
                    f"{names[0]} cannot be used: {answer}. Install it again: pip install"
                    f" --force-reinstall {names[0]}"
                )
            else:
                sees[module] = answer
                runs[part] = "cuda" if answer["works"] else "cpu"
    devices = nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    newest = re.search(r"CUDA Version:\s*(\d+\.\d+)", nvidia_smi())
    return {
        "system": f"Python {platform.python_version()} on {platform.platform()}",
        "cores": cores(),
        "libraries": libraries,
        "devices": devices,
        "driver_cuda": newest[1] if newest else None,
        "sees": sees,
        "runs": runs,
        "faults": faults + _device_faults(bool(devices), runs),
    }


def _libraries() -> list[dict[str, Any]]:
    """Return the installed distribution's requirements, including those of extras for users."""
    from packaging.requirements import Requirement

    required: dict[str, dict[str, Any]] = {}
    for requirement in map(Requirement, requires(DISTRIBUTION) or []):
        marker = requirement.marker
        match = re.search(r'extra == "([^"]+)"', str(marker))
        extra = ""
        if match:
            extra = match[1]
        if extra in _DEVELOPERS or (marker and not marker.evaluate({"extra": extra})):
            continue
        name = requirement.name
        library: dict[str, Any] = {"name": name, "needs": str(requirement.specifier), "extras": []}
        library["installed"] = version(name) if installed_packages((name,)) else None
        required.setdefault(name, library)["extras"] += [extra] if extra else []
    return sorted(required.values(), key=lambda library: str(library["name"]))


def _version_faults(library: dict[str, Any]) -> list[str]:
    """Return at most one sentence on what is wrong with a library's version."""
    from packaging.requirements import Requirement

    needed = Requirement(f"{library['name']}{library['needs']}")
    have = library["installed"]
    if have is None and library["extras"]:  # nobody needs every extra
        return []
    if have is None:
        return [f"{needed.name} is missing. Install it: pip install '{needed}'"]
    if needed.specifier.contains(have, prereleases=True):
        return []
    return [
        f"{needed.name} {have} is installed; retrieval needs {needed.specifier}. Mend it: pip"
        f" install '{needed}'"
    ]


def _ask(code: str) -> dict[str, Any] | str:
    """Run code in a new process, and return its `out` or, as text, why it failed."""
    program = [sys.executable, "-c", f"import json\n{code}\nprint(json.dumps(out))"]
    try:
        done = subprocess.run(program, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"it does not answer within {_SECONDS} seconds"
    if done.returncode:
        # a traceback ends with the reason; a crash in native code leaves none
        reasons = done.stderr.strip().splitlines()
        if reasons:
            return reasons[-1].rstrip(".")
        return f"it ends the process ({done.returncode})"
    # libraries may print lines of their own before the answer
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _device_faults(has_device: bool, runs: dict[str, str]) -> list[str]:
    """Return a fault if GPU packages have no device, or cannot use it."""
    gpu = [name for name in installed_packages((*FAISS, *ONNXRUNTIME)) if "gpu" in name]
    idle = ", ".join(part for part, where in runs.items() if where == "cpu")
    if not gpu or (has_device and not idle):
        return []
    fault = f"NVIDIA's driver names no CUDA device (nvidia-smi), but {' and '.join(gpu)} need one"
    if has_device:
        fault = f"The driver names a device, but {idle} cannot use it: the CUDA versions differ"
    return [f"{fault}. Update the driver, or install the extra cpu instead of gpu."]


@click.command()
@JSON
def doctor(as_json: bool) -> None:
    """Show versions, devices, where work runs, and what is broken.

    The exit code is 2 if something is broken.

    Example:  retrieval doctor --json
    """
    facts = examine()
    say_json(facts) if as_json else say(_text(facts))
    sys.exit(2 if facts["faults"] else 0)


def _text(facts: dict[str, Any]) -> str:
    lines = [f"{facts['system']}, {facts['cores']} cores", "", "Libraries"]
    by_extra: dict[str, list[str]] = {}
    for library in facts["libraries"]:
        for extra in library["extras"] or ["base"]:
            have = library["installed"] or "–"
            by_extra.setdefault(extra, []).append(f"{library['name']} {have}")
    lines += [f"  {extra:13} {', '.join(names)}" for extra, names in sorted(by_extra.items())]
    cuda = ""
    if facts["driver_cuda"]:
        cuda = f" (driver for CUDA {facts['driver_cuda']} at most)"
    lines += ["", f"Devices{cuda}"]
    lines += [f"  {name}" for name in facts["devices"] or ["no GPU"]]
    lines += ["", "Where work runs"]
    lines += [f"  {part:13} {device}" for part, device in facts["runs"].items()]
    lines.append("")
    if facts["faults"]:
        lines.append("To mend")
        lines += [f"  - {fault}" for fault in facts["faults"]]
    else:
        lines.append("All is well.")
    return "\n".join(lines)
