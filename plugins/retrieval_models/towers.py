"""Towers of transformers, open_clip and sentence-transformers: for images, and for texts.

Each image tower has the preprocessing of its library, as far as `Preprocessing` can express it.
Its settings alone are not trusted: the library and `Preprocessing` prepare two images, and their
pixels are compared.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image
from retrieval.errors import DataError, RecipeError, did_you_mean, first_line, needing
from retrieval.helpers import Network, fetch, hub_from_cache_when_away, interpolation, some
from retrieval.plugin import Backbone, Preprocessing, TextEncoder
from torch import Tensor, float32, nn
from torch.nn import functional

T = TypeVar("T")
_LEVELS = 1.0
"""Largest mean difference, in levels of 255, at which the pixels of an image of noise are equal.

The pixels of torchvision and of Pillow differ by .01. If one crop begins a pixel off, they differ
by more than 5.
"""
_WIDE = 384
"""From this size on, ConvNeXt's processor stretches images instead of cropping them."""


def transformers_model(model: str, pretrained: bool = True, normalise: bool = False) -> Backbone:
    """Build an image model of Hugging Face transformers: ViT, DINOv2, ResNet, CLIP, SigLIP, ….

    The features are the model's own embedding: of a model of images and texts, such as CLIP, what
    its `get_image_features` returns, else its pooled output. A model whose weights have no pooler,
    such as a ViT that was trained to classify, has its class token instead.

    Args:
        model: name on Hugging Face's hub, from which the files are downloaded once, or a folder
            that `save_pretrained` wrote with the model and its image processor.
        pretrained: whether to load the weights.
        normalise: whether to scale an image's features to length 1; see `core.torchvision`.

    Raises:
        DataError: the model cannot be loaded, or its weights are incomplete.
        ValueError: its preprocessing cannot be expressed, or it returns no vector.
        MissingDependency: transformers is not installed.
    """
    transformers = _library("transformers")

    def load() -> tuple[Any, Any, list[str]]:
        processor = transformers.AutoImageProcessor.from_pretrained(model)
        if not pretrained:
            config = transformers.AutoConfig.from_pretrained(model)
            return transformers.AutoModel.from_config(config), processor, []
        built, report = transformers.AutoModel.from_pretrained(
            model, dtype=float32, output_loading_info=True
        )
        return built, processor, sorted(report["missing_keys"])

    built, processor, missing = _loaded(model, load)
    lacking = [name for name in missing if not name.startswith("pooler.")]
    if lacking:
        raise DataError(f"{model} lacks weights of its network: {some(lacking, 3)}.")
    tower = TransformersTower(built, class_token=bool(missing))
    return Network(tower, _processor_preprocessing(processor, model), model, normalise)


class TransformersTower(nn.Module):
    """An image model of transformers, or the half of a model of images and texts that reads images.

    Args:
        model: the model, whose half for texts is dropped.
        class_token: whether the features are the class token instead of the pooled output.
    """

    def __init__(self, model: Any, class_token: bool = False) -> None:
        super().__init__()
        for name in ("text_model", "text_projection", "logit_scale", "logit_bias"):
            if hasattr(model, name):
                delattr(model, name)
        if class_token:
            model.pooler = None
        self.model = model
        self.class_token = class_token

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, F) of images (B, 3, H, W)."""
        output = getattr(self.model, "get_image_features", self.model)(pixel_values=x)
        features: Tensor | None = output.get("pooler_output")
        if self.class_token:
            features = output.last_hidden_state[:, 0]
        if features is None:
            raise ValueError("it has no pooled output")
        return features.flatten(1)


def _processor_preprocessing(processor: Any, name: str) -> Preprocessing:
    """Return the preprocessing of an image processor of transformers; see `_checked`."""
    settings = processor.to_dict()
    size = settings.get("size") or {}
    shorter = size.get("shortest_edge")
    if settings.get("do_center_crop"):
        size = settings["crop_size"]
    elif shorter is not None:
        size = {"height": shorter, "width": shorter}
        if shorter < _WIDE:
            shorter = int(shorter / settings.get("crop_pct", 1))
        else:
            shorter = None

    def prepared(image: Image.Image) -> Any:
        return processor(images=image, return_tensors="np")["pixel_values"][0]

    def read() -> Preprocessing:
        return Preprocessing(
            (size["height"], size["width"]),
            3,
            tuple(settings["image_mean"]),
            tuple(settings["image_std"]),
            interpolation(Image.Resampling(settings["resample"]).name),
            shorter,
        )

    return _checked(read, prepared, name)


def _checked(
    read: Callable[[], Preprocessing], prepared: Callable[[Image.Image], Any], name: str
) -> Preprocessing:
    """Return the preprocessing that `read` gives, if it gives the pixels of the model's library.

    Args:
        read: reads the library's settings.
        prepared: what the library does to an image: normalised pixels (3, H, W).
        name: name of the model in error messages.

    Raises:
        ValueError: it cannot be read, or two pictures of noise get other pixels.
    """
    reason = "their pixels differ"
    try:
        preprocessing = read()
        mean, std = (np.array(x)[:, None, None] for x in (preprocessing.mean, preprocessing.std))
        random = np.random.default_rng(0)
        for height, width in ((61, 97), (330, 200)):
            noise = random.integers(0, 256, (height, width, 3), np.uint8)
            image = Image.fromarray(noise)
            pixels = (np.asarray(prepared(image)) * std + mean) * 255
            # Each library rounds half a pixel in its own way, so the crop may begin a pixel apart.
            shifted = [
                np.roll(pixels, shift, (1, 2))[:, 1:-1, 1:-1] - preprocessing(image)[:, 1:-1, 1:-1]
                for shift in product((0, 1, -1), repeat=2)
            ]
            # `not … <=` also refuses NaN.
            if not min(np.abs(difference).mean() for difference in shifted) <= _LEVELS:
                break
        else:
            return preprocessing
    except (KeyError, TypeError, ValueError) as error:
        reason = first_line(error)
    raise ValueError(
        f"the preprocessing of {name} cannot be expressed as resizing, a centre crop, mean and"
        f" std ({reason}). Choose another model, or embed the images by its library, and pass"
        " the vectors"
    )


def open_clip_model(model: str, weights: str | None = None, normalise: bool = False) -> Backbone:
    """Build the image tower of a model of open_clip, with its projection.

    The features are what the library's `encode_image` returns. If the weights were trained with the
    activation QuickGELU, as OpenAI's were, the tower has it.

    Args:
        model: the model's name in open_clip, such as "ViT-B-32".
        weights: tag of pretrained weights in open_clip, such as "laion2b_s34b_b79k", which are
            downloaded once, or a file of weights. `None` means random weights.
        normalise: whether to scale an image's features to length 1; see `core.torchvision`.

    Raises:
        RecipeError: open_clip has no such model, or the model no such weights.
        DataError: the weights cannot be loaded.
        ValueError: the preprocessing cannot be expressed.
        MissingDependency: open_clip is not installed.
    """
    open_clip = _library("open_clip")
    built = _open_clip(model, weights, "backbone")
    settings = open_clip.get_model_preprocess_cfg(built.visual)
    prepared = open_clip.transform.image_transform_v2(
        open_clip.transform.PreprocessCfg(**settings), is_train=False
    )

    def read() -> Preprocessing:
        size = settings["size"]
        height, width = (size, size) if isinstance(size, int) else size
        shorter = None
        if settings["resize_mode"] == "shortest":
            shorter = min(height, width)
        return Preprocessing(
            (height, width),
            3,
            settings["mean"],
            settings["std"],
            interpolation(settings["interpolation"]),
            shorter,
        )

    preprocessing = _checked(read, prepared, model)
    return Network(built.visual, preprocessing, model, normalise)


def _open_clip(model: str, weights: str | None, table: str) -> Any:
    """Return a model of open_clip; `table` is the recipe's table in error messages."""
    open_clip = _library("open_clip")
    names = open_clip.list_models()
    if model not in names:
        raise RecipeError(
            f"[{table}] model: there is no open_clip model '{model}'." + did_you_mean(model, names)
        )
    tags = open_clip.list_pretrained_tags_by_model(model)
    is_file = weights is not None and Path(weights).is_file()
    if weights is not None and weights not in tags and not is_file:
        raise RecipeError(
            f"[{table}] weights: {model} has no weights '{weights}', and there is no such"
            f" file; it has: {some(tags, 10) or 'none'}.{did_you_mean(weights, tags)}"
        )
    tag = open_clip.get_pretrained_cfg(model, weights) if weights in tags else {}

    def load() -> Any:
        return open_clip.create_model(
            model, pretrained=weights, force_quick_gelu=tag.get("quick_gelu", False)
        )

    if weights is None:
        return load()
    return _loaded(weights, load)


class TextTower(TextEncoder):
    """The half of a model of images and texts that reads texts.

    Args:
        model: the model, whose half for images is dropped.
        features: returns features (N, F) of the model and ids (N, L).
        tokenizer: the tokenizer, of the package `tokenizers`, with truncation and padding.
        normalise: whether to scale a text's features to length 1.
    """

    def __init__(
        self,
        model: Any,
        features: Callable[[Any, Tensor], Tensor],
        tokenizer: Any,
        normalise: bool,
    ) -> None:
        super().__init__()
        for name in ("visual", "vision_model", "visual_projection"):
            if hasattr(model, name):
                delattr(model, name)
        self.model = model
        self.normalise = normalise
        self.length = int(tokenizer.truncation["max_length"])
        self.tokenizer = tokenizer.to_str().encode()
        self._features = features

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return features (N, F) of ids (N, L).

        The mask is not read: these models look only back from the text's end, or were trained on
        texts that are padded to the full length.
        """
        features = self._features(self.model, ids)
        if self.normalise:
            return functional.normalize(features)
        return features


def transformers_text(model: str, normalise: bool = False) -> TextEncoder:
    """Build the text tower of a model of Hugging Face transformers, such as CLIP or SigLIP.

    The features are what its `get_text_features` returns, in the space of the image tower that the
    backbone `models.transformers` builds of the same model.

    Args:
        model: name on Hugging Face's hub, from which the files are downloaded once, or a folder
            that `save_pretrained` wrote with the model and its tokenizer.
        normalise: whether to scale a text's features to length 1.

    Raises:
        DataError: the model cannot be loaded.
        ValueError: the model does not embed texts, or has no tokenizer of the package `tokenizers`.
        MissingDependency: transformers is not installed.
    """
    transformers = _library("transformers")

    def load() -> tuple[Any, Any]:
        built = transformers.AutoModel.from_pretrained(model, dtype=float32)
        return built, transformers.AutoTokenizer.from_pretrained(model)

    built, library_tokenizer = _loaded(model, load)
    tokenizer = getattr(library_tokenizer, "backend_tokenizer", None)
    if not hasattr(built, "get_text_features") or tokenizer is None:
        raise ValueError(f"{model} does not embed texts, or has no fast tokenizer")
    length = built.config.text_config.max_position_embeddings
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(
        pad_id=library_tokenizer.pad_token_id,
        pad_token=library_tokenizer.pad_token,
        # SigLIP's text is its last position, up to which every text was padded in training
        length=length if built.config.model_type.startswith("siglip") else None,
    )

    def features(tower: Any, ids: Tensor) -> Tensor:
        output: Tensor = tower.get_text_features(input_ids=ids).pooler_output
        return output

    return TextTower(built, features, tokenizer, normalise)


def open_clip_text(model: str, weights: str | None = None, normalise: bool = False) -> TextEncoder:
    """Build the text tower of a model of open_clip, with its projection.

    The features are what the library's `encode_text` returns, in the space of the image tower that
    the backbone `models.open_clip` builds of the same model and weights.

    Args:
        model: the model's name in open_clip, such as "ViT-B-32".
        weights: see the backbone `models.open_clip`.
        normalise: whether to scale a text's features to length 1.

    Raises:
        RecipeError: open_clip has no such model, or the model no such weights.
        DataError: the weights cannot be loaded.
        ValueError: the model's tokenizer cannot be expressed by the package `tokenizers`.
        MissingDependency: open_clip is not installed.
    """
    open_clip = _library("open_clip")
    built = _open_clip(model, weights, "text")
    library_tokenizer = open_clip.get_tokenizer(model)
    inner = getattr(library_tokenizer, "tokenizer", None)
    tokenizer = _clip_tokenizer(library_tokenizer) if inner is None else inner.backend_tokenizer
    tokenizer.enable_truncation(library_tokenizer.context_length)
    tokenizer.enable_padding(
        pad_id=0 if inner is None else inner.pad_token_id, length=library_tokenizer.context_length
    )
    samples = ["a red mug", "Ünder 2 RED mugs, it's: don't?!", "mug " * 100, "東京 42"]
    ids = [encoding.ids for encoding in tokenizer.encode_batch(samples)]
    if ids != library_tokenizer(samples).tolist():
        raise ValueError(f"the tokenizer of {model} cannot be expressed by the package tokenizers")

    def features(tower: Any, ids: Tensor) -> Tensor:
        output: Tensor = tower.encode_text(ids)
        return output

    return TextTower(built, features, tokenizer, normalise)


def _clip_tokenizer(library_tokenizer: Any) -> Any:
    """Return open_clip's tokenizer of CLIP as one of the package `tokenizers`."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(
        models.BPE(
            vocab=library_tokenizer.encoder,
            merges=[*library_tokenizer.bpe_ranks],
            end_of_word_suffix="</w>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFC(),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Lowercase(),
        ]
    )
    words = Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    start, end = "<start_of_text>", "<end_of_text>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        special_tokens=[
            (start, library_tokenizer.sot_token_id),
            (end, library_tokenizer.eot_token_id),
        ],
    )
    return tokenizer


def sentence_transformers_model(model: str, normalise: bool = False) -> Backbone:
    """Build the image half of a sentence-transformers model of images and texts, such as CLIP.

    The features are what the library's `encode` returns for an image: modules after the tower, such
    as a dense layer or a normalisation, are part of the backbone.

    Args:
        model: name on Hugging Face's hub, from which the files are downloaded once, or a folder
            that `save` wrote.
        normalise: whether to scale an image's features to length 1; see `core.torchvision`.

    Raises:
        DataError: the model cannot be loaded.
        ValueError: the model does not embed images, or its preprocessing cannot be expressed.
        MissingDependency: sentence-transformers is not installed.
    """
    library = _library("sentence_transformers")
    first, *further = _loaded(model, lambda: library.SentenceTransformer(model, device="cpu"))
    tower = getattr(first, "auto_model", None)
    if not hasattr(tower, "get_image_features"):
        raise ValueError(f"{model} does not embed images, or is no model of images and texts")
    preprocessing = _processor_preprocessing(first.processor.image_processor, model)
    network = _Modules(TransformersTower(tower), further)
    return Network(network, preprocessing, model, normalise)


class _Modules(nn.Module):
    """A tower, and the modules of sentence-transformers after it."""

    def __init__(self, tower: nn.Module, further: list[nn.Module]) -> None:
        super().__init__()
        self.tower = tower
        self.further = nn.ModuleList(further)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, F) of images (B, 3, H, W)."""
        passed: dict[str, Tensor] = {"sentence_embedding": self.tower(x)}
        for module in self.further:
            passed = module(passed)
        return passed["sentence_embedding"]


def _library(name: str) -> Any:
    with needing(f"{name} is not installed", name.replace("_", "-")):
        return importlib.import_module(name)


def _loaded(model: str, load: Callable[[], T]) -> T:
    """Return what `load` reads from a file or folder, or else from the hub or its cache.

    Raises:
        DataError: it cannot be read.
    """
    with _quiet():
        if not Path(model).exists():
            with hub_from_cache_when_away():
                return fetch(f"The files of {model}", "name a folder or file that holds them", load)
        try:
            return load()
        except Exception as error:  # each library raises its own errors for a damaged file
            raise DataError(f"{model} cannot be loaded: {first_line(error)}.") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager without the bars and reports that transformers prints while it loads."""
    messages = sys.modules["transformers"].logging if "transformers" in sys.modules else None
    if messages is None:
        yield
        return
    verbosity = messages.get_verbosity()
    shows_bars = messages.is_progress_bar_enabled()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(verbosity)
        if shows_bars:
            messages.enable_progress_bar()
