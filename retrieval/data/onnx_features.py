"""A frozen backbone in ONNX Runtime: on a CPU its features cost a fraction of what torch takes for
them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.errors import BundleError
from retrieval.model.contracts import Dataset
from retrieval.model.model import Model
from retrieval.serving.images import Preprocessing
from retrieval.serving.runtime import ONNXRUNTIME, installed_packages

LEAST = 1 << 24
"""Numbers that the images hold together, pixels times channels: with fewer, making the graph takes
longer than it saves.
"""

_AT_ONCE, _MOST = 1 << 17, 64
"""Numbers of the images that go through the graph at once, and how many images at most: what lies
between the nodes stays in the processor's cache.
"""

TRIED = 8
"""Items whose features are compared with torch's."""


def way_of(
    dataset: Dataset, preprocessing: Preprocessing | None, device: torch.device
) -> str | None:
    """Return which ONNX Runtime computes the features of a dataset; None where torch does.

    It is known without a look at the clock, so that the same recipe has the same features each
    time.
    """
    if preprocessing is None or device.type != "cpu":
        return None
    if len(dataset) * int(np.prod(preprocessing.shape)) < LEAST:
        return None
    runtimes = installed_packages(ONNXRUNTIME)
    if len(runtimes) != 1 or not installed_packages(("onnx",)):
        return None
    return f"onnxruntime {version(runtimes[0])}"


class OnnxBackbone:
    """A model's backbone as a graph for a fixed number of images, made when features are first
    asked for. Safe in threads.

    With a number that is fixed, sizes are constants to the exporter: of TensorFlow's padding
    nothing is left in the graph.

    Args:
        model: whose backbone; in evaluation mode on the CPU when it is called.
        samples: gives raw inputs, uint8 (N, channels, H, W), on which torch and ONNX Runtime are
            compared.
    """

    def __init__(self, model: Model, samples: Callable[[], NDArray[Any]]) -> None:
        assert model.preprocessing is not None
        self._model, self._samples = model, samples
        self._shape = model.preprocessing.shape
        self._lock = threading.Lock()
        self._session: Any = None
        self.rows = max(1, min(_MOST, _AT_ONCE // int(np.prod(self._shape))))

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return features (B, F), float32, of raw pixels (B, channels, H, W), uint8, B at most
        `rows`.

        Raises:
            BundleError: torch cannot export the backbone, the graph does not agree with it, or ONNX
                Runtime refuses.
        """
        with self._lock:
            if self._session is None:
                self._session = self._agreed()
        return torch.from_numpy(self._run(self._session, pixels.numpy()))

    def _run(self, session: Any, pixels: NDArray[Any]) -> NDArray[np.float32]:
        given = pixels
        if len(pixels) < self.rows:
            given = np.concatenate(
                [pixels, np.zeros((self.rows - len(pixels), *self._shape), pixels.dtype)]
            )
        try:
            (features,) = session.run(["features"], {"input": np.ascontiguousarray(given)})
        except Exception as fault:  # ONNX Runtime's errors share no public base class
            raise BundleError(f"ONNX Runtime refuses: {fault}") from fault
        found: NDArray[np.float32] = features[: len(pixels)]
        return found

    def _agreed(self) -> Any:
        """Return a session whose features are torch's, of items one by one and of items among
        others.
        """
        from retrieval.model.graph import (
            OPSET,
            TOLERANCE,
            FeatureEncoder,
            Signature,
            check_size,
            ready,
            session,
            to_onnx,
        )

        check_size(self._model)
        samples = self._samples()
        signature = Signature(
            {"input": (self.rows, *self._shape)},
            {"features": (self.rows, self._model.backbone.features)},
        )
        with ready(self._model):
            module = FeatureEncoder(self._model).eval()
            (wanted,) = module(torch.from_numpy(samples))
            example = torch.from_numpy(np.resize(samples, (self.rows, *self._shape)))
            # the older exporter: it takes a second where the other takes sixteen, and of fixed
            # sizes its graphs are as fast
            proto = to_onnx(module, (example,), signature, opset=OPSET, exporter="torchscript")
        opened = session(proto.SerializeToString(), threads=1)
        expected = wanted.numpy().astype(np.float64)
        scale = float(np.linalg.norm(expected, axis=1).mean()) or 1.0
        for size in {1, self.rows}:
            found = np.concatenate(
                [self._run(opened, samples[i : i + size]) for i in range(0, len(samples), size)]
            )
            if (
                found.shape != expected.shape
                or not np.abs(found - expected).max() <= TOLERANCE * scale
            ):
                raise BundleError("The graph of the backbone does not agree with torch.")
        return opened
