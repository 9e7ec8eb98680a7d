"""On which device ONNX Runtime runs a graph: CUDA or TensorRT where they start, otherwise the CPU,
and then it says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from retrieval.errors import BundleError
from retrieval.host.files import cache_folder
from retrieval.serving.runtime import load_libraries

Device = Literal["auto", "cpu", "cuda", "tensorrt"]
DEVICES: tuple[str, ...] = get_args(Device)

ROWS = 64
"""Rows that TensorRT takes at once: its engine is built for so many."""
_LIKELY = 8
_NAMES = {
    "tensorrt": "TensorrtExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "cpu": "CPUExecutionProvider",
}
FALLBACK = (
    "ONNX Runtime was built for a GPU and could not start there, so the encoder runs on the CPU. "
    "`retrieval doctor` says what is missing; --device cpu says that it is meant."
)


def checked_device(runtime: Any, device: Device) -> list[str]:
    """Return the devices to try, the wanted one first; each stands in for what it cannot run by the
    next.

    Args:
        runtime: the module `onnxruntime`.
        device: "auto" is CUDA where ONNX Runtime was built for it. TensorRT is asked for by name:
            it takes minutes to build an engine.

    Raises:
        BundleError: there is no such device, or ONNX Runtime was not built for it.
    """
    if device not in DEVICES:
        raise BundleError(
            f"Device '{device}' is not known; it is {', '.join(map(repr, DEVICES[:-1]))} or"
            f" '{DEVICES[-1]}'."
        )
    offered = runtime.get_available_providers()
    if device not in ("auto", "cpu") and _NAMES[device] not in offered:
        raise BundleError(
            f"This ONNX Runtime has no {'CUDA' if device == 'cuda' else 'TensorRT'}. Install the"
            " other one: pip uninstall -y onnxruntime && pip install 'embedding-retrieval[gpu]'"
        )
    chain = {"cpu": ["cpu"], "tensorrt": ["tensorrt", "cuda", "cpu"]}.get(device, ["cuda", "cpu"])
    return [name for name in chain if _NAMES[name] in offered]


def start(
    runtime: Any,
    content: bytes,
    options: Any,
    devices: Sequence[str],
    shapes: Mapping[str, Sequence[int]],
) -> tuple[Any, str]:
    """Load a graph on the first of these devices that it starts on; return ONNX Runtime's session
    and the device.

    Args:
        runtime: the module `onnxruntime`.
        content: the graph.
        options: ONNX Runtime's, of the session.
        devices: from `checked_device`.
        shapes: of one row of each input, for TensorRT's engine.

    Raises:
        Exception: ONNX Runtime's own, of several kinds: it cannot load the graph on the last of
            them either.
    """
    if devices[0] != "cpu":
        load_libraries(runtime, tensorrt=devices[0] == "tensorrt")
    for number, device in enumerate(devices):
        chain = devices[number:]
        providers = [(_NAMES[name], _options(name, shapes)) for name in chain]
        try:
            # without its own way of falling back, which prints
            session = runtime.InferenceSession(
                content, options, providers=providers, enable_fallback=0
            )
        except Exception:
            if device == devices[-1]:
                raise
            continue
        running = session.get_providers()
        for name in chain:
            if _NAMES[name] in running:
                return session, name
    raise RuntimeError("ONNX Runtime starts on none of its devices")


def refuse_other(device: Device, used: str) -> None:
    """Refuse a device that was asked for by name and does not start.

    Raises:
        BundleError: another one is used.
    """
    if device not in ("auto", used):
        what = "CUDA device" if device == "cuda" else "device with TensorRT"
        raise BundleError(
            f"ONNX Runtime could not start on the {what}. Use the CPU, or let `retrieval doctor`"
            " say what is missing."
        )


def _options(device: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return a provider's options: batches are of any size up to some, and each size must not be
    tuned for anew.
    """
    if device == "cuda":
        return {"cudnn_conv_algo_search": "HEURISTIC", "arena_extend_strategy": "kSameAsRequested"}
    if device != "tensorrt":
        return {}
    kept = str(cache_folder() / "tensorrt")

    def profile(rows: int) -> str:
        return ",".join(
            f"{name}:{'x'.join(map(str, (rows, *shape)))}" for name, shape in shapes.items()
        )

    return {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": kept,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": kept,
        "trt_profile_min_shapes": profile(1),
        "trt_profile_opt_shapes": profile(_LIKELY),
        "trt_profile_max_shapes": profile(ROWS),
    }
