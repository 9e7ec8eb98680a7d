"""Text encoders against their libraries, and pairs of towers as one bundle of two graphs."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_models
import torch
from PIL import Image
from refusals import refusal
from retrieval.bundle.bundle import Bundle
from retrieval.errors import DataError, MissingDependency, RecipeError
from retrieval.export.export_model import export_model
from retrieval.host.plugins import create
from retrieval.model.checked_parts import check_text_encoder
from retrieval.model.model import Model, TextPart
from sklearn.datasets import load_sample_images
from torch import nn

TEXTS = ["a red mug", "two dogs", "mug dogs red a", "red", "a " * 100]
TRANSFORMERS = pytest.importorskip("transformers", reason="the extra transformers is missing")


def features(encoder: Any, texts: list[str] = TEXTS) -> np.ndarray:
    part = TextPart(encoder, nn.Identity()).eval()
    with torch.inference_mode():
        return part.features(part.tokens(texts)).numpy()


def agrees(ours: np.ndarray, theirs: Any) -> None:
    theirs = np.asarray(theirs.detach() if hasattr(theirs, "detach") else theirs)
    assert ours.shape == theirs.shape
    length = np.linalg.norm(theirs, axis=1).mean()
    assert np.abs(ours - theirs).max() <= 1e-5 * length
    # the texts differ by far more than the tolerance, so the test can fail
    assert np.abs(theirs[0] - theirs[1]).max() > 1e-3 * length


def exports(backbone: Any, encoder: Any, folder: Path) -> Bundle:
    """Export a pair of towers as they are, and compare the bundle's vectors of texts with torch."""
    assert check_text_encoder(encoder, "the encoder") == backbone.features
    model = Model(backbone, nn.Identity(), text=TextPart(encoder, nn.Identity())).eval()
    images = map(Image.fromarray, load_sample_images().images)
    photos = [backbone.preprocessing(image) for image in images]
    export_model(model, np.stack(photos * 2), folder, name="pair", texts=TEXTS)
    bundle = Bundle.open(folder, device="cpu")
    agrees(bundle.encode_text(TEXTS).vector, features(encoder))
    assert {"encoder.onnx", "text.onnx", "tokenizer.json"} <= set(bundle.manifest.files)
    return bundle


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_transformers(kind, tmp_path):
    folder = str(small_models.transformers_folder(tmp_path / kind, kind))
    small_models.save_tokenizer(folder)
    encoder = create("text encoder", "models.transformers", model=folder)
    model = TRANSFORMERS.AutoModel.from_pretrained(folder)
    tokenizer = TRANSFORMERS.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(
        TEXTS,
        padding="max_length" if kind == "siglip" else True,
        truncation=True,
        max_length=model.config.text_config.max_position_embeddings,
        return_tensors="pt",
    )
    theirs = model.get_text_features(input_ids=tokens["input_ids"]).pooler_output
    agrees(features(encoder), theirs)
    backbone = create("backbone", "models.transformers", model=folder)
    exports(backbone, encoder, tmp_path / "bundle")


def test_open_clip(tmp_path):
    open_clip = pytest.importorskip("open_clip", reason="the extra open-clip is not installed")
    name, file = small_models.open_clip_file(tmp_path, vocabulary=49_408)
    encoder = create("text encoder", "models.open_clip", model=name, weights=str(file))
    whole = open_clip.create_model(name, pretrained=str(file)).eval()
    tokenizer = open_clip.get_tokenizer(name)
    texts = [*TEXTS, "It's 42 Größen, déjà-vu?!", "  東京\n🙂 ", "don't STOP"]
    part = TextPart(encoder, nn.Identity())
    assert part.tokens(texts)[:, 0].tolist() == tokenizer(texts).tolist()
    with torch.inference_mode():
        agrees(features(encoder, texts), whole.encode_text(tokenizer(texts)))
    backbone = create("backbone", "models.open_clip", model=name, weights=str(file))
    exports(backbone, encoder, tmp_path / "bundle")


def small_package(folder: Path, monkeypatch: Any) -> Path:
    """Install a package of the sentence encoder's form, with a small random network."""
    small_models.save_tokenizer(folder / "files")
    config = TRANSFORMERS.BertConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=100,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    TRANSFORMERS.BertModel(config).save_pretrained(folder / "files")
    package = folder / "all_minilm_l6_v2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    with zipfile.ZipFile(package / "model.zip", "w") as archive:
        for file in (folder / "files").iterdir():
            archive.write(file, file.name)
    monkeypatch.syspath_prepend(str(folder))
    return package


def test_the_sentence_encoder_is_the_mean_of_its_tokens(tmp_path, monkeypatch):
    small_package(tmp_path, monkeypatch)
    encoder = create("text encoder", "core.sentence_encoder", length=16)
    model = TRANSFORMERS.BertModel.from_pretrained(tmp_path / "files").eval()
    tokenizer = TRANSFORMERS.AutoTokenizer.from_pretrained(tmp_path / "files")
    tokens = tokenizer(TEXTS, padding=True, truncation=True, max_length=16, return_tensors="pt")
    keys = ("input_ids", "attention_mask")
    with torch.inference_mode():
        outputs = model(**{key: tokens[key] for key in keys}).last_hidden_state
    kept = tokens["attention_mask"][..., None]
    means = (outputs * kept).sum(1) / kept.sum(1)
    agrees(features(encoder), nn.functional.normalize(means))
    assert encoder.length == 16
    backbone = create("backbone", "core.convnet", size=8, width=4, depth=2)
    head = nn.Linear(backbone.features, 32)
    model = Model(backbone, head, text=TextPart(encoder, nn.Identity())).eval()
    items = np.random.default_rng(0).integers(0, 256, (16, *backbone.preprocessing.shape), np.uint8)
    manifest = export_model(model, items, tmp_path / "bundle", name="x", texts=TEXTS)
    assert manifest.text is not None and manifest.text.verified.largest_difference < 1e-4
    agrees(Bundle.open(tmp_path / "bundle").encode_text(TEXTS).vector, features(encoder))


def test_a_damaged_or_missing_package_is_named(tmp_path, monkeypatch):
    package = small_package(tmp_path, monkeypatch)
    (package / "model.zip").write_bytes(b"PK")
    says = refusal(DataError, create, "text encoder", "core.sentence_encoder")
    assert "model.zip cannot be read" in says and "force-reinstall" in says
    monkeypatch.setitem(sys.modules, "transformers", None)
    says = refusal(MissingDependency, create, "text encoder", "core.sentence_encoder")
    assert "pip install 'embedding-retrieval[text]'" in says


def test_a_model_without_texts_is_refused(tmp_path):
    folder = str(small_models.transformers_folder(tmp_path, "vit"))
    small_models.save_tokenizer(folder)
    says = refusal(RecipeError, create, "text encoder", "models.transformers", model=folder)
    assert "does not embed texts" in says
