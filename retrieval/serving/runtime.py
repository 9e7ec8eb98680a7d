"""FAISS and ONNX Runtime: found, checked, imported and tuned in one place, and only when they are
needed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from retrieval.errors import MissingDependency

# Each family installs one and the same module: two of them overwrite each other's files.
ONNXRUNTIME = ("onnxruntime", "onnxruntime-gpu")
FAISS = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs", "faiss-gpu-cu11", "faiss-gpu-cu12")


def quiet_threads() -> None:
    """Let idle OpenMP threads sleep instead of spin; counts only before FAISS, ONNX Runtime or
    torch are imported.

    On two busy cores a single search cost 16 ms of CPU time with spinning threads and 0.7 ms
    without. A user's own setting is left alone.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def installed_packages(names: tuple[str, ...]) -> list[str]:
    """Return those of the distributions that are installed."""
    found = []
    for name in names:
        try:
            version(name)
        except PackageNotFoundError:
            continue
        found.append(name)
    return found


def require(module: str, family: tuple[str, ...], extra: str = "cpu") -> Any:
    """Import and return a module that exactly one distribution of a family provides.

    Raises:
        MissingDependency: none is installed, or two are, or the one that is cannot be imported.
    """
    found = installed_packages(family)
    if len(found) > 1:
        keep = found[-1]
        raise MissingDependency(
            f"{' and '.join(found)} are both installed, and overwrite each other's files. Keep one:"
            f" pip uninstall -y {' '.join(found)} && pip install {keep}"
        )
    try:
        return importlib.import_module(module)
    except ImportError as fault:
        if found:
            raise MissingDependency(
                f"{found[0]} is installed but cannot be imported ({fault}). Install it again: "
                f"pip install --force-reinstall {found[0]}"
            ) from fault
        raise MissingDependency(
            f"{module} is not installed. Install it with: pip install"
            f" 'embedding-retrieval[{extra}]'"
            + (" (or 'embedding-retrieval[gpu]' with a CUDA device)" if extra == "cpu" else "")
        ) from None


def nvidia_smi(*options: str) -> str:
    """Return what NVIDIA's program says; nothing where it is not there or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *options], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


@functools.cache
def load_onnxruntime() -> Any:
    """Return the module `onnxruntime`.

    Raises:
        MissingDependency: not installed, or installed twice.
    """
    return require("onnxruntime", ONNXRUNTIME)


@functools.cache
def load_libraries(runtime: Any, *, tensorrt: bool = False) -> str:
    """Load CUDA's libraries out of their Python packages, where a machine has no torch that does;
    return what could not be.

    Args:
        runtime: the module `onnxruntime`.
        tensorrt: TensorRT's too.
    """
    runtime.set_default_logger_severity(4)  # what does not start is said as a sentence
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):  # it prints what it does not find
        if preload := getattr(runtime, "preload_dlls", None):
            preload()
        if tensorrt:
            with contextlib.suppress(ImportError):
                importlib.import_module("tensorrt_libs")
    return " ".join(printed.getvalue().split())


@functools.cache
def load_faiss() -> Any:
    """Return the module `faiss`, tuned.

    Raises:
        MissingDependency: not installed, or installed twice.
    """
    return require("faiss", FAISS)
