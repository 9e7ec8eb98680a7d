"""Check the content of an ONNX file before it is loaded, without the package `onnx`."""

from __future__ import annotations

from collections.abc import Iterator

_NODES = 200_000
"""Largest number of nodes of a graph."""
_DOMAINS = {"", "ai.onnx", "ai.onnx.ml", "com.microsoft"}
"""Operator domains that ONNX Runtime implements itself."""
_FOREIGN = {"EPContext"}
"""Operators that may refer to a hardware vendor's file anywhere on the disk."""
_EXTERNAL = 1
"""Value of `data_location` for a tensor in another file."""


class GraphError(ValueError):
    """Raised for a refused graph. The message completes a sentence: "it has sparse weights"."""


def check_graph(content: bytes) -> None:
    """Refuse a graph in which a node may run more than once, or that needs another file.

    Each node of an accepted graph runs once, so loading and running the graph always finish. Memory
    is limited in `retrieval.base.runtime`. Field numbers are those of ONNX's `onnx.proto`.

    Raises:
        GraphError: the content is not ONNX, or the graph has too many nodes, loops, branches,
            functions, operators of another domain, or weights that are sparse or in another file.
    """
    try:
        with memoryview(content) as model:
            graphs = 0
            for field, value in _fields(model):  # graph 7, training_info 20, functions 25
                if field == 7 and isinstance(value, memoryview):
                    graphs += 1
                    _check(value)
                elif field in (20, 25):
                    raise GraphError("it has functions or training steps of its own")
    except (IndexError, UnicodeDecodeError, RecursionError):
        raise GraphError("it is not an ONNX file, or the file is incomplete") from None
    if graphs != 1:
        raise GraphError("it is not an ONNX file")


def _check(graph: memoryview) -> None:
    nodes = 0
    for field, value in _fields(graph):  # node 1, initializer 5, sparse_initializer 15
        if not isinstance(value, memoryview):
            continue
        if field == 1:
            nodes += 1
            if nodes > _NODES:
                raise GraphError(f"it has more than {_NODES:,} nodes")
            _check_node(value)
        elif field == 5:
            _check_tensor(value)
        elif field == 15:
            raise GraphError("it has sparse weights")


def _check_node(node: memoryview) -> None:
    operator = domain = ""
    for field, value in _fields(node):  # op_type 4, attribute 5, domain 7
        if not isinstance(value, memoryview):
            continue
        if field == 4:
            operator = str(value, "utf-8")
        elif field == 7:
            domain = str(value, "utf-8")
        elif field == 5:
            # g 6 and graphs 11, t 5 and tensors 10, sparse_tensor 22 and sparse_tensors 23
            for inner, content in _fields(value):
                if inner in (6, 11):
                    raise GraphError(
                        "it has loops or branches (a graph in a node), whose work has no bound"
                    )
                if inner in (5, 10) and isinstance(content, memoryview):
                    _check_tensor(content)
                elif inner in (22, 23):
                    raise GraphError("it has sparse weights")
    if domain not in _DOMAINS or operator in _FOREIGN:
        raise GraphError(f"it needs the operator {domain + '.' if domain else ''}{operator}"[:200])


def _check_tensor(tensor: memoryview) -> None:
    for field, value in _fields(tensor):  # external_data 13, data_location 14
        if field == 13 or (field == 14 and value == _EXTERNAL):
            raise GraphError("it keeps weights in another file, which a bundle does not allow")


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int | None]]:
    """Yield the number and the value of each field of a protobuf message.

    A value is an integer, a view of a string or message, or `None` for a field of fixed 32 or 64
    bits.

    Raises:
        IndexError: the message is truncated or invalid.
    """
    position = 0
    end = len(message)
    while position < end:
        key, position = _varint(message, position)
        # 0 is an integer, 2 a string or message, 1 and 5 are 64 and 32 bits. The others are groups,
        # which ONNX does not use.
        kind = key & 7
        if kind == 0:
            number, position = _varint(message, position)
            yield key >> 3, number
        elif kind == 2:
            length, position = _varint(message, position)
            if position + length > end:
                raise IndexError
            yield key >> 3, message[position : position + length]
            position += length
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
            yield key >> 3, None
        else:
            raise IndexError
    # A value of fixed length may have begun before the end and reach beyond it.
    if position > end:
        raise IndexError


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 127) << shift
        position += 1
        if byte < 128:
            return value, position
        shift += 7
        # An integer has 64 bits; a hostile file might go on for ever.
        if shift > 63:
            raise IndexError
