"""Check and import FAISS and ONNX Runtime on demand, for the CPU or CUDA; name versions."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args

from retrieval.base.machine import available_memory, default_threads
from retrieval.base.regular_files import out_of_files
from retrieval.errors import BundleError, MissingDependency

PROJECT = "embedding-retrieval"
"""The name of this distribution."""
# Families of PyPI packages (distributions). Those of a family install the same module and overwrite
# each other's files, so at most one may be installed.
ONNXRUNTIME = ("onnxruntime", "onnxruntime-gpu")
FAISS = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs", "faiss-gpu-cu11", "faiss-gpu-cu12")

_MEMORY = 6 << 30
"""CPU memory limit in bytes for all graphs of a process: weights and intermediate results."""
_FOLDED_BYTES = 1 << 26
"""Largest constant that ONNX Runtime may compute while loading; `_MEMORY` does not limit these."""


def quiet_threads() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless the user has set OMP_WAIT_POLICY.

    Call this before FAISS or torch is imported. On two busy cores, a single search took 16 ms of
    CPU time with spinning threads and 0.7 ms with sleeping ones.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def installed_packages(names: tuple[str, ...]) -> list[str]:
    """Return the distributions in `names` that are installed."""
    present = []
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            version(name)
            present.append(name)
    return present


def require_module(module: str, family: tuple[str, ...]) -> Any:
    """Import and return a module that exactly one distribution of a family may provide.

    Raises:
        MissingDependency: no or more than one distribution of the family is installed, or the
            module cannot be imported.
    """
    present = installed_packages(family)
    if len(present) > 1:
        raise MissingDependency(
            f"{' and '.join(present)} are installed together, but overwrite each other's files."
            f" Keep one: pip uninstall -y {' '.join(present)} && pip install {present[-1]}"
        )
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as fault:
        if present:
            advice = f"Install it again: pip install --force-reinstall {present[0]}"
            if out_of_files(fault):
                advice = "Raise the limit on open files (ulimit -n)."
            raise MissingDependency(
                f"{present[0]} is installed but cannot be imported ({fault}). {advice}"
            ) from fault
        raise MissingDependency(
            f"{module} is not installed. Install it with: pip install 'embedding-retrieval[cpu]'"
            " (or 'embedding-retrieval[gpu]' with a CUDA device)"
        ) from None


def nvidia_smi(*options: str) -> str:
    """Return the output of `nvidia-smi`, or "" if it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *options], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode == 0:
        return done.stdout
    return ""


@functools.cache
def load_onnxruntime() -> Any:
    """Return the module `onnxruntime`.

    Raises:
        MissingDependency: it is not installed, or installed twice.
    """
    return require_module("onnxruntime", ONNXRUNTIME)


@functools.cache
def load_libraries(runtime: Any) -> str:
    """Load CUDA's libraries from their Python packages; return the messages about failures."""
    # Level 4 prints fatal errors only; others are raised as exceptions too.
    runtime.set_default_logger_severity(4)
    printed = io.StringIO()
    # ONNX Runtime prints missing libraries.
    with contextlib.redirect_stdout(printed):
        if preload := getattr(runtime, "preload_dlls", None):
            preload()
    return " ".join(printed.getvalue().split())


@functools.cache
def load_faiss() -> Any:
    """Return the module `faiss`.

    Raises:
        MissingDependency: it is not installed, or installed twice.
    """
    return require_module("faiss", FAISS)


Device = Literal["auto", "cpu", "cuda"]
DEVICES: tuple[str, ...] = get_args(Device)
_PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
_CUDA_OPTIONS = {
    # By default, cuDNN would search for the fastest algorithm for each new batch size.
    "cudnn_conv_algo_search": "HEURISTIC",
    "arena_extend_strategy": "kSameAsRequested",
}
FALLBACK = (
    "ONNX Runtime was built for a GPU but could not start on one, so the encoder runs on the CPU. "
    "`retrieval doctor` says what is missing; choose the device cpu if this is intended."
)


def checked_device(runtime: Any, device: Device) -> list[str]:
    """Return the devices to try: the requested one and, if that may fail, the CPU after it.

    Raises:
        BundleError: the device does not exist, or ONNX Runtime was not built for it.
    """
    if device not in DEVICES:
        raise BundleError(f"Device '{device}' is not known; it is 'auto', 'cpu' or 'cuda'.")
    has_cuda = _PROVIDERS["cuda"] in runtime.get_available_providers()
    if device == "cuda" and not has_cuda:
        raise BundleError(
            "This ONNX Runtime was built without CUDA. Install the one for GPUs: pip uninstall -y"
            " onnxruntime && pip install 'embedding-retrieval[gpu]'"
        )
    if has_cuda and device != "cpu":
        return ["cuda", "cpu"]
    return ["cpu"]


def start_session(
    runtime: Any, content: bytes, options: Any, devices: Sequence[str]
) -> tuple[Any, str]:
    """Load a graph on the first device on which it starts.

    Returns:
        ONNX Runtime's session and the device.

    Raises:
        Exception: an error of ONNX Runtime, of any class, if the last device fails too.
    """
    cpu: tuple[str, dict[str, str]] = (_PROVIDERS["cpu"], {})
    cuda = (_PROVIDERS["cuda"], _CUDA_OPTIONS)
    # ONNX Runtime's own fallback would print messages.
    start = functools.partial(runtime.InferenceSession, content, options, enable_fallback=0)
    if devices[0] == "cuda":
        load_libraries(runtime)
        with contextlib.suppress(Exception):
            session = start(providers=[cuda, cpu])
            return session, "cuda" if cuda[0] in session.get_providers() else "cpu"
    return start(providers=[cpu]), "cpu"


def session_options(runtime: Any, threads: int | None) -> Any:
    """Return ONNX Runtime's options: silent, without spinning, and with limited memory."""
    _limit_memory(runtime)
    options = runtime.SessionOptions()
    # Level 4 prints fatal errors only; others are raised as exceptions too.
    options.log_severity_level = 4
    entries = {
        "session.intra_op.allow_spinning": "0",
        "session.inter_op.allow_spinning": "0",
        "session.load_model_format": "ONNX",
        # This selects the allocator that `_limit_memory` registers.
        "session.use_env_allocators": "1",
        "optimization.constant_folding_max_output_size_in_bytes": str(_FOLDED_BYTES),
    }
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    # By default, ONNX Runtime starts a thread for each core, even those this process may not use.
    options.intra_op_num_threads = default_threads() if threads is None else threads
    return options


@functools.cache
def _limit_memory(runtime: Any) -> None:
    """Limit the memory of all sessions of this process together.

    A graph that needs more memory then fails, instead of ending the process.
    """
    info = runtime.OrtMemoryInfo(
        "Cpu", runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT
    )
    most = min(_MEMORY, available_memory() // 4 * 3)
    runtime.create_and_register_allocator(info, runtime.OrtArenaCfg({"max_mem": most}))


def installed_version() -> str:
    """Return this distribution's version; "0" in a source tree that was never installed."""
    try:
        return version(PROJECT)
    except PackageNotFoundError:
        return "0"
