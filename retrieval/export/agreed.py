"""A model's graphs, each made by the first exporter whose graph agrees with torch on real items."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from retrieval.errors import BundleError
from retrieval.export.verify import (
    Difference,
    Floats,
    check_order,
    check_repeatable,
    check_widths,
    compare_encoder,
    compare_rescorer,
    likely_cause,
    torch_outputs,
)
from retrieval.model.contracts import Combiner
from retrieval.model.graph import (
    Encoder,
    Exporter,
    FeatureEncoder,
    Rescorer,
    Signature,
    head_encoder,
    session,
    to_onnx,
)
from retrieval.model.model import Model


class Graphs:
    """One model's graphs, each compared with torch.

    Args:
        model: in evaluation mode, on the CPU.
        items: real raw inputs.
        tolerance: the largest difference that is allowed.
        opset: version of ONNX's operators.
        exporter: see `export_model`.
        step: is told what is done next.

    Attributes:
        combiner: the model's.
        items: raw inputs.
        outputs: torch's, for all items.
        worst: the largest difference of the graph that was made last.
    """

    def __init__(
        self,
        model: Model,
        items: NDArray[Any],
        tolerance: float,
        opset: int,
        exporter: Literal["auto"] | Exporter,
        step: Callable[[str], None],
    ) -> None:
        self._module = Encoder(model).eval()
        self.combiner = model.combiner
        self.items = items
        self._tolerance = tolerance
        self._opset = opset
        self._exporters: Sequence[Exporter] = (
            ("dynamo", "torchscript") if exporter == "auto" else (exporter,)
        )
        self._step = step
        self.outputs = torch_outputs(self._module, items)
        self.worst = Difference(0.0, "", 0, 0)

    def check(self) -> None:
        """Refuse a model that no graph could agree with, or whose vectors are not what its combiner
        says.

        Raises:
            BundleError: the model disagrees with itself, or with its combiner.
        """
        check_repeatable(self._module, self.items, self.outputs, self._tolerance)
        vector = self.outputs["vector"]
        combiner = self.combiner
        if combiner is not None:
            check_widths(combiner, self.outputs)
            if combiner.exact and combiner.merge == "min":
                codes = self._codes()
                check_order(combiner, codes, self.outputs.get("query", vector), vector)

    def encoder(self) -> bytes:
        """Return the encoder's graph."""
        return self._encoder(self._module, self.items, self.outputs, "encoder")

    def split(self) -> tuple[bytes, bytes, int]:
        """Return the encoder as two graphs, backbone and head, and the width of the features
        between them.

        The backbone's depends on nothing else of the model: whatever the head, it is the same to
        the byte.
        """
        model = self._module.model
        backbone, head = FeatureEncoder(model).eval(), head_encoder(model).eval()
        features = torch_outputs(backbone, self.items)
        first = self._encoder(backbone, self.items, features, "backbone")
        largest = self.worst
        second = self._encoder(head, features["features"], self.outputs, "head")
        largest = max(largest, self.worst, key=lambda difference: difference.value)
        run_backbone, run_head = session(first).run, session(second).run

        def run(names: list[str], feeds: dict[str, NDArray[Any]]) -> list[Any]:
            return list(run_head(names, {"input": run_backbone(["features"], feeds)[0]}))

        self.worst = compare_encoder(self.outputs, run, self.items)
        if self.worst.value > self._tolerance:
            raise BundleError(f"The encoder cannot be split. {self._disagreement('encoder')}")
        self.worst = max(largest, self.worst, key=lambda difference: difference.value)
        return first, second, features["features"].shape[1]

    def _encoder(
        self, module: Encoder, items: NDArray[Any], outputs: Mapping[str, Floats], what: str
    ) -> bytes:
        signature = Signature(
            inputs={"input": ("N", *items.shape[1:])},
            outputs={name: ("N", values.shape[1]) for name, values in outputs.items()},
        )
        example = torch.from_numpy(np.resize(items[:2], (2, *items.shape[1:])))

        def compare(graph: bytes) -> Difference:
            return compare_encoder(outputs, session(graph).run, items)

        return self._agreed(module, (example,), signature, what, compare)

    def rescorer(self, combiner: Combiner) -> tuple[bytes, Callable[[Floats, Floats], Floats]]:
        """Return the rescorer's graph, and a function that runs it."""
        codes = self.outputs["code"]
        module = Rescorer(combiner).eval()
        width = codes.shape[1]
        signature = Signature(
            inputs={"query": ("Q", width), "items": ("N", width)}, outputs={"distance": ("Q", "N")}
        )
        example = tuple(torch.from_numpy(np.resize(codes, (rows, width))) for rows in (3, 5))

        def compare(graph: bytes) -> Difference:
            return compare_rescorer(module, session(graph), codes)

        graph = self._agreed(module, example, signature, "rescorer", compare)
        opened = session(graph)

        def rescore(query: Floats, items: Floats) -> Floats:
            distances: Floats = opened.run(["distance"], {"query": query, "items": items})[0]
            return distances

        return graph, rescore

    def _codes(self) -> Floats:
        if "code" in self.outputs:
            return self.outputs["code"]
        parts = [
            self._module.model(
                torch.from_numpy(np.ascontiguousarray(self.items[start : start + 64]))
            )[1].float()
            for start in range(0, len(self.items), 64)
        ]
        return torch.cat(parts).numpy()

    def _agreed(
        self,
        module: torch.nn.Module,
        example: tuple[torch.Tensor, ...],
        signature: Signature,
        what: str,
        compare: Callable[[bytes], Difference],
    ) -> bytes:
        """Return the graph of the first exporter that agrees with torch; the first one's complaint
        when none does.
        """
        complaints: list[BundleError] = []
        self._step(f"exporting the {what} and comparing it with torch")
        for exporter in self._exporters:
            try:
                proto = to_onnx(module, example, signature, opset=self._opset, exporter=exporter)
                graph: bytes = proto.SerializeToString()
                self.worst = compare(graph)
            except BundleError as fault:
                complaints.append(fault)
                continue
            if self.worst.value <= self._tolerance:
                return graph
            complaints.append(BundleError(self._disagreement(what)))
        raise BundleError(f"The {what} cannot be exported. {complaints[0]}") from complaints[0]

    def _disagreement(self, what: str) -> str:
        worst = self.worst
        if what != "rescorer":
            where = f"in '{worst.output}' of item {worst.item}, in a batch of {worst.batch}"
            cause = likely_cause(self._module)
        else:
            where = f"in the distance to item {worst.item}, with {worst.batch} queries at once"
            cause = "compute_mat may depend on how many queries or items it is given."
        return (
            f"torch and ONNX Runtime disagree by {worst.value:.2g} {where}; the tolerance is"
            f" {self._tolerance:g}. {cause}"
        )
