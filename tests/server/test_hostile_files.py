"""Hostile FAISS files and ONNX graphs end in a sentence."""

import itertools
import json
import os
import re
from pathlib import Path

import faiss
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from retrieval.errors import StoreError
from retrieval.store.backends import make_backend


def faiss_files(folder: Path, vectors: np.ndarray) -> list[tuple[bytes, str]]:
    """Return FAISS files that `ivf` cannot have written for these vectors, and their errors."""
    width = vectors.shape[1]
    flat, other = faiss.IndexFlatL2(width), vectors[:, :8].copy()

    def lists(rows, quantiser, *, elsewhere=False, count=0) -> bytes:
        index = faiss.IndexIVFFlat(quantiser, rows.shape[1], 2, quantiser.metric_type)
        index.cp.min_points_per_centroid = 1
        index.train(rows)
        if elsewhere:
            disk = faiss.OnDiskInvertedLists(2, index.code_size, str(folder / "elsewhere.lists"))
            disk.verbose = False
            index.replace_invlists(disk)
        index.add(rows)
        index.ntotal = count or index.ntotal
        return faiss.serialize_index(index).tobytes()

    inner = faiss.serialize_index(flat).tobytes()
    outer = faiss.serialize_index(faiss.IndexPreTransform(flat)).tobytes()[: -len(inner)]
    another, false_count = faiss.IndexHNSWFlat(width, 4), "1,000,000,000 vectors|cannot read it"
    return [
        (lists(vectors, faiss.IndexFlatL2(width), elsewhere=True), "cannot read it"),
        (lists(other, faiss.IndexFlatL2(8)), "of 8 numbers instead of"),
        (lists(vectors[:10], faiss.IndexFlatL2(width)), "holds 10 vectors"),
        (lists(vectors, faiss.IndexFlatIP(width)), "does not write"),
        (inner, "is a IndexFlatL2, which"),
        (outer * 5 + inner, "IndexPreTransform"),
        (outer * 100_000 + inner, "cannot read it"),
        (lists(vectors, faiss.IndexFlatL2(width), count=10**9), false_count),
        (lists(vectors[:10], faiss.IndexFlatL2(width), count=20), "do not hold its vectors"),
        (lists(vectors, another), "contains a IndexHNSWFlat"),
    ]


def test_other_faiss_files_are_refused(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(20, 16)).astype(np.float32)
    for content, says in faiss_files(tmp_path, vectors):
        (tmp_path / "structure").write_bytes(content)
        with pytest.raises(StoreError, match=says):
            make_backend("ivf", {}).load(tmp_path / "structure", vectors)


SPOILED = """
import sys
from pathlib import Path
import numpy as np
from retrieval.errors import StoreError
from retrieval.store.backends import make_backend
from retrieval.store.index_backend import checked_search
path = Path(sys.argv[1])
vectors = np.random.default_rng(0).normal(size=(20, 16)).astype(np.float32)
for backend in ("flat", "hnsw", "ivf"):
    index = make_backend(backend, {})
    index.build(vectors, int)
    path.unlink(missing_ok=True)
    index.save(path)
    sound, refused = path.read_bytes(), 0
    for place in range(4, len(sound) - 4, max(1, len(sound) // 150)):
        spoiled = bytearray(sound)
        spoiled[place : place + 4] = bytes.fromhex("ffffff7f")
        path.write_bytes(spoiled)
        try:
            index = make_backend(backend, {})
            index.load(path, vectors)
            checked_search(index, backend, vectors[:3], 5, len(vectors))
        except StoreError:
            refused += 1
    print(refused)
"""


@pytest.fixture
def output_of(process):
    """Run code in a process that must succeed, and return its output."""

    def run(code: str, *words: object) -> str:
        done = process("-c", code, *words, seconds=200, OMP_NUM_THREADS="1")
        assert done.code == 0, done.err[-2000:]
        return done.out

    return run


def test_huge_numbers_in_a_faiss_file_do_no_harm(output_of, tmp_path):
    refused = [int(line) for line in output_of(SPOILED, tmp_path / "structure").split()]
    assert len(refused) == 3 and min(refused) > 0


def model(nodes: list, domains: tuple[str, ...] = (), **constants: np.ndarray) -> bytes:
    image = tensor("input", TensorProto.UINT8, ["N", 1, 8, 8])
    out = tensor("vector", TensorProto.FLOAT, ["N", 16])
    constants = {"W": W, **constants}
    weights = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph([*FLAT, *nodes], "g", [image], [out], weights)
    imports = [helper.make_opsetid(domain, 17 if not domain else 1) for domain in ("", *domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString()


W = np.zeros((64, 16), np.float32)
node, tensor = helper.make_node, helper.make_tensor_value_info
FLAT = [
    node("Cast", ["input"], ["f"], to=TensorProto.FLOAT),
    node("Flatten", ["f"], ["x"]),
    node("MatMul", ["x", "W"], ["v"]),
]


def added(*nodes) -> list:
    """Return the nodes and two more, which add the sum of the tensor `big` to the vector."""
    total = node("ReduceSum", ["big"], ["s"], keepdims=0)
    return [*nodes, total, node("Add", ["v", "s"], ["vector"])]


def graphs() -> dict[str, tuple[bytes, str]]:
    body = helper.make_graph(
        [node("Identity", ["c"], ["c2"]), node("Identity", ["a"], ["a2"])],
        "body",
        [
            tensor("n", TensorProto.INT64, []),
            tensor("c", TensorProto.BOOL, []),
            tensor("a", TensorProto.FLOAT, None),
        ],
        [tensor("c2", TensorProto.BOOL, []), tensor("a2", TensorProto.FLOAT, None)],
    )
    loop = node("Loop", ["", "yes", "v"], ["vector"], body=body)
    plain = model([node("Identity", ["v"], ["vector"])])
    outside = onnx.load_from_string(plain)
    weight = outside.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "elsewhere.bin"), ("offset", "0"), ("length", str(W.nbytes))):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    names = ["x", *(f"c{n}" for n in range(45))]
    doubling = [node("Concat", [a] * 2, [b], axis=0) for a, b in itertools.pairwise(names)]
    doubling.append(node("Identity", ["c44"], ["big"]))
    huge, wide = np.array([1 << 42]), np.array([1 << 38, 1, 16])
    cast = node("Cast", ["v"], ["vector"], to=TensorProto.FLOAT)
    evil = node("Evil", ["v"], ["vector"], domain="ai.evil")
    runs = "cannot (run|load)"
    return {
        "a loop without an end": (model([loop], yes=np.array(True)), "loops or branches"),
        "weights in another file": (outside.SerializeToString(), "weights in another file"),
        "an operator of someone's": (model([evil], ("ai.evil",)), r"operator ai\.evil\.Evil"),
        "a huge constant": (model(added(node("ConstantOfShape", ["n"], ["big"])), n=huge), runs),
        "expanded without bound": (model(added(node("Expand", ["v", "n"], ["big"])), n=wide), runs),
        "doubled without bound": (model(added(*doubling)), runs),
        "another type": (model([cast], W=W[:, :3].copy()), "vector|cannot load"),
        "cut off": (plain[:-40], "not an ONNX file|cannot load"),
        "no graph": (b"\x08\x07" * 8, "not an ONNX file"),
        "endless number": (b"\xff" * 100, "not an ONNX file"),
    }


OPENED = """
import json, os, sys
from retrieval.errors import BundleError
from retrieval.base import runtime
from retrieval.bundle.bundle import Bundle
runtime._MEMORY = 1 << 28
for folder in sys.argv[1:]:
    reader, writer = os.pipe()
    if not os.fork():  # measures the memory of each graph alone
        os.chdir(folder)  # ONNX Runtime looks here for the weights of a graph without a path
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


def test_hostile_graphs_are_refused_within_little_memory(output_of, makers, tmp_path):
    cases = graphs()
    for number, (content, _) in enumerate(cases.values()):
        bundle = makers.make_bundle(tmp_path / str(number))
        (bundle / "elsewhere.bin").write_bytes(W.tobytes())
        makers.put_graph(bundle, content)
    lines = output_of(
        OPENED, *(tmp_path / str(number) for number in range(len(cases)))
    ).splitlines()
    for (name, (_, says)), line in zip(cases.items(), lines, strict=True):
        most, sentence = json.loads(line or f'[0, "{name} was opened, or ended the process"]')
        assert re.search(says, sentence) and "\n" not in sentence, (name, sentence)
        assert most < 900, name


@pytest.mark.parametrize("name", ["fifo", "device", "loop", "deep"])
def test_the_command_prints_one_sentence_and_exits_with_2(name, makers, cli, tmp_path, photos):
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
