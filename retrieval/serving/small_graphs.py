"""ONNX graphs of a few nodes, written without the package `onnx`, which a server does not have."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

FLOAT, INT64, FLOAT16, BFLOAT16 = 1, 7, 10, 16
"""ONNX's types of elements."""
_IR, _OPSET = 8, 18
_VARINT, _BYTES, _FIXED32 = 0, 2, 5


@dataclass(frozen=True)
class Node:
    """One operator of ONNX's own, with what it takes and gives, by name."""

    operator: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, int | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Value:
    """An input or output of a graph; sizes have names, since they differ from call to call."""

    name: str
    kind: int
    sizes: Sequence[str]


def small_graph(nodes: Iterable[Node], inputs: Iterable[Value], outputs: Iterable[Value]) -> bytes:
    """Return an ONNX file. The field numbers are those of ONNX's `onnx.proto`."""
    graph = b"".join(_field(1, _node(node)) for node in nodes) + _field(2, b"graph")
    graph += b"".join(_field(11, _value(one)) for one in inputs)
    graph += b"".join(_field(12, _value(one)) for one in outputs)
    return _number(1, _IR) + _field(7, graph) + _field(8, _field(1, b"") + _number(2, _OPSET))


def _node(node: Node) -> bytes:
    names = [_field(1, name.encode()) for name in node.inputs]
    names += [_field(2, name.encode()) for name in node.outputs]
    attributes = [_field(5, _attribute(*item)) for item in node.attributes.items()]
    return b"".join([*names, _field(4, node.operator.encode()), *attributes])


def _attribute(name: str, value: int | float) -> bytes:
    if isinstance(value, int):
        return _field(1, name.encode()) + _number(3, value) + _number(20, 2)
    return _field(1, name.encode()) + _varint(2 << 3 | _FIXED32) + struct.pack("<f", value) + _number(20, 1)


def _value(value: Value) -> bytes:
    shape = b"".join(_field(1, _field(2, size.encode())) for size in value.sizes)
    return _field(1, value.name.encode()) + _field(2, _field(1, _number(1, value.kind) + _field(2, shape)))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
