"""Refuse Python code that reads what a module's inputs decide, which a graph would freeze."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from retrieval.errors import BundleError

# Methods of tensors that hand out numbers without an operator that torch dispatches.
_COPIERS = frozenset(
    {"__array__", "__dlpack__", "__format__", "data_ptr", "numpy", "storage", "tolist"}
    | {"untyped_storage"}
)

# Functions of torch that turn a tensor's numbers into Python's, or into another library's.
_READERS = _COPIERS.union(
    ["__bool__", "__int__", "__index__", "__float__", "__complex__", "__contains__"],
    ["item", "is_nonzero", "equal", "allclose"],
)

# Operators whose result has a shape that depends on the numbers of their arguments.
_SHAPED_BY_NUMBERS = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::repeat_interleave",
}

ONE_BATCH = (
    "The model's Python code depends on how many items a batch has, but a graph must take batches"
    " of all sizes."
)


class DependsOnInputs(BundleError):
    """The Python code of a module depends on its inputs, and the message names the line."""


def refuse_reads(module: nn.Module, example: tuple[Tensor, ...]) -> None:
    """Run a module, and refuse code that reads numbers of its inputs, in any thread.

    The inputs are tensors of a subclass, as is all that torch computes from them. Parameters,
    buffers and constants are not, so code may read them.

    Raises:
        DependsOnInputs: the code reads numbers of the inputs.
    """
    lines: list[str] = []

    class Watched(Tensor):
        """A tensor that depends on the inputs; operators that give Python numbers are recorded."""

        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls,
            func: Any,
            types: Any,
            args: Any = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            if torch.Tag.data_dependent_output in func.tags:
                lines.append(_line())
            with torch._C._DisableTorchDispatch():
                outputs = func(*args, **(kwargs or {}))
            return tree_map_only(Tensor, watched, outputs)

        def __repr__(self) -> str:  # type: ignore[override]
            return repr(_plain(self))

    def watched(tensor: Tensor) -> Tensor:
        if isinstance(tensor, Watched):
            return tensor
        return Tensor._make_subclass(Watched, tensor)

    def recorded(name: str) -> Callable[..., Any]:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            lines.append(_line())
            return getattr(_plain(self), name)(*args, **kwargs)

        return method

    for name in _COPIERS:
        setattr(Watched, name, recorded(name))
    # The exporters report a module that fails.
    with contextlib.suppress(Exception):
        module(*map(watched, example))
    if lines:
        raise _numbers_are_read(lines[0])


def _plain(tensor: Tensor) -> Tensor:
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


class TracedReads(TorchFunctionMode):
    """Context in which torch traces a module, and which refuses code that depends on inputs.

    In a trace, sizes are tensors. Reads of parameters, buffers and constants are left out, and so
    are those of sizes that no batch changes.

    Args:
        inputs: number of the module's inputs.
        any_size: whether the graph must take batches of all sizes.

    Raises:
        DependsOnInputs: the code depends on the size of a batch, or of a result such as `nonzero`.
    """

    def __init__(self, inputs: int, any_size: bool) -> None:
        super().__init__()
        self.inputs = inputs
        self.any_size = any_size

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, unless it reads a tensor that depends on the inputs."""
        name = getattr(func, "__name__", "")
        # Exporters also call torch after they have traced the module.
        if torch._C._get_tracing_state() and (name in _READERS or name == "__len__"):
            for tensor in args:
                if isinstance(tensor, Tensor):
                    self._refuse(tensor, of_shape=name == "__len__")
        return func(*args, **(kwargs or {}))

    def _refuse(self, tensor: Tensor, of_shape: bool) -> None:
        value = torch._C._get_value_trace(tensor)  # type: ignore[attr-defined]
        numbers, batch = _origins(value, of_shape, self.inputs)
        if numbers:
            raise _numbers_are_read(_line())
        # torch's own code compares shapes and depends on none.
        if batch and self.any_size and not _is_of_torch(_callers()[-1]):
            raise DependsOnInputs(f"{ONE_BATCH} The code is in {_line()}")


def _numbers_are_read(line: str) -> DependsOnInputs:
    return DependsOnInputs(
        "The model's Python code reads numbers that depend on its input, so a graph would"
        " take the path of one example for all inputs. Compute with tensors instead, such"
        f" as torch.where(condition, a, b). The code is in {line}"
    )


def _callers() -> list[traceback.FrameSummary]:
    """Return the frames that led into this module, the innermost last."""
    return [frame for frame in traceback.extract_stack() if frame.filename != __file__]


def _line() -> str:
    """Return the innermost line of code that is not torch's."""
    frame = [frame for frame in _callers() if not _is_of_torch(frame)][-1]
    return f"{frame.filename}, line {frame.lineno}: `{frame.line}`"


def _is_of_torch(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(str(Path(torch.__file__).parent) + os.sep)


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
        elif kind in ("aten::size", "aten::numel", "aten::len"):
            stack += [(source, True) for source in sources[:1]]
        else:
            of_shape = of_shape and kind not in _SHAPED_BY_NUMBERS
            stack += [(source, of_shape and not _is_mask(source)) for source in sources]
    return numbers, batch


def _is_mask(value: Any) -> bool:
    """Return whether a value holds booleans, which select as many rows as are true."""
    kind = value.type()
    return bool(kind.kind() == "TensorType" and kind.dtype() == torch.bool)
