"""Real small bundles and images, made when a test asks for them: no fixture file, no network."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.manifest import (
    FILE,
    Cosine,
    DistanceEntry,
    Input,
    Manifest,
    RescorerEntry,
    SplitEntry,
    SubspaceEntry,
    TextEntry,
    Variant,
    Verified,
    checksum_of,
    parse_manifest,
    write_manifest,
)
from retrieval.bundle.probe import text_probe_of
from retrieval.images.preprocessing import Preprocessing
from retrieval.index.index import Index
from sklearn.datasets import load_digits

from retrieval_engines.testing.small_bundles import save_graph, write_rescorer

SIDE = 8
WIDTH = 16


def weights(seed: int = 0, rows: int = SIDE * SIDE, columns: int = WIDTH) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32) / np.float32(
        rows**0.5
    )


def digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    data = load_digits()
    return (data.images * 15).astype(np.uint8), data.target


def write_digits(folder: Path, count: int = 200) -> list[Path]:
    """Write handwritten digits as PNG files, one folder per class."""
    images, labels = digits()
    paths = []
    for number in range(count):
        path = folder / str(labels[number]) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[number]).save(path)
        paths.append(path)
    return paths


def spoil(folder: Path, count: int) -> list[Path]:
    """Put files that are not images, each in its own way, into a folder."""
    contents = [b"", b"text", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0" + b"x" * 50]
    paths = [folder / f"bad{number:02}.png" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(contents[number % len(contents)])
    return paths


def make_bundle(
    folder: Path,
    *,
    kind: str = "image",
    rescorer: bool = False,
    subspaces: bool = False,
    query_vectors: bool = False,
    inner: bool = False,
    normalized: bool = True,
    variant: bool = False,
    features: int = 64,
    seed: int = 0,
    side: int = SIDE,
) -> Path:
    """Write a bundle whose encoder is a random projection of the pixels (or features), scaled to
    length 1.
    """
    folder.mkdir(parents=True)
    flat, image = features if kind == "features" else side * side, kind == "image"
    shape = (1, side, side) if image else (flat,)
    constants: dict[str, NDArray] = {"W": weights(seed, flat)}
    if image:
        constants |= {"full": np.float32(255), "shape": np.array([0, flat], dtype=np.int64)}
        nodes = [
            helper.make_node("Cast", ["input"], ["float"], to=TensorProto.FLOAT),
            helper.make_node("Div", ["float", "full"], ["scaled"]),
            helper.make_node("Reshape", ["scaled", "shape"], ["flat"]),
        ]
    else:
        nodes = [helper.make_node("Identity", ["input"], ["flat"])]
    nodes.append(helper.make_node("MatMul", ["flat", "W"], ["projected"]))
    op, settings = ("LpNormalization", {"axis": 1, "p": 2}) if normalized else ("Identity", {})
    nodes.append(helper.make_node(op, ["projected"], ["vector"], **settings))
    names, optional = ["vector"], {}
    if query_vectors:
        constants["V"] = weights(seed + 1, WIDTH) + np.eye(WIDTH, dtype=np.float32)
        nodes.append(helper.make_node("MatMul", ["vector", "V"], ["query"]))
        names.append("query")
    if rescorer:
        nodes.append(helper.make_node("Identity", ["projected"], ["code"]))
        names.append("code")
        write_rescorer(folder / "rescorer.onnx", WIDTH)
        optional["rescorer"] = RescorerEntry(file="rescorer.onnx", candidates=50)
    dtype = TensorProto.UINT8 if image else TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("input", dtype, ["N", *shape])]
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", WIDTH]) for n in names]
    save_graph(folder / "encoder.onnx", nodes, inputs, outputs, constants)
    if variant:
        constants["W"] = constants["W"].astype(np.float16).astype(np.float32)
        save_graph(folder / "encoder.fp16.onnx", nodes, inputs, outputs, constants)
        fp16 = Variant(file="encoder.fp16.onnx", cosine=Cosine(mean=1.0, min=1.0))
        optional["variants"] = {"fp16": fp16}
    if subspaces:
        spans = {"left": (0, 6), "right": (6, WIDTH)}
        optional["subspaces"] = tuple(
            SubspaceEntry(name=name, start=start, stop=stop)
            for name, (start, stop) in spans.items()
        )
    manifest = Manifest(
        name="digits",
        created="2025-01-01T00:00:00+00:00",
        versions={"onnx": onnx.__version__},
        opset=17,
        input=Input(
            kind=kind,
            dtype="uint8" if image else "float32",
            shape=shape,
            preprocessing=Preprocessing((side, side), 1, (0.0,), (1.0,)) if image else None,
        ),
        vector=WIDTH,
        code=WIDTH if rescorer else None,
        query_vectors=query_vectors,
        normalized=normalized,
        distance=DistanceEntry(
            name="manhattan" if rescorer else "euclidean",
            exact=not (rescorer or subspaces),
            measure="inner" if inner else "euclidean",
        ),
        verified=Verified(tolerance=1e-4, largest_difference=0.0, items=1),
        **optional,
    )
    write_manifest(folder, manifest)
    return folder


def cut_in_two(path: Path) -> Path:
    """Split the encoder of a bundle of images where its pixels are features."""
    graph = onnx.load(path / "encoder.onnx").graph
    end = 1 + next(i for i, node in enumerate(graph.node) if "flat" in node.output)
    first = [*graph.node[:end], helper.make_node("Identity", ["flat"], ["features"])]
    second = [helper.make_node("Identity", ["input"], ["flat"]), *graph.node[end:]]
    features = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["N", 64])
    inputs = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 64])
    pixels, weights = {}, {}
    for constant in graph.initializer:
        part = pixels if constant.name in ("full", "shape") else weights
        part[constant.name] = numpy_helper.to_array(constant)
    save_graph(path / "backbone.onnx", first, list(graph.input), [features], pixels)
    save_graph(path / "head.onnx", second, [inputs], list(graph.output), weights)
    (path / "encoder.onnx").unlink()
    entry = SplitEntry(backbone="backbone.onnx", head="head.onnx", features=64)
    write_manifest(path, read_manifest(path).model_copy(update={"encoder": None, "split": entry}))
    return path


def read_manifest(folder: Path) -> Manifest:
    return parse_manifest(folder / FILE, (folder / FILE).read_bytes())


WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def add_text(path: Path, length: int = 12, fixed: int | None = None) -> Path:
    """Give a bundle of digits a text encoder, with a probe: the mean of its words' vectors.

    A digit's name has the mean vector of its images, any other word the same small vector.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    pixels, labels = digits()
    bundle = Bundle.open(path, threads=1)
    inputs = pixels[:, None]
    if bundle.manifest.input.kind == "features":
        inputs = pixels.reshape(len(pixels), -1).astype(np.float32)
    encoded = bundle.encode(inputs)
    vectors = encoded.vector if encoded.base is None else encoded.base
    means = [vectors[labels == digit].mean(axis=0) for digit in range(10)]
    other = np.full((1, vectors.shape[1]), 1e-3, np.float32)
    words = np.concatenate([np.zeros_like(other), other, means]).astype(np.float32)
    vocabulary = {word: number for number, word in enumerate(("[PAD]", "[UNK]", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=fixed)
    return put_text(path, tokenizer, words)


def put_text(path: Path, tokenizer, words: NDArray[np.float32]) -> Path:
    """Give a bundle this tokenizer and a text encoder: the mean of the vectors of its tokens."""
    tokenizer.save(str(path / "tokenizer.json"))
    nodes = [
        helper.make_node("Gather", ["words", "ids"], ["vectors"]),
        helper.make_node("Cast", ["mask"], ["present"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["present", "last"], ["column"]),
        helper.make_node("Mul", ["vectors", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "middle"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["present", "middle"], ["count"], keepdims=1),
        helper.make_node("Div", ["sum", "count"], ["vector"]),
    ]
    constants = {"words": words, "last": np.array([2]), "middle": np.array([1])}
    ends = [
        helper.make_tensor_value_info(n, TensorProto.INT64, ["N", "L"]) for n in ("ids", "mask")
    ]
    output = helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["N", words.shape[1]])
    save_graph(path / "text.onnx", nodes, ends, [output], constants)
    verified = Verified(tolerance=1e-4, largest_difference=0.0, items=1)
    entry = TextEntry(length=tokenizer.truncation["max_length"], verified=verified)
    write_manifest(path, read_manifest(path).model_copy(update={"text": entry}))
    entry = entry.model_copy(update={"probe": text_probe_of(Bundle.open(path, threads=1))})
    write_manifest(path, read_manifest(path).model_copy(update={"text": entry}))
    return path


def put_graph(bundle: Path, model: bytes) -> None:
    """Put another encoder into a bundle, and make all that speaks of it true."""
    (bundle / "encoder.onnx").write_bytes(model)
    change_manifest(bundle, lambda content: None)


def change_manifest(bundle: Path, change: Callable[[dict], object]) -> None:
    """Change the manifest of a bundle, and make all that speaks of it true."""
    path = bundle / "manifest.json"
    content = json.loads(path.read_text())
    encoder = (bundle / "encoder.onnx").read_bytes()
    digest = hashlib.sha256(encoder).hexdigest()
    content["files"]["encoder.onnx"] = {"sha256": digest, "bytes": len(encoder)}
    change(content)
    content["checksum"] = checksum_of(content)
    path.write_text(json.dumps(content))


def make_text_index(path: Path) -> Path:
    """Create an index of 400 digits, their names as labels, by a bundle beside it that takes texts.

    Ids are the rows "000" to "399"; metadata say whether the digit is odd, and the row.
    """
    pixels, labels = digits()
    bundle = add_text(make_bundle(path.with_name("bundle")))
    with Index.create(path, model=bundle, progress=False) as index:
        index.add(
            images=list(pixels[:400]),
            ids=[f"{number:03}" for number in range(400)],
            labels=[WORDS[label] for label in labels[:400]],
            metadata=[{"odd": bool(label % 2), "row": n} for n, label in enumerate(labels[:400])],
            progress=False,
        )
    return path
