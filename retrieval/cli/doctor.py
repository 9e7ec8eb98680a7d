"""`retrieval doctor`: installed versions, visible devices, where work will run, and what to repair.

Each library is imported in its own process, so that one that crashes on import becomes a finding.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import click
from packaging.requirements import Requirement

from retrieval.cli import say
from retrieval.serving.runtime import FAISS, ONNXRUNTIME, installed_packages, nvidia_smi

DISTRIBUTION = "embedding-retrieval"
_SECONDS = 120  # time-out per library; a first import of torch from a slow disk takes long
_DEVELOPERS = {"docs", "test"}  # extras that no user needs

# A graph of one Identity node, to test whether an execution provider really starts.
_IDENTITY = (
    "08083a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a020801620f0a0179120a0a0808"
    "0112040a02080142040a001011"
)
_ASK = {
    "torch": (
        """
import torch
cuda = torch.version.cuda
devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
out = {"cuda": cuda, "devices": devices}
"""
    ),
    "onnxruntime": (
        f"""
import onnxruntime
offered = onnxruntime.get_available_providers()
wanted = [p for p in ("CUDAExecutionProvider", "CPUExecutionProvider") if p in offered]
onnxruntime.set_default_logger_severity(4)
if "CUDAExecutionProvider" in offered and hasattr(onnxruntime, "preload_dlls"):
    onnxruntime.preload_dlls()
session = onnxruntime.InferenceSession(bytes.fromhex("{_IDENTITY}"), providers=wanted)
out = {{"offers": offered, "starts": session.get_providers()}}
"""
    ),
    "faiss": (
        """
import faiss
out = {"gpu": hasattr(faiss, "StandardGpuResources"), "devices": faiss.get_num_gpus()}
"""
    ),
}


@dataclass(frozen=True)
class Library:
    """A required distribution: its installed version, or `None`, and the required versions."""

    name: str
    installed: str | None
    needed: str
    extras: tuple[str, ...]


@dataclass(frozen=True)
class Examination:
    """The result of `examine`.

    Attributes:
        system: Python and platform.
        libraries: the required distributions, by name.
        driver: the CUDA devices that the driver lists; empty without a driver.
        driver_cuda: the newest CUDA version that the driver supports, such as "13.0"; `None`
            without a driver.
        sees: each library's report, such as its devices.
        runs: the devices that training, the encoder and the index will use.
        faults: one sentence per fault, with its remedy.
        notes: devices that stay unused, and how to use them.
    """

    system: str
    libraries: tuple[Library, ...]
    driver: tuple[str, ...]
    driver_cuda: str | None
    sees: Mapping[str, Mapping[str, Any]]
    runs: Mapping[str, str]
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> str:
        """Return the result as JSON."""
        return json.dumps(asdict(self), indent=2)


@dataclass
class _Findings:
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def examine() -> Examination:
    """Examine this environment: versions, conflicting packages, devices, providers, CUDA."""
    findings = _Findings()
    libraries = _libraries()
    for library in libraries:
        _check_version(library, findings)
    for family in (ONNXRUNTIME, FAISS):
        if len(names := installed_packages(family)) > 1:
            keep = next((name for name in names if "gpu" in name), names[0])
            findings.faults.append(
                f"{' and '.join(names)} overwrite each other's files. Keep one: "
                f"pip uninstall -y {' '.join(names)} && pip install {keep}"
            )
    sees: dict[str, Mapping[str, Any]] = {}
    have = {
        "torch": installed_packages(("torch",)),
        "onnxruntime": installed_packages(ONNXRUNTIME),
        "faiss": installed_packages(FAISS),
    }
    for module, names in have.items():
        if not names:
            continue
        answer, fault = _ask(_ASK[module])
        if fault is None:
            sees[module] = answer
        else:
            findings.faults.append(
                f"{names[0]} cannot be used: {fault}. Install it again: pip install"
                f" --force-reinstall {names[0]}"
            )
    driver, driver_cuda = _driver(), _driver_cuda()
    runs = _placement(sees, driver, findings)
    _check_cuda(sees, driver_cuda, findings)
    _check_device(driver, findings)
    return Examination(
        f"Python {platform.python_version()} on {platform.platform()}",
        libraries,
        driver,
        driver_cuda,
        sees,
        runs,
        tuple(findings.faults),
        tuple(findings.notes),
    )


def _libraries() -> tuple[Library, ...]:
    """Return the requirements of the installed distribution, including extras for users."""
    required: dict[str, tuple[Requirement, list[str]]] = {}
    for line in requires(DISTRIBUTION) or []:
        requirement = Requirement(line)
        marker = str(requirement.marker or "")
        extra = re.search(r'extra == "([^"]+)"', marker)
        name = extra[1] if extra else ""
        if name in _DEVELOPERS or (
            requirement.marker and not requirement.marker.evaluate({"extra": name})
        ):
            continue
        required.setdefault(requirement.name, (requirement, []))[1].append(name)
    return tuple(
        Library(
            name,
            _version(name),
            str(requirement.specifier),
            tuple(extra for extra in extras if extra),
        )
        for name, (requirement, extras) in sorted(required.items())
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _check_version(library: Library, findings: _Findings) -> None:
    requirement = f"'{library.name}{library.needed}'"
    if library.installed is None:
        if not library.extras:
            findings.faults.append(
                f"{library.name} is missing. Install it: pip install {requirement}"
            )
    elif not Requirement(f"{library.name}{library.needed}").specifier.contains(
        library.installed, prereleases=True
    ):
        findings.faults.append(
            f"{library.name} {library.installed} is installed; retrieval needs {library.needed}. "
            f"Mend it: pip install {requirement}"
        )


def _ask(code: str) -> tuple[dict[str, Any], str | None]:
    """Run code in a new process, and return its JSON output and its fault, if any."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import json\n{code}\nprint(json.dumps(out))"],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {}, f"it does not answer within {_SECONDS} seconds"
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [
            f"it ends the process (code {done.returncode})"
        ]
        return {}, last[0].rstrip(".")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer, None


def _driver() -> tuple[str, ...]:
    """Return the devices that NVIDIA's driver lists."""
    return tuple(
        nvidia_smi("--query-gpu=name,driver_version", "--format=csv,noheader").strip().splitlines()
    )


def _driver_cuda() -> str | None:
    """Return the newest CUDA version that NVIDIA's driver supports."""
    match = re.search(r"CUDA Version:\s*(\d+\.\d+)", nvidia_smi())
    return match[1] if match else None


def _placement(
    sees: Mapping[str, Mapping[str, Any]], driver: Iterable[str], findings: _Findings
) -> dict[str, str]:
    """Return the device for each kind of work, and note devices that stay unused."""
    has_device = bool(tuple(driver))
    runs: dict[str, str] = {}
    if "torch" in sees:
        devices = sees["torch"]["devices"]
        runs["training"] = f"cuda ({devices[0]})" if devices else "cpu"
        if has_device and sees["torch"]["cuda"] and not devices:
            findings.faults.append(
                f"The driver names a device, but torch (CUDA {sees['torch']['cuda']}) sees none:"
                " the driver is probably older than that CUDA. Update the driver, or install a"
                " torch of an older CUDA."
            )
    if "onnxruntime" in sees:
        offers, starts = sees["onnxruntime"]["offers"], sees["onnxruntime"]["starts"]
        runs["encoder"] = starts[0]
        if (
            has_device
            and "CUDAExecutionProvider" in offers
            and "CUDAExecutionProvider" not in starts
        ):
            findings.faults.append(
                "ONNX Runtime offers CUDA but cannot start it: its CUDA libraries are missing or"
                f" of another version. Mend it: pip install '{DISTRIBUTION}[gpu]'"
            )
    if "faiss" in sees:
        gpu = sees["faiss"]["gpu"]
        runs["index"] = "cuda" if gpu and sees["faiss"]["devices"] else "cpu"
        if has_device and gpu and not sees["faiss"]["devices"]:
            findings.faults.append(
                "The driver names a device, but FAISS (built for a GPU) sees none."
            )
    if has_device and (unused := installed_packages(("faiss-cpu", "onnxruntime"))):
        findings.notes.append(
            f"{' and '.join(unused)} leave the device unused. To use it: "
            f"pip uninstall -y {' '.join(unused)} && pip install '{DISTRIBUTION}[gpu]'"
        )
    return runs


def _check_device(driver: Sequence[str], findings: _Findings) -> None:
    """Report libraries for a GPU on a machine without one."""
    installed = [name for name in installed_packages((*FAISS, *ONNXRUNTIME)) if "gpu" in name]
    if installed and not driver:
        findings.faults.append(
            f"{' and '.join(installed)} {'is' if len(installed) == 1 else 'are'} installed, and"
            " NVIDIA's driver names no CUDA device (nvidia-smi): all runs on the CPU. Install the"
            f" driver, or: pip uninstall -y {' '.join(installed)} && pip install"
            f" '{DISTRIBUTION}[cpu]'"
        )


def _check_cuda(
    sees: Mapping[str, Mapping[str, Any]], driver: str | None, findings: _Findings
) -> None:
    """Report libraries with different CUDA majors, or that need a newer driver."""
    majors: dict[str, str] = {}
    if "torch" in sees and sees["torch"]["cuda"]:
        majors["torch"] = str(sees["torch"]["cuda"]).partition(".")[0]
    for name in installed_packages((*FAISS, "onnxruntime-gpu")):
        if major := _cuda_major(name):
            majors[name] = major
    late = {
        name: major
        for name, major in majors.items()
        if driver and int(major) > int(driver.partition(".")[0])
    }
    if late:
        listed = ", ".join(f"{name}: CUDA {major}" for name, major in sorted(late.items()))
        findings.faults.append(
            f"The driver is too old for what is installed: it runs CUDA {driver} at most"
            f" ({listed}). Update the driver."
        )
    if len(set(majors.values())) > 1 and any("gpu" in name for name in majors):
        listed = ", ".join(f"{name}: CUDA {major}" for name, major in sorted(majors.items()))
        findings.faults.append(
            f"Libraries of different CUDA versions are installed ({listed}). Install them together:"
            f" pip install --upgrade '{DISTRIBUTION}[gpu]'"
        )


def _cuda_major(name: str) -> str | None:
    """Return the CUDA major in a distribution's name or requirements, such as "13"."""
    for line in (name, *(requires(name) or [])):
        requirement = Requirement(line)
        if ending := re.search(r"-cu(\d\d)$", requirement.name):
            return ending[1]
        if requirement.name in ("nvidia-cuda-runtime", "cuda-toolkit"):
            for bound in requirement.specifier:
                if bound.operator in (">=", "~=", "=="):
                    return bound.version.partition(".")[0]
    return None


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def doctor(as_json: bool) -> None:
    """Show installed versions, visible devices, where work will run, and what to repair.

    The exit code is 2 if something is wrong.

    Example:  retrieval doctor --json
    """
    examination = examine()
    say(examination.as_json() if as_json else _text(examination))
    if examination.faults:
        sys.exit(2)


def _text(examination: Examination) -> str:
    wide = max(len(library.name) for library in examination.libraries)
    lines = [examination.system, "", "Libraries"]
    for library in examination.libraries:
        extras = f"  ({', '.join(library.extras)})" if library.extras else ""
        have = library.installed or "not installed"
        lines.append(f"  {library.name:{wide}}  {have:14}  needs {library.needed}{extras}")
    lines += ["", "Devices", *(f"  {name}" for name in examination.driver or ["no CUDA device"])]
    lines += [
        "",
        "What runs where",
        *(f"  {what:8}  {where}" for what, where in examination.runs.items()),
    ]
    if not examination.runs:
        lines.append("  nothing yet: install the extras cpu (or gpu), and train or serve")
    for title, sentences in (("To mend", examination.faults), ("Notes", examination.notes)):
        if sentences:
            lines += ["", title, *(f"  - {sentence}" for sentence in sentences)]
    if not examination.faults:
        lines += ["", "All is well."]
    return "\n".join(lines)
