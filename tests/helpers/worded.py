"""A plugin of digits with texts, and of a small text encoder."""

from __future__ import annotations

from typing import Any

import torch
from retrieval.plugin import ArrayDataset, Dataset, TextEncoder, hookimpl
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
WORDS = ["[PAD]", "[UNK]", *NAMES, "a", "digit", "even", "odd"]


def texts_of(digit: int) -> list[str]:
    """Texts of a digit: two of its own, and one that it shares with others."""
    return [f"a {NAMES[digit]}", f"digit {NAMES[digit]}", ("even", "odd")[digit % 2]]


def digits(items: int = 600, shared: bool = True, bare: int = 0) -> Dataset:
    """Scikit-learn's digits with their texts, of which the first `bare` have none."""
    from sklearn.datasets import load_digits

    data = load_digits()
    rows: list[dict[str, Any]] = []
    for number, digit in enumerate(data.target[:items]):
        texts = texts_of(int(digit))[: 3 if shared else 2]
        rows.append({"text": "" if number < bare else "\n".join(texts), "several": texts})
    pixels = (data.images[:items] * 15.9).astype("uint8")
    labels = [str(label) for label in data.target[:items]]
    return ArrayDataset(pixels, labels, metadata=rows)


class Words(TextEncoder):
    """The mean of learned vectors of words, without those of padding."""

    length = 6

    def __init__(self, width: int = 8, masked: bool = True) -> None:
        super().__init__()
        tokenizer = Tokenizer(
            models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.enable_truncation(self.length)
        tokenizer.enable_padding()
        self.tokenizer = tokenizer.to_str().encode()
        self.masked = masked
        self.vectors = nn.Embedding(len(WORDS), width)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        kept = (mask if self.masked else torch.ones_like(mask))[..., None].float()
        return (self.vectors(ids) * kept).sum(1) / kept.sum(1)


class ImagesOnly(nn.Module):
    """A miner that takes no reference set."""

    def forward(self, embeddings: Tensor, labels: Tensor) -> Any:
        del embeddings, labels


retrieval_datasets = hookimpl(lambda: {"digits": digits})
retrieval_miners = hookimpl(lambda: {"images_only": ImagesOnly})
retrieval_text_encoders = hookimpl(lambda: {"words": Words})
