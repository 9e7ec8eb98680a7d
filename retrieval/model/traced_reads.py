"""Find Python code that reads numbers of a module's inputs, which a traced graph would freeze."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_READERS = frozenset(
    (
        *("__bool__", "__int__", "__index__", "__float__", "__complex__", "__contains__"),
        *("__array__", "__dlpack__", "numpy", "item", "tolist", "untyped_storage"),
        *("is_nonzero", "equal", "allclose", "__format__"),
    )
)
"""Functions of torch that turn a tensor's numbers into Python's, or into another library's."""

_OF_SHAPE = frozenset(
    f"aten::{name}"
    for name in (
        *("size", "numel", "len", "zeros_like", "ones_like", "empty_like", "full_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full"),
    )
)
"""Operators whose result depends on the shape of their first argument, not on its numbers."""

_SHAPED_BY_NUMBERS = frozenset(
    f"aten::{name}"
    for name in (
        *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"),
        *("bincount", "repeat_interleave"),
    )
)
"""Operators whose result has a shape that depends on the numbers of their arguments."""


class TracedReads(TorchFunctionMode):
    """Context in which torch traces a module: records code that reads what the inputs decide.

    Reads of parameters, buffers and constants are left out, and so are those of sizes that no batch
    changes.

    Args:
        inputs: number of the module's inputs.

    Attributes:
        numbers: the first line that reads numbers of the inputs, or "".
        batch: the first line that reads the number of inputs, or "".
    """

    numbers = ""
    batch = ""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.inputs = inputs

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`, and record its line if it reads a tensor."""
        name = getattr(func, "__name__", "")
        # A trace does not follow `x.data`, and computes `x.detach()` in the same way.
        if name == "__get__" and func.__self__ is Tensor.data:
            return args[0].detach()
        # Exporters also call torch after they have traced the module.
        if torch._C._get_tracing_state() and (name in _READERS or name == "__len__"):
            for tensor in args:
                if isinstance(tensor, Tensor):
                    self._record(tensor, of_shape=name == "__len__")
        return func(*args, **(kwargs or {}))

    def _record(self, tensor: Tensor, of_shape: bool) -> None:
        value = torch._C._get_value_trace(tensor)  # type: ignore[attr-defined]
        numbers, batch = _origins(value, of_shape, self.inputs)
        if not (numbers or batch):
            return
        frames = traceback.extract_stack()[:-2]
        libraries = str(Path(torch.__file__).parent) + os.sep
        outside = [frame for frame in frames if not frame.filename.startswith(libraries)]
        line = f"{outside[-1].filename}, line {outside[-1].lineno}: `{outside[-1].line}`"
        if numbers:
            self.numbers = self.numbers or line
        elif outside[-1] is frames[-1]:  # torch's own code compares shapes and depends on none
            self.batch = self.batch or line


def _origins(value: Any, of_shape: bool, inputs: int) -> tuple[bool, bool]:
    """Return whether a value in a trace depends on the inputs' numbers, and on how many they are.

    Args:
        value: a value of the trace.
        of_shape: whether only the value's shape is read.
        inputs: number of the trace's first parameters that are inputs; the others are weights.
    """
    numbers = batch = False
    seen = set()
    stack = [(value, of_shape)]
    while stack:
        value, of_shape = stack.pop()
        key = (value.debugName(), of_shape)
        if key in seen:
            continue
        seen.add(key)
        node = value.node()
        kind = node.kind()
        sources = list(node.inputs())
        if kind == "prim::Param":
            names = [parameter.debugName() for parameter in node.outputs()]
            if value.debugName() in names[:inputs]:
                numbers |= not of_shape
                batch |= of_shape
        elif kind == "aten::size" and len(sources) > 1 and sources[1].toIValue() != 0:
            pass  # an image's size or a width, which no batch changes
        elif kind in _OF_SHAPE:
            stack += [(source, True) for source in sources[:1]]
        else:
            of_shape = of_shape and kind not in _SHAPED_BY_NUMBERS
            stack += [(source, of_shape and not _is_mask(source)) for source in sources]
    return numbers, batch


def _is_mask(value: Any) -> bool:
    """Return whether a value holds booleans, which select as many rows as are true."""
    kind = value.type()
    return bool(kind.kind() == "TensorType" and kind.dtype() == torch.bool)
