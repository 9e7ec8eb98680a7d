"""DAMML's weighted distance from the weights of a state dict, by plain loops in float64."""

import math
from typing import Any

State = dict[str, Any]
Vector = list[float]


def affine(weight: Any, bias: Any, x: Vector) -> Vector:
    return [
        sum(w * v for w, v in zip(row, x, strict=True)) + b
        for row, b in zip(weight, bias, strict=True)
    ]


def local_distances(e: Vector, f: Vector, metrics: int) -> Vector:
    """Return the distances of two items' K parts, each at unit length."""
    size, apart = len(e) // metrics, []
    for k in range(metrics):
        parts = (v[k * size : (k + 1) * size] for v in (e, f))
        apart.append(math.dist(*([c / math.hypot(*v) for c in v] for v in parts)))
    return apart


def gamma(state: State, x: Vector, y: Vector) -> Vector:
    """Return the weights Γ from two items' features: the network's two outputs averaged."""
    flows, bias = state["combiner.flows.weight"], state["combiner.flows.bias"]
    hidden_size, runs = len(bias) // 2, []
    for first, second in ((x, y), (y, x)):
        a = affine(flows, bias, first)[:hidden_size]
        b = affine(flows, bias, second)[hidden_size:]
        hidden = [max(0.0, p + q) for p, q in zip(a, b, strict=True)]
        runs.append(affine(state["combiner.out.weight"], state["combiner.out.bias"], hidden))
    logits = [(p + q) / 2 for p, q in zip(*runs, strict=True)]
    exponentials = [math.exp(value - max(logits)) for value in logits]
    return [value / sum(exponentials) for value in exponentials]


def distance(state: State, x: Vector, y: Vector, metrics: int) -> float:
    """Return D of two items' features."""
    head = state["head.embedding.0.weight"], state["head.embedding.0.bias"]
    local = local_distances(affine(*head, x), affine(*head, y), metrics)
    return sum(g * d for g, d in zip(gamma(state, x, y), local, strict=True))
