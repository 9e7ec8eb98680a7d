"""Python code that reads its inputs is refused, with its line; other code is exported."""

from __future__ import annotations

import ctypes
import random
import threading

import numpy as np
import pytest
import torch
from retrieval.bundle.bundle import Bundle
from retrieval.errors import BundleError
from retrieval.export import agreement
from retrieval.model.graph import Signature, to_onnx
from retrieval.model.model import Model
from torch import nn


def in_steps(x):
    for _ in range(int(x.sum().relu())):
        x = x / 2
    return x


def in_a_match(x):
    match x.max().item() > 1e4:
        case True:
            return -x
    return x


def without_torch_function(x):
    with torch._C.DisableTorchFunction():
        return -x if x.max() > 1e4 else x


def in_another_thread(x):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(x.max().item() > 1e4))
    thread.start()
    thread.join()
    return -x if answers[0] else x


def by_pointer(x):
    numbers = ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))
    return -x if numbers[0] > 1e4 else x


def by_pointer_without_torch_function(x):
    with torch._C.DisableTorchFunction():
        return by_pointer(x)


def by_numpy_on_a_pointer(x):
    pointer = ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))
    return -x if np.ctypeslib.as_array(pointer, x.shape).max() > 1e4 else x


def in_vain(x):
    try:
        return -x if x.max() > 1e4 else x
    except Exception:
        return x


READS = {
    "max_is_true": lambda x: -x if (x.max().item() > 1e4) is True else x,
    "match": in_a_match,
    "max_without_torch_function": without_torch_function,
    "thread": in_another_thread,
    "data_ptr": by_pointer,
    "data_ptr_without_torch_function": by_pointer_without_torch_function,
    "data_ptr_numpy": by_numpy_on_a_pointer,
    "max_in_vain": in_vain,
    "float_outside_a_trace": lambda x: (
        -x if not torch.jit.is_tracing() and float(x.mean()) > 1e4 else x
    ),
    "max": lambda x: -x if x.max() > 1e4 else x,
    "bool": lambda x: -x if bool((x > 1e4).any()) else x,
    "item": lambda x: -x if x.mean().item() > 1e4 else x,
    "data": lambda x: -x if x.data.max() > 1e4 else x,
    "text": lambda x: -x if float(f"{x.max()}") > 1e4 else x,
    "format": lambda x: -x if float(format(x.max(), ".2f")) > 1e4 else x,
    "float": lambda x: -x if float(x.std()) > 1e4 else x,
    "tolist": lambda x: -x if max(x[:, 0].tolist()) > 1e4 else x,
    "loop": lambda x: in_steps(x - 1e4),
    "numpy": lambda x: -x if np.asarray(x.detach()).mean() > 1e4 else x,
    "dlpack": lambda x: -x if np.from_dlpack(x.detach()).mean() > 1e4 else x,
    "greatest": lambda x: -x if max(x.flatten()) > 1e4 else x,
    "nonzero": lambda x: -x if len(torch.nonzero(x > 1e4)) > 3 else x,
    "mask": lambda x: -x if x[x > 1e4].numel() > 3 else x,
    "unique": lambda x: -x if torch.unique(x).shape[0] < 3 else x,
    "equal": lambda x: -x if torch.equal(x, x.clamp(max=-1e4)) else x,
    "allclose": lambda x: -x if torch.allclose(x, x.clamp(max=-1e4)) else x,
    "contains": lambda x: -x if 1e4 in x else x,
}


class Code(nn.Module):
    """A function as a module, with a buffer and a counter."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.calls = 0
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("name", READS)
def test_code_that_reads_numbers_is_refused_with_its_line(parts, vectors, refused, name):
    lines = r"test_code_that_depends_on_inputs\.py, line \d+: `.*"
    word = {"text": "float", "loop": "relu", "greatest": r"max\(x"}.get(name, name.split("_")[0])
    if name.startswith("data_ptr"):
        word = r".*x\.data_ptr"
    if name == "mask":
        word = "numel"
    says = f"reads numbers that depend on its input.*{lines}{word}"
    refused(Model(parts.Vectors(), Code(READS[name])), vectors[0][:40], says)


def test_the_line_is_named_if_no_exporter_works(parts, vectors, refused, monkeypatch):
    monkeypatch.setattr(agreement, "EXPORTERS", ("dynamo", "torchscript"))
    head = Code(lambda x: -x if x.max() > 1e4 else x)
    says = r"reads numbers .* line \d+: `head = Code\(lambda x: -x if x\.max"
    refused(Model(parts.Vectors(), head), vectors[0][:40], says)


def test_a_combiner_that_branches_is_refused(parts, vectors, refused):
    class Branching(parts.Sum):
        def compute_mat(self, query_emb, ref_emb):
            distances = super().compute_mat(query_emb, ref_emb)
            return -distances if distances.max() > 1e4 else distances

    combiner = Branching()
    model = Model(parts.Vectors(), combiner.build_head(64), combiner)
    refused(model, vectors[0][:40], r"The rescorer cannot be exported\..*distances\.max\(\) > 1e4")


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_branch_on_a_batch_larger_than_all_that_are_tried(exporter):
    module = Code(lambda x: -x if x.shape[0] > 10_000 else x)
    signature = Signature({"input": ("N", 8)}, {"vector": ("N", 8)})
    with pytest.raises(Exception, match="depends on how many items a batch has"):
        to_onnx(module, (torch.zeros(2, 8),), signature, exporter=exporter)


def test_a_graph_of_one_size_may_depend_on_that_size():
    module = Code(lambda x: -x if x.shape[0] > 10_000 else x)
    signature = Signature({"input": (2, 8)}, {"vector": (2, 8)})
    graph = to_onnx(module, (torch.zeros(2, 8),), signature, exporter="torchscript")
    assert [size.dim_value for size in graph.graph.input[0].type.tensor_type.shape.dim] == [2, 8]


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", READS)
def test_each_exporter_refuses_code_that_reads_numbers(exporter, name):
    signature = Signature({"input": ("N", 8)}, {"vector": ("N", 8)})
    says = "reads numbers that depend on its input"
    if exporter == "dynamo" and name in ("nonzero", "mask", "unique"):
        says = "data-dependent"
    with pytest.raises(BundleError, match=says):
        to_onnx(Code(READS[name]), (torch.zeros(2, 8),), signature, exporter=exporter)


def constant(module):
    module.function = lambda x: x * (2.0 if module.scale.item() > 1 else 1.0)


def fixed_size(module):
    module.function = lambda x: x if x.shape[1] == 64 else x[:, :64]


def printed(module):
    def printing(x):
        print(x[:1, :2])
        return 2 * x

    module.function = printing


def tensors(module):
    module.function = lambda x: torch.where(x.mean(1, keepdim=True) > 1e4, -x, x)


@pytest.mark.parametrize("define", [constant, fixed_size, printed, tensors])
def test_code_that_reads_weights_and_widths_is_exported(parts, vectors, exported, tmp_path, define):
    head = Code(None)
    define(head)
    model = Model(parts.Vectors(), head)
    exported(model, vectors[0][:40])
    bundle = Bundle.open(tmp_path / "b", threads=1)
    large = 2e5 * np.abs(vectors[0][:3])
    expected = model(torch.from_numpy(large))[1].detach().numpy()
    assert np.array_equal(bundle.encode(large).vector, expected)


def test_a_branch_that_no_trace_shows_is_found_by_inputs_unlike_the_items(parts, digits, refused):
    class Hidden(nn.Module):
        def forward(self, x):
            if type(x) is torch.Tensor and not torch.jit.is_tracing():
                return -x if float(x.mean()) > 2 else x
            return x

    class Bright(parts.Net):
        def forward(self, x):
            return super().forward(Hidden()(x))

    model = Model(Bright(), nn.Linear(96, 8))
    says = r"agree on real items, but disagree by .* of item \d+ of inputs made to be unlike them"
    refused(model, digits[0][:40] // 2, says)


def counts(module):
    module.calls += 1


def averages(module):
    module.scale += 1


def draws(_module):
    random.random()


def draws_with_numpy(_module):
    np.random.random()


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (counts, "changes 'model.head.calls' on each call"),
        (averages, "changes the tensor 'model.head.scale' on each call"),
        (draws, "changes Python's random numbers on each call"),
        (draws_with_numpy, "changes NumPy's random numbers on each call"),
        (lambda _module: torch.rand(1), "changes torch's random numbers on each call"),
    ],
)
def test_state_that_a_call_changes_is_refused(parts, vectors, refused, act, says):
    """Even though none of these calls changes a vector yet."""
    head = Code(None)

    def forward(x):
        act(head)
        return x

    head.function = forward
    refused(Model(parts.Vectors(), head), vectors[0][:40], says)
