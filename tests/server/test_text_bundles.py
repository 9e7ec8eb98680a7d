"""Bundles with a text encoder: its vectors, its tokenizer, and the refusal of damaged ones."""

import importlib.util
import json
import pickle
import time
from base64 import b64encode

import numpy as np
import onnx
import pytest
from makers import read_manifest
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.manifest import write_manifest
from retrieval.bundle.probe import probe_fault
from retrieval.errors import BundleError, DataError, MissingDependency
from retrieval.index.adapter_bundles import make_adapter_bundle, write_base

from retrieval_engines.testing.small_bundles import linear_head


def opened(path, **options):
    return Bundle.open(path, threads=1, **options)


@pytest.fixture
def path(makers, tmp_path):
    return makers.add_text(makers.make_bundle(tmp_path / "bundle", variant=True))


def by_loops(bundle, makers, text):
    """Vector of a text of digits' names: the mean over its words of their images' means."""
    pixels, labels = makers.digits()
    vectors = bundle.encode(pixels[:, None]).vector.astype(np.float64)
    names = [makers.WORDS.index(word) for word in text.lower().split()]
    return np.mean([vectors[labels == name].mean(axis=0) for name in names], axis=0)


@pytest.mark.parametrize("fixed", [None, 12])
def test_vectors_of_texts_equal_a_plain_loop_at_any_batch_size(makers, tmp_path, fixed):
    bundle = opened(makers.add_text(makers.make_bundle(tmp_path / "b"), fixed=fixed))
    texts = ["three", "One TWO", "nine nine eight", "four"] * 5
    expected = np.array([by_loops(bundle, makers, text) for text in texts])
    for batch_size in (1, 3, 32):
        encoded = bundle.encode_text(texts, batch_size=batch_size)
        assert np.abs(encoded.vector - expected).max() < 1e-6
    assert encoded.vector.dtype == np.float32
    assert encoded.query is encoded.vector
    assert encoded.bundle == bundle.sha256
    assert np.abs(bundle.encode_text("three").vector - expected[:1]).max() < 1e-6
    assert bundle.encode_text([]).vector.shape == (0, makers.WIDTH)


def test_texts_are_cut_to_the_length(path):
    bundle = opened(path)
    long = " ".join(["one"] * 12 + ["nine"] * 100)
    assert np.allclose(bundle.encode_text(long).vector, bundle.encode_text("one").vector, atol=1e-6)


def test_a_name_is_nearest_to_the_images_of_its_digit(path, makers):
    bundle = opened(path)
    pixels, labels = makers.digits()
    vectors = bundle.encode(pixels[:, None]).vector
    distances = ((bundle.encode_text(makers.WORDS).vector[:, None] - vectors) ** 2).sum(axis=2)
    shares = [np.mean(labels[row.argsort()[:20]] == d) for d, row in enumerate(distances)]
    assert np.mean(shares) > 0.9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "The text is empty"),
        (" \n\t\u3000", "The text is empty"),
        ("a" * 10_001, "has 10,001 characters; the limit is 10,000"),
        ("a\0b", "NUL character"),
        ("\ud83d", "surrogate"),
        (b"red", "A text is needed, not bytes"),
        (None, "A text is needed, not NoneType"),
    ],
)
def test_what_is_no_text_is_refused_by_its_place(path, text, says):
    with pytest.raises(DataError, match=rf"texts\[1\]: .*{says}"):
        opened(path).encode_text(["one", text])


def test_bundles_without_text_say_so(bundle_path):
    bundle = opened(bundle_path)
    assert not bundle.takes_text
    with pytest.raises(DataError, match=r"no text encoder.*Export a model that was trained"):
        bundle.encode_text(["one"])
    assert "text" not in json.loads((bundle_path / "manifest.json").read_text())


def test_without_tokenizers_images_work_and_texts_are_a_sentence(path, makers, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "retrieval.bundle.bundle.find_spec", lambda name: name != "tokenizers" and found(name)
    )
    bundle = opened(path)
    assert bundle.encode(makers.digits()[0][:2, None]).vector.shape == (2, makers.WIDTH)
    assert not bundle.takes_text
    assert probe_fault(bundle) is None
    with pytest.raises(MissingDependency, match=r"pip install 'embedding-retrieval\[serve\]'"):
        bundle.encode_text("one")


def test_an_adapter_applies_to_texts_too(path, makers, tmp_path):
    base = opened(path)
    head = linear_head(makers.WIDTH, 5)
    adapter = opened(make_adapter_bundle(base, head, tmp_path / "adapter"))
    before = base.encode_text(["seven", "two five"]).vector
    encoded = adapter.encode_text(["seven", "two five"])
    assert np.array_equal(encoded.base, before)
    assert np.array_equal(encoded.vector, adapter.adapt(before).vector)
    assert probe_fault(adapter) is None
    assert adapter.manifest.text.probe != base.manifest.text.probe
    assert opened(write_base(adapter, tmp_path / "back")).sha256 == base.sha256


def test_the_probe_shows_a_text_encoder_that_became_wrong(path, makers, tmp_path):
    assert probe_fault(opened(path)) is None
    assert probe_fault(opened(path, variant="fp16")) is None
    other = makers.add_text(makers.make_bundle(tmp_path / "other", seed=3))
    manifest = read_manifest(path)
    probe = read_manifest(other).text.probe
    text = manifest.text.model_copy(update={"probe": probe})
    write_manifest(path, manifest.model_copy(update={"text": text}))
    assert "model is broken" in probe_fault(opened(path))
    text = manifest.text.model_copy(update={"probe": probe.model_copy(update={"vector": "AAAA"})})
    write_manifest(path, manifest.model_copy(update={"text": text}))
    assert "text probe does not fit" in probe_fault(opened(path))


def test_a_bundle_with_text_is_pickled_and_copied(path, tmp_path):
    bundle = opened(path)
    vector = bundle.encode_text("six").vector
    assert np.array_equal(pickle.loads(pickle.dumps(bundle)).encode_text("six").vector, vector)
    bundle.copy(tmp_path / "copy")
    assert np.array_equal(opened(tmp_path / "copy").encode_text("six").vector, vector)


def rewritten(path, change):
    """Change the JSON of a bundle's tokenizer, and make the manifest's checksums true."""
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    write_manifest(path, read_manifest(path))


def grows(times):
    """A normalizer that replaces each a by nine, several times."""
    nine = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 9}
    return {"type": "Sequence", "normalizers": [nine] * times}


def table(length):
    """A table of SentencePiece with an empty trie and one long replacement."""
    content = (4).to_bytes(4, "little") + bytes(4) + b"a" * length + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": b64encode(content).decode()}


def split(pattern):
    """A part of a tokenizer that cuts texts at a regular expression."""
    rest = {"behavior": "Isolated", "invert": False}
    return {"type": "Split", "pattern": {"Regex": pattern}, **rest}


def pieces():
    """A model of word pieces that takes words of any length."""
    vocabulary = {"[UNK]": 0, "a": 1, "##a": 2}
    rest = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 10**9}
    return {"type": "WordPiece", "unk_token": "[UNK]", "vocab": vocabulary, **rest}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda file: file.update(truncation=None), "must cut texts to at most 12 tokens"),
        (lambda file: file["truncation"].update(max_length=13), "must cut texts to at most 12"),
        (lambda file: file.update(padding=None), "must say how texts of a batch are padded"),
        (lambda file: file.update(model={"type": "Nothing"}), "is not a tokenizer"),
        (lambda file: file.clear(), "is not a tokenizer"),
        (lambda file: file.update(normalizer=grows(4)), "could lengthen a text a thousandfold"),
        (lambda file: file.update(normalizer=table(2_000)), "could lengthen a text a thousandfold"),
        # Regular expressions that go back and forth, over a letter that only they know.
        (
            lambda file: file.update(pre_tokenizer=split(r"q.*q.*z")),
            "more than 1 second for a text",
        ),
        (lambda file: file.update(pre_tokenizer=split(r"(q|qq)+$")), "fails: Onig"),
        (
            lambda file: file.update(
                normalizer={"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": "z"}
            ),
            "fails: Onig",
        ),
        # A word of any length, whose pieces are looked up from each letter on.
        (lambda file: file.update(model=pieces()), "more than 1 second for a text of"),
    ],
)
def test_a_tokenizer_that_does_not_cut_or_pad_or_is_slow_is_refused(path, change, says):
    rewritten(path, change)
    start = time.thread_time()
    with pytest.raises(BundleError, match=says):
        opened(path)
    assert time.thread_time() - start < 30


def test_a_tokenizer_that_pads_beyond_the_length_is_refused(path):
    rewritten(path, lambda file: file["padding"].update(strategy={"Fixed": 100}))
    with pytest.raises(BundleError, match="padded, to at most 12 tokens"):
        opened(path)
    rewritten(path, lambda file: file["padding"].update(strategy="BatchLongest"))
    rewritten(path, lambda file: file["padding"].update(pad_to_multiple_of=100))
    with pytest.raises(BundleError, match="pads texts to 100 tokens"):
        opened(path).encode_text("one")


def test_a_tokenizer_that_lengthens_texts_a_little_is_used(path):
    rewritten(path, lambda file: file.update(normalizer=grows(2)))
    assert opened(path).encode_text("one").vector.any()


def test_a_tokenizer_that_fails_for_a_text_is_an_error(path):
    # A regular expression that goes back exponentially; its library gives up, by a panic of Rust.
    # The trial has no text of this word.
    pattern = {"Regex": "((cab)+)+$"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    rewritten(path, lambda file: file.update(pre_tokenizer=split))
    bundle = opened(path)
    assert bundle.encode_text("one").vector.any()
    with pytest.raises(BundleError, match=r"tokenizer\.json fails: .*retry-limit"):
        bundle.encode_text("cab" * 40 + "b")


def test_a_text_without_a_token_is_a_sentence(path):
    rewritten(
        path,
        lambda file: file.update(
            normalizer={"type": "Replace", "pattern": {"String": "x"}, "content": " "}
        ),
    )
    with pytest.raises(DataError, match="knows no word or sign of the text 'x x'"):
        opened(path).encode_text(["one", "x x"])


def test_damaged_missing_and_foreign_files_are_refused(path, makers, tmp_path):
    for name in ("text.onnx", "tokenizer.json"):
        content = (path / name).read_bytes()
        (path / name).write_bytes(content + b" ")
        with pytest.raises(BundleError, match=f"{name} has .* bytes instead of"):
            opened(path)
        (path / name).unlink()
        with pytest.raises(BundleError, match=f"{name} is missing"):
            opened(path)
        with pytest.raises(BundleError, match=f"{name}, was not written"):
            write_manifest(path, read_manifest(path))
        (path / name).write_bytes(content)
    wide = makers.make_bundle(tmp_path / "wide", side=5)
    (path / "text.onnx").write_bytes((wide / "encoder.onnx").read_bytes())
    write_manifest(path, read_manifest(path))
    with pytest.raises(BundleError, match="has no input 'ids'"):
        opened(path)


def test_a_text_graph_of_another_width_is_refused(path):
    model = onnx.load(path / "text.onnx")
    (words,) = (array for array in model.graph.initializer if array.name == "words")
    narrow = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(words)[:, :5].copy(), "words")
    words.CopyFrom(narrow)
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 5
    onnx.save(model, path / "text.onnx")
    write_manifest(path, read_manifest(path))
    with pytest.raises(BundleError, match=r"'vector' as float32 \(1, 5\); .*\(1, 16\)"):
        opened(path)


def test_a_rescorer_and_a_text_encoder_exclude_each_other(makers, tmp_path):
    path = makers.make_bundle(tmp_path / "b", rescorer=True)
    makers.change_manifest(
        path,
        lambda content: content.update(
            text={"length": 12, "verified": content["verified"], "probe": None}
        ),
    )
    with pytest.raises(BundleError, match="codes and a rescorer cannot have an encoder of 'text'"):
        opened(path)
