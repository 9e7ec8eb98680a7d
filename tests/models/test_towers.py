"""Towers of other libraries: their embeddings, preprocessing and export against the libraries'."""

from __future__ import annotations

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
from retrieval.export.export_backbone import BackboneEncoder
from retrieval.host.plugins import create
from retrieval.model.contracts import Backbone
from retrieval.model.model import Model
from sklearn.datasets import load_sample_images
from torch import nn

PHOTOS = [
    Image.fromarray(load_sample_images().images[0][:400, :400]),
    Image.fromarray(load_sample_images().images[1][:300, :200]),
]
"""Their sizes leave even margins around a crop: libraries round half a pixel differently."""


def library(name: str, extra: str | None = None) -> Any:
    return pytest.importorskip(name, reason=f"the extra {extra or name} is not installed")


def embeddings(backbone: Backbone) -> np.ndarray:
    """Return the features of the two photographs as our pipeline computes them."""
    assert backbone.preprocessing is not None
    pixels = np.stack([backbone.preprocessing(photo) for photo in PHOTOS])
    with torch.inference_mode():
        return Model(backbone.eval(), nn.Identity()).features(torch.from_numpy(pixels)).numpy()


def agrees(ours: np.ndarray, theirs: Any, tolerance: float = 1e-3) -> None:
    theirs = np.asarray(theirs.detach() if hasattr(theirs, "detach") else theirs)
    assert ours.shape == theirs.shape
    length = np.linalg.norm(theirs, axis=1, keepdims=True)
    assert np.abs(ours - theirs).max() <= tolerance * length.mean()
    # the two pictures differ by far more than the tolerance, so the test can fail
    assert np.abs(theirs[0] - theirs[1]).max() > 20 * tolerance * length.mean()


def exports(name: str, parameters: dict[str, Any], folder: Path) -> None:
    """Export a backbone; the export itself compares torch and ONNX Runtime on photographs."""
    encoder = BackboneEncoder(name, parameters)
    encoder.export(folder, progress=False)
    vectors = Bundle.open(folder, device="cpu").encode(
        np.stack([encoder.model.preprocessing(photo) for photo in PHOTOS])  # type: ignore[misc]
    )
    agrees(vectors.vector, embeddings(encoder.model.backbone), 1e-4)


@pytest.mark.parametrize("kind", small_models.TRANSFORMERS)
def test_transformers(kind, tmp_path):
    transformers = library("transformers")
    folder = str(small_models.transformers_folder(tmp_path / kind, kind))
    backbone = create("backbone", "models.transformers", model=folder)
    model = transformers.AutoModel.from_pretrained(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    inputs = processor(images=PHOTOS, return_tensors="pt")
    if kind in ("clip", "siglip"):
        theirs = model.get_image_features(**inputs).pooler_output
    elif kind == "classifier":
        whole = transformers.ViTForImageClassification.from_pretrained(folder)
        theirs = whole.vit(**inputs).last_hidden_state[:, 0]
    else:
        theirs = model(**inputs).pooler_output.flatten(1)
    agrees(embeddings(backbone), theirs)
    with torch.inference_mode():
        agrees(backbone(inputs["pixel_values"]).numpy(), theirs, 1e-6)
    exports("models.transformers", {"model": folder}, tmp_path / "bundle")


def test_open_clip(tmp_path):
    open_clip = library("open_clip", "open-clip")
    name, file = small_models.open_clip_file(tmp_path)
    backbone = create("backbone", "models.open_clip", model=name, weights=str(file))
    whole, _, transform = open_clip.create_model_and_transforms(name, pretrained=str(file))
    whole.eval()
    with torch.inference_mode():
        theirs = whole.encode_image(torch.stack([transform(photo) for photo in PHOTOS]))
    agrees(embeddings(backbone), theirs)
    exports("models.open_clip", {"model": name, "weights": str(file)}, tmp_path / "bundle")


def test_quick_gelu_follows_the_tag(monkeypatch, tmp_path):
    """A tag of weights that were trained with QuickGELU gets it, whatever the model's name says."""
    open_clip = library("open_clip", "open-clip")
    name, file = small_models.open_clip_file(tmp_path)
    tag = {"url": "", "quick_gelu": True}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, name, {"tag": tag})
    monkeypatch.setattr(open_clip.factory, "download_pretrained", lambda *a, **k: str(file))
    backbone = create("backbone", "models.open_clip", model=name, weights="tag")
    plain = create("backbone", "models.open_clip", model=name, weights=str(file))
    kinds = {type(module).__name__ for module in backbone.modules()}
    assert "QuickGELU" in kinds
    assert "QuickGELU" not in {type(module).__name__ for module in plain.modules()}


def test_sentence_transformers(tmp_path):
    library("transformers")
    sentence_transformers = library("sentence_transformers", "sentence-transformers")
    folder = str(small_models.sentence_transformers_folder(tmp_path))
    backbone = create("backbone", "models.sentence_transformers", model=folder)
    theirs = sentence_transformers.SentenceTransformer(folder, device="cpu").encode(PHOTOS)
    agrees(embeddings(backbone), theirs)
    assert backbone.features == 12
    exports("models.sentence_transformers", {"model": folder}, tmp_path / "bundle")


def test_an_odd_margin_is_accepted_and_another_crop_is_not(tmp_path):
    transformers = library("transformers")
    folder = small_models.transformers_folder(tmp_path / "m", "dinov2")
    odd = transformers.BitImageProcessor(
        size={"shortest_edge": 41}, crop_size=small_models.SQUARE, resample=3
    )
    odd.save_pretrained(folder)
    backbone = create("backbone", "models.transformers", model=str(folder))
    assert backbone.preprocessing.resize == 41
    for change in (
        {"do_rescale": False},
        {"do_normalize": False},
        {"rescale_factor": 1 / 127.5},
    ):
        transformers.BitImageProcessor(**{**odd.to_dict(), **change}).save_pretrained(folder)
        says = refusal(RecipeError, create, "backbone", "models.transformers", model=str(folder))
        assert "cannot be expressed as resizing, a centre crop, mean and std" in says, change


def test_a_processor_that_stretches_before_it_crops_is_refused(tmp_path):
    library("transformers")
    folder = small_models.transformers_folder(tmp_path / "deit", "deit")
    says = refusal(RecipeError, create, "backbone", "models.transformers", model=str(folder))
    assert "(their pixels differ). Choose another model, or embed the images" in says


def test_an_untrained_model_for_comparison(tmp_path):
    library("transformers")
    folder = str(small_models.transformers_folder(tmp_path / "vit", "vit"))
    loaded = create("backbone", "models.transformers", model=folder)
    untrained = create("backbone", "models.transformers", model=folder, pretrained=False)
    assert untrained.features == loaded.features
    name, weight = next(iter(loaded.state_dict().items()))
    assert not torch.equal(untrained.state_dict()[name], weight)


def test_models_that_cannot_be_loaded_are_named(tmp_path):
    library("transformers")
    folder = small_models.transformers_folder(tmp_path / "m", "vit")
    build = ("backbone", "models.transformers")
    (folder / "model.safetensors").write_bytes(b"nonsense")
    assert f"{folder} cannot be loaded: " in refusal(DataError, create, *build, model=str(folder))
    (folder / "preprocessor_config.json").unlink()
    assert f"{folder} cannot be loaded: " in refusal(DataError, create, *build, model=str(folder))


def test_incomplete_weights_are_refused(tmp_path):
    library("transformers")
    from safetensors.torch import load_file, save_file

    folder = small_models.transformers_folder(tmp_path / "m", "vit")
    weights = load_file(folder / "model.safetensors")
    del weights["layernorm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    says = refusal(DataError, create, "backbone", "models.transformers", model=str(folder))
    assert "lacks weights of its network: layernorm.weight." in says


def test_open_clip_names_and_weights():
    library("open_clip", "open-clip")
    build = ("backbone", "models.open_clip")
    assert "Did you mean 'RN50'" in refusal(RecipeError, create, *build, model="RN5")
    says = refusal(RecipeError, create, *build, model="RN50", weights="openia")
    assert "it has: openai, yfcc15m, cc12m. Did you mean 'openai'" in says


def test_a_model_of_texts_is_no_image_model(tmp_path):
    library("sentence_transformers", "sentence-transformers")
    transformers = library("transformers")
    texts = {k: v for k, v in small_models.TEXTS.items() if k not in ("image_size", "patch_size")}
    transformers.BertModel(transformers.BertConfig(**texts)).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    build = ("backbone", "models.sentence_transformers")
    assert "does not embed images" in refusal(RecipeError, create, *build, model=str(tmp_path))


@pytest.mark.parametrize("name", ["transformers", "open_clip", "sentence_transformers"])
def test_a_missing_package_is_named(name, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, name, None)
    extra = name.replace("_", "-")
    says = refusal(MissingDependency, create, "backbone", f"models.{name}", model="x")
    assert f"pip install 'embedding-retrieval[{extra}]'" in says
