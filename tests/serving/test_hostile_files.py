"""FAISS files and ONNX graphs made by someone who means harm, and what the command says of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import faiss
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from retrieval.errors import StoreError
from retrieval.serving.index.backends import make_backend
from retrieval.serving.index.index_backend import IndexBackend

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def faiss_files(folder: Path, vectors: np.ndarray) -> dict[str, tuple[bytes, str]]:
    """FAISS files that are not what `ivf` of these vectors is, and what the refusal says."""
    width = vectors.shape[1]

    def lists(rows, quantiser, *, elsewhere=False, count=0):
        made = faiss.IndexIVFFlat(quantiser, rows.shape[1], 2, quantiser.metric_type)
        made.cp.min_points_per_centroid = 1
        made.train(rows)
        if elsewhere:
            kept = faiss.OnDiskInvertedLists(2, made.code_size, str(folder / "elsewhere.lists"))
            kept.verbose = False
            made.replace_invlists(kept)
        made.add(rows)
        made.ntotal = count or made.ntotal
        return faiss.serialize_index(made).tobytes()

    flat = faiss.IndexFlatL2(width)
    layer = faiss.serialize_index(faiss.IndexPreTransform(flat)).tobytes()
    inner = faiss.serialize_index(flat).tobytes()
    outer = layer[: -len(inner)]
    narrow = vectors[:, :8].copy()
    return {
        "lists in another file": (
            lists(vectors, faiss.IndexFlatL2(width), elsewhere=True),
            "cannot read it",
        ),
        "another width": (lists(narrow, faiss.IndexFlatL2(8)), "of 8 numbers instead of"),
        "another number": (lists(vectors[:10], faiss.IndexFlatL2(width)), "holds 10 vectors"),
        "another metric": (lists(vectors, faiss.IndexFlatIP(width)), "does not write"),
        "another kind": (inner, "is a IndexFlatL2, which"),
        "nested": (outer * 5 + inner, "IndexPreTransform"),
        "nested without end": (outer * 100_000 + inner, "cannot read it"),
        "a false number": (
            lists(vectors, faiss.IndexFlatL2(width), count=10**9),
            "do not hold its vectors|cannot read it",
        ),
        "another quantiser": (
            lists(vectors, faiss.IndexHNSWFlat(width, 4)),
            "contains a IndexHNSWFlat",
        ),
    }


@pytest.fixture
def vectors():
    return np.random.default_rng(0).normal(size=(20, 16)).astype(np.float32)


def loaded(backend: str, path: Path, vectors: np.ndarray) -> IndexBackend:
    made = make_backend(backend, {})
    made.load(path)
    made.check(*vectors.shape)
    return made


def test_faiss_files_that_are_not_the_index(vectors, tmp_path):
    for content, says in faiss_files(tmp_path, vectors).values():
        (tmp_path / "structure").write_bytes(content)
        with pytest.raises(StoreError, match=says):
            loaded("ivf", tmp_path / "structure", vectors)


SPOILED = """
import sys
from pathlib import Path
import numpy as np
from retrieval.errors import StoreError
from retrieval.serving.index.backends import make_backend
from retrieval.serving.index.index_backend import checked_search
path = Path(sys.argv[1])
vectors = np.random.default_rng(0).normal(size=(20, 16)).astype(np.float32)
for backend in ("flat", "hnsw", "ivf"):
    made = make_backend(backend, {})
    made.build(vectors, int)
    path.unlink(missing_ok=True)
    made.save(path)
    good, refused = path.read_bytes(), 0
    for place in range(4, len(good) - 4, max(1, len(good) // 150)):
        spoiled = bytearray(good)
        spoiled[place : place + 4] = bytes.fromhex("ffffff7f")
        path.write_bytes(spoiled)
        try:
            made = make_backend(backend, {})
            made.load(path)
            made.check(*vectors.shape)
            checked_search(made, backend, vectors[:3], 5, len(vectors))
        except StoreError:
            refused += 1
    print(refused)
"""


def ran(code: str, *words: object) -> str:
    """Return what a process of its own prints, which must end well."""
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_numbers_in_a_faiss_file_that_were_chosen_to_harm(tmp_path):
    refused = [int(line) for line in ran(SPOILED, tmp_path / "structure").split()]
    assert len(refused) == 3 and min(refused) > 0


def model(nodes: list, constants: dict, *, width: int = 16, domains: tuple[str, ...] = ()) -> bytes:
    given = helper.make_tensor_value_info("input", TensorProto.UINT8, ["N", 1, 8, 8])
    out = helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["N", width])
    held = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    made = helper.make_graph(nodes, "g", [given], [out], held)
    imports = [helper.make_opsetid(domain, 17 if not domain else 1) for domain in ("", *domains)]
    return helper.make_model(made, opset_imports=imports, ir_version=9).SerializeToString()


W = np.zeros((64, 16), np.float32)
FLAT = [
    helper.make_node("Cast", ["input"], ["f"], to=TensorProto.FLOAT),
    helper.make_node("Flatten", ["f"], ["x"]),
    helper.make_node("MatMul", ["x", "W"], ["v"]),
]


def ended(nodes: list) -> list:
    """Add something that was made of a huge value to the vector."""
    return [
        *FLAT,
        *nodes,
        helper.make_node("ReduceSum", ["big"], ["s"], keepdims=0),
        helper.make_node("Add", ["v", "s"], ["vector"]),
    ]


def graphs() -> dict[str, tuple[bytes, str]]:
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Identity", ["a"], ["a2"])],
        "body",
        [
            helper.make_tensor_value_info("n", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("a", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("c2", TensorProto.BOOL, []),
            helper.make_tensor_value_info("a2", TensorProto.FLOAT, None),
        ],
    )
    loop = helper.make_node("Loop", ["", "yes", "v"], ["vector"], body=body)
    outside = onnx.load_from_string(
        model([*FLAT, helper.make_node("Identity", ["v"], ["vector"])], {"W": W})
    )
    weight = outside.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "elsewhere.bin"), ("offset", "0"), ("length", str(W.nbytes))):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    doubling = [
        helper.make_node("Concat", ["x" if n == 0 else f"c{n - 1}"] * 2, [f"c{n}"], axis=0)
        for n in range(45)
    ]
    doubling.append(helper.make_node("Identity", ["c44"], ["big"]))
    side = 1 << 13
    heavy: list = [helper.make_node("Expand", ["one", "square"], ["m0"])]
    return {
        "a loop without an end": (
            model([*FLAT, loop], {"W": W, "yes": np.array(True)}),
            "loops or branches",
        ),
        "weights in another file": (outside.SerializeToString(), "weights in another file"),
        "an operator of someone's": (
            model(
                [*FLAT, helper.make_node("Evil", ["v"], ["vector"], domain="ai.evil")],
                {"W": W},
                domains=("ai.evil",),
            ),
            r"operator ai\.evil\.Evil",
        ),
        "a huge constant": (
            model(
                ended([helper.make_node("ConstantOfShape", ["n"], ["big"])]),
                {"W": W, "n": np.array([1 << 42])},
            ),
            "cannot (run|load)",
        ),
        "expanded without bound": (
            model(
                ended([helper.make_node("Expand", ["v", "n"], ["big"])]),
                {"W": W, "n": np.array([1 << 38, 1, 16])},
            ),
            "cannot (run|load)",
        ),
        "doubled without bound": (model(ended(doubling), {"W": W}), "cannot (run|load)"),
        "another type": (
            model(
                [
                    *FLAT,
                    helper.make_node("Cast", ["v"], ["vector"], to=TensorProto.FLOAT),
                    *heavy[:0],
                ],
                {"W": W[:, :3].copy()},
            ),
            "vector|cannot load",
        ),
        "cut off": (
            model([*FLAT, helper.make_node("Identity", ["v"], ["vector"])], {"W": W})[:-40],
            "not an ONNX file|cannot load",
        ),
        "no graph": (b"\x08\x07" * (side // 1024), "not an ONNX file"),
        "endless number": (b"\xff" * 100, "not an ONNX file"),
    }


OPENED = """
import json, os, sys
from retrieval.errors import BundleError
from retrieval.serving import sessions
from retrieval.serving.bundle import Bundle
sessions._MEMORY = 1 << 28
for folder in sys.argv[1:]:
    reader, writer = os.pipe()
    if not os.fork():  # each graph's memory is its own
        os.chdir(folder)  # where ONNX Runtime looks for the weights of a graph without a path
        try:
            Bundle.open(folder, threads=1)
        except BundleError as error:
            with open("/proc/self/status") as file:
                peak = int(file.read().split("VmHWM:")[1].split()[0]) // 1024
            os.write(writer, json.dumps([peak, str(error)]).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        print(file.read())
"""


def test_graphs_that_do_not_end_or_ask_for_too_much(makers, tmp_path):
    for number, (content, _) in enumerate(graphs().values()):
        bundle = makers.make_bundle(tmp_path / str(number))
        (bundle / "elsewhere.bin").write_bytes(W.tobytes())
        makers.put_graph(bundle, content)
    lines = ran(OPENED, *(tmp_path / str(number) for number in range(len(graphs())))).splitlines()
    for (name, (_, says)), line in zip(graphs().items(), lines, strict=True):
        most, sentence = json.loads(line or f'[0, "{name} was opened, or ended the process"]')
        assert re.search(says, sentence) and "\n" not in sentence, (name, sentence)
        assert most < 900, name


@pytest.mark.parametrize("name", ["fifo", "device", "loop", "deep"])
def test_the_command_says_one_sentence_and_leaves_with_2(name, makers, cli, tmp_path, photos):
    bundle = makers.make_bundle(tmp_path / "b")
    if name == "loop":
        makers.put_graph(bundle, graphs()["a loop without an end"][0])
    elif name == "deep":
        (bundle / "manifest.json").write_text("[" * 1_000_000)
    else:
        (bundle / "encoder.onnx").unlink()
        if name == "fifo":
            os.mkfifo(bundle / "encoder.onnx")
        else:
            (bundle / "encoder.onnx").symlink_to("/dev/zero")
    run = cli("index", "create", tmp_path / "i", photos / "1", "--bundle", bundle)
    assert (run.code, run.out) == (2, "") and run.err.count("\n") == 1, run.err
    assert "Traceback" not in run.err and not (tmp_path / "i").exists()
