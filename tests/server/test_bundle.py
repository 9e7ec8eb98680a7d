"""Bundles: outputs of their graphs, and the refusal of damaged and hostile bundles."""

import json
import shutil
from importlib import metadata
from pathlib import Path

import makers
import numpy as np
import onnx
import pytest
from retrieval.base import runtime
from retrieval.bundle.bundle import Bundle
from retrieval.errors import BundleError, DataError, MissingDependency


def copied(bundle: Path, folder: Path) -> Path:
    return Path(shutil.copytree(bundle, folder / "bundle"))


def edited(bundle: Path, folder: Path, change) -> Path:
    """Copy a bundle and change its manifest, with the checksum, as a hostile program would."""
    path = copied(bundle, folder)
    makers.change_manifest(path, change)
    return path


def refused(says: str, path: Path, **options) -> None:
    with pytest.raises(BundleError, match=says):
        Bundle.open(path, **options)


def by_loops(pixels: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The encoder of makers.py in float64, one number at a time."""
    out = []
    for image in pixels.reshape(len(pixels), -1).tolist():
        row = [
            sum(p / 255 * w for p, w in zip(image, column, strict=True))
            for column in weights.T.tolist()
        ]
        length = sum(value * value for value in row) ** 0.5
        out.append([value / length for value in row])
    return np.array(out)


def test_the_encoder_equals_a_plain_loop(bundle_path, makers):
    pixels = makers.digits()[0][:10, None]
    bundle = Bundle.open(bundle_path, threads=1)
    encoded = bundle.encode(pixels, batch_size=3)
    assert encoded.vector.dtype == np.float32
    assert np.abs(encoded.vector - by_loops(pixels, makers.weights())).max() < 1e-6
    assert encoded.query is encoded.vector
    assert encoded.code is None
    assert len(encoded) == 10
    assert np.array_equal(encoded[2:5].vector, encoded.vector[2:5])
    assert bundle.device == "cpu"
    assert len(bundle.encode(pixels[:0])) == 0


def test_query_and_code_outputs(makers, tmp_path):
    path = makers.make_bundle(tmp_path / "b", query_vectors=True, rescorer=True)
    bundle = Bundle.open(path, threads=1)
    encoded = bundle.encode(makers.digits()[0][:7, None])
    turned = makers.weights(1, makers.WIDTH) + np.eye(makers.WIDTH)
    assert np.abs(encoded.query - encoded.vector.astype(np.float64) @ turned).max() < 1e-5
    codes = encoded.code
    distances = bundle.rescore(codes[:2], codes)
    for q in range(2):
        for n in range(7):
            pairs = zip(codes[q].tolist(), codes[n].tolist(), strict=True)
            assert distances[q, n] == pytest.approx(sum(abs(a - b) for a, b in pairs), rel=1e-5)
    assert bundle.rescore(codes[:0], codes).shape == (0, 7)
    with pytest.raises(DataError, match="Codes of shape"):
        bundle.rescore(codes[:, :3], codes)


def test_a_variant_runs_instead_of_the_encoder(bundle_path, makers):
    pixels = makers.digits()[0][:5, None]
    full = Bundle.open(bundle_path, threads=1).encode(pixels).vector
    half = Bundle.open(bundle_path, threads=1, variant="fp16").encode(pixels).vector
    assert 0 < np.abs(full - half).max() < 1e-2
    refused(r"no variant 'fp61'.*has: fp16.*Did you mean 'fp16'", bundle_path, variant="fp61")


def test_wrong_inputs_are_sentences(bundle_path, makers, tmp_path):
    bundle = Bundle.open(bundle_path, threads=1)
    with pytest.raises(DataError, match=r"takes inputs of shape \(N, 1, 8, 8\), not \(2, 8, 8\)"):
        bundle.encode(np.zeros((2, 8, 8), np.uint8))
    with pytest.raises(DataError, match="raw pixels as uint8, not float32"):
        bundle.encode(np.zeros((2, 1, 8, 8), np.float32))
    with pytest.raises(BundleError, match="has no rescorer"):
        bundle.rescore(np.zeros((1, 16)), np.zeros((1, 16)))
    path = makers.make_bundle(tmp_path / "f", kind="features", normalized=False)
    features = Bundle.open(path, threads=1)
    for bad in (np.nan, np.inf, 1e300):
        values = np.ones((3, 64))
        values[1, 5] = bad
        with pytest.raises(DataError, match="Vector 1 holds NaN"):
            features.encode(values)
    with pytest.raises(DataError, match="real numbers"):
        features.encode(np.ones((1, 64), dtype=complex))
    beyond = np.full(64, 3e38) * np.sign(makers.weights()[:, 0])
    with pytest.raises(
        DataError, match="The encoder returns NaN or infinity in 'vector' for item 1"
    ):
        features.encode(np.stack([np.zeros(64), beyond]))
    with pytest.raises(DataError, match="64 features, not images"):
        features.encode_image(b"")


def test_any_flipped_bit_of_any_file_is_noticed(makers, tmp_path):
    path = makers.make_bundle(tmp_path / "b", rescorer=True, variant=True)
    whole = Bundle.open(path, threads=1).sha256
    random = np.random.default_rng(0)
    for name in ("encoder.onnx", "encoder.fp16.onnx", "rescorer.onnx"):
        content = (path / name).read_bytes()
        for bit in random.integers(0, 8 * len(content), 30):
            altered = bytearray(content)
            altered[bit // 8] ^= 1 << (bit % 8)
            (path / name).write_bytes(altered)
            refused(rf"{name} was altered", path)
        (path / name).write_bytes(content[:-1])
        refused(rf"{name} has {len(content) - 1:,} bytes instead of {len(content):,}", path)
        (path / name).unlink()
        refused(rf"{name} is missing", path)
        (path / name).write_bytes(content)
    assert Bundle.open(path, threads=1).sha256 == whole


def test_a_bundle_larger_than_the_memory_is_a_sentence(bundle_path, monkeypatch):
    monkeypatch.setattr("retrieval.bundle.manifest.available_memory", lambda: 100)
    refused("GB of memory, but only 0.0 GB are available on this machine", bundle_path)


def test_any_change_of_the_manifest_is_noticed(bundle_path, tmp_path):
    path = copied(bundle_path, tmp_path)
    content = (path / "manifest.json").read_bytes()
    meaning = json.loads(content)
    noticed = 0
    for bit in np.random.default_rng(0).integers(0, 8 * len(content), 200):
        altered = bytearray(content)
        altered[bit // 8] ^= 1 << (bit % 8)
        (path / "manifest.json").write_bytes(altered)
        try:
            Bundle.open(path, threads=1)
        except BundleError:
            noticed += 1
        else:  # only layout may change unnoticed
            assert json.loads(altered) == meaning
    assert noticed > 150


def test_what_is_not_a_manifest_is_refused_soon(tmp_path):
    refused("no such folder", tmp_path / "nowhere")
    refused("is not a bundle", tmp_path)
    for content, says in (
        (b"\xff\xfe{", "damaged: not JSON"),
        (b'{"format": 1' + b"[" * 100_000, "damaged: not JSON"),
        (b"\0" * 100, "damaged: not JSON"),
        (b'{"format": 1, "count": ' + b"9" * 5000 + b"}", "damaged: not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"format": 1, "format": 1}', "'format' appears twice"),
        (b'{"format": ' + b"9" * 400 + b"}", "reads format 1"),
        (b"{" + b" " * 5_000_000 + b"}", "bytes; the limit is"),
        (b"[]", "has no 'format' number"),
        (b"{}", "has no 'format' number"),
        (b'{"format": "1"}', "has no 'format' number"),
        (b'{"format": true}', "has no 'format' number"),
    ):
        (tmp_path / "manifest.json").write_bytes(content)
        refused(says, tmp_path)


def test_an_address_is_no_bundle_and_is_named_as_it_was_typed():
    for path in ("s3://bucket/x", Path("s3://bucket/x")):
        with pytest.raises(BundleError, match=r"^s3://bucket/x is not a bundle: there is no such"):
            Bundle.open(path)


def test_another_format_version_is_named(bundle_path, tmp_path):
    path = edited(bundle_path, tmp_path, lambda content: content.update(format=2, surprise=1))
    refused(r"has format 2; this version of retrieval reads format 1\. Upgrade", path)


def test_all_problems_of_a_manifest_are_one_message(bundle_path, tmp_path):
    def spoil(content):
        content["vector"] = -1
        content["unknown"] = 1
        content["input"]["preprocessing"]["sice"] = 3
        del content["verified"]

    with pytest.raises(BundleError) as caught:
        Bundle.open(edited(bundle_path, tmp_path, spoil))
    for place in ("vector:", "unknown:", "sice", "verified:"):
        assert place in str(caught.value), caught.value
    assert str(caught.value).count("\n") == 4


RECORD = {"sha256": "0" * 64, "bytes": 1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(encoder="../encoder.onnx"), "not the plain name of a file"),
        (lambda c: c["files"].update({"/etc/passwd": RECORD}), "not the plain name"),
        (lambda c: c["files"].update({"x\n\x1b]0;": RECORD}), "not the plain name"),
        (lambda c: c["files"]["encoder.onnx"].update(bytes=10**18), "bytes instead"),
        (lambda c: c.update(vector=10**9), "vector: .*less than or equal to 67108864"),
        (lambda c: c["input"].update(shape=[1, 10**5, 10**5]), "the limit is 67,108,864"),
        (lambda c: c["input"]["preprocessing"].update(resize=10**9), "the limit is 8,192"),
        (lambda c: c["input"]["preprocessing"].update(mean=["x"]), "mean"),
        (lambda c: c["versions"].update(x=[1]), "versions"),
        (lambda c: c["files"].pop("encoder.onnx"), "has no SHA-256 for encoder.onnx"),
        (lambda c: c["distance"].update(exact=False), "needs a rescorer"),
        (
            lambda c: c.update(subspaces=[{"name": "a", "start": 0, "stop": 99}]),
            "stops at column 99 of 16",
        ),
        (lambda c: c.update(subspaces=[{"name": "a", "start": 5, "stop": 5}]), "before it starts"),
        (lambda c: c["input"].update(shape=[3, 8, 8]), r"takes uint8 \[1, 8, 8\]"),
        (lambda c: c["input"].update(preprocessing=None), "needs its 'preprocessing'"),
        (lambda c: c["input"]["preprocessing"].update(size=[0, 8]), "at least 1 pixel"),
        (lambda c: c["verified"].update(tolerance=float("inf")), "tolerance"),
        (lambda c: c.update(rescorer={"file": "encoder.onnx"}), "needs 'code'"),
        (
            lambda c: c.update(vector=17),
            r"'vector' as float32 \(1, 16\); the manifest says float32 \(1, 17\)",
        ),
        (lambda c: c.update(query_vectors=True), "has no output 'query'"),
    ],
)
def test_a_manifest_that_contradicts_itself_or_its_files(change, says, bundle_path, tmp_path):
    refused(says, edited(bundle_path, tmp_path, change))


def test_a_graph_that_onnx_runtime_refuses_is_a_sentence(bundle_path, makers, tmp_path):
    path = copied(bundle_path, tmp_path)
    model = onnx.load(path / "encoder.onnx")
    model.opset_import[0].version = 9999
    for content in (b"not a graph", model.SerializeToString()):
        makers.put_graph(path, content)
        refused(r"ONNX Runtime .* cannot load .*encoder\.onnx", path)


def test_a_device_that_onnx_runtime_lacks(bundle_path):
    if "CUDAExecutionProvider" in runtime.load_onnxruntime().get_available_providers():
        pytest.skip("there is a CUDA device")
    says = "without CUDA.*pip uninstall -y onnxruntime && pip install"
    refused(says, bundle_path, device="cuda")
    refused("Device 'tpu' is not known", bundle_path, device="tpu")


def distribution(site: Path, name: str) -> None:
    """Put a distribution's record where importlib.metadata finds it."""
    folder = site / f"{name.replace('-', '_')}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


def test_two_distributions_of_one_module_are_refused(tmp_path, monkeypatch):
    distribution(tmp_path, "faiss-gpu-cu12")
    distribution(tmp_path, "onnxruntime-gpu")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert metadata.version("onnxruntime-gpu") == "1.0"
    both = r"{0} and {1} are installed together.*pip uninstall -y"
    faiss = ("faiss-cpu", "faiss-gpu-cu12")
    for load, says in (
        (runtime.load_faiss, both.format(*faiss) + " faiss-cpu faiss-gpu-cu12"),
        (runtime.load_onnxruntime, both.format("onnxruntime", "onnxruntime-gpu")),
    ):
        with pytest.raises(MissingDependency, match=says):
            load.__wrapped__()


def test_a_missing_module_names_the_command(tmp_path, monkeypatch):
    says = r"not_there is not installed.*pip install 'embedding-retrieval\[cpu\]'"
    with pytest.raises(MissingDependency, match=says):
        runtime.require_module("not_there", ("not-there",))
    distribution(tmp_path, "not-there")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingDependency, match=r"cannot be imported.*--force-reinstall not-there"):
        runtime.require_module("not_there", ("not-there",))
