"""Small models of other libraries with random weights, saved as the libraries save theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TEXTS = {**TOWER, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SQUARE = {"height": 32, "width": 32}
TRANSFORMERS = ("clip", "siglip", "dinov2", "vit", "classifier", "resnet")


def transformers_folder(folder: Path, kind: str) -> Path:
    """Save a model of transformers and its image processor into a folder, and return the folder."""
    import transformers as t

    texts = {name: TEXTS[name] for name in TEXTS if name not in ("image_size", "patch_size")}
    halves = {"vision_config": TOWER, "text_config": texts}
    cropped = {"size": {"shortest_edge": 40}, "crop_size": SQUARE}
    made: dict[str, Any] = {
        "clip": lambda: (
            t.CLIPModel(t.CLIPConfig(**halves, projection_dim=16)),
            t.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE),
        ),
        "siglip": lambda: (
            t.SiglipModel(t.SiglipConfig(**halves)),
            t.SiglipImageProcessor(size=SQUARE),
        ),
        "dinov2": lambda: (
            t.Dinov2Model(t.Dinov2Config(**{**TOWER, "mlp_ratio": 2})),
            t.BitImageProcessor(**cropped),
        ),
        "vit": lambda: (t.ViTModel(t.ViTConfig(**TOWER)), t.ViTImageProcessor(size=SQUARE)),
        "classifier": lambda: (
            t.ViTForImageClassification(t.ViTConfig(**TOWER)),
            t.ViTImageProcessor(size=SQUARE),
        ),
        "resnet": lambda: (
            t.ResNetModel(t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])),
            t.ConvNextImageProcessor(size={"shortest_edge": 32}),
        ),
        # stretched to 40 × 40, then cropped
        "deit": lambda: (
            t.ViTModel(t.ViTConfig(**TOWER)),
            t.DeiTImageProcessor(size={"height": 40, "width": 40}, crop_size=SQUARE),
        ),
    }
    torch.manual_seed(0)
    model, processor = made[kind]()
    with torch.no_grad():
        for parameter in model.parameters():  # the initial weights of some layers are all alike
            parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def save_tokenizer(folder: str | Path) -> None:
    """Save a tokenizer of a few words, with the special tokens of `TEXTS`, into a folder."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[START]", "[END]", "[PAD]", "[UNK]", "a", "red", "mug", "two", "dogs"]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[START] $A [END]", special_tokens=[("[START]", 0), ("[END]", 1)]
    )
    tokenizer.enable_padding(pad_id=2, pad_token="[PAD]")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", eos_token="[END]"
    ).save_pretrained(folder)


def open_clip_file(folder: Path, vocabulary: int = 100) -> tuple[str, Path]:
    """Register a small model of open_clip, save random weights, and return its name and the file.

    Its activation and preprocessing are those of most models of the library.
    """
    import open_clip

    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8},
        "text_cfg": {"context_length": 8, "width": 64, "heads": 1, "layers": 1},
    }
    config["text_cfg"]["vocab_size"] = vocabulary
    (folder / "small-open-clip.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / "small-open-clip.json")
    torch.manual_seed(0)
    model = open_clip.factory.CLIP(**config)
    file = folder / "weights.pt"
    torch.save(model.state_dict(), file)
    return "small-open-clip", file


def sentence_transformers_folder(folder: Path) -> Path:
    """Save a CLIP of sentence-transformers, with a dense layer and a normalisation after it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize

    clip = transformers_folder(folder / "clip", "clip")
    torch.manual_seed(1)
    modules = [*SentenceTransformer(str(clip), device="cpu"), Dense(16, 12), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "whole"))
    return folder / "whole"
