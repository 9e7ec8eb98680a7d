"""The texts of a dataset's items, and the texts and right answers of a training batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from retrieval.base.arrays import Bools, Ints
from retrieval.base.progress import Meter
from retrieval.errors import DataError, did_you_mean, valid_text
from retrieval.model.contracts import TripletIndices
from retrieval.model.model import evaluation_mode

if TYPE_CHECKING:
    from retrieval.data.datasets import Dataset
    from retrieval.model.model import TextPart
    from retrieval.recipe.tables import Text

_TEXT_KEY = 4
"""Keeps these draws independent of the three kinds of `augment`."""
MAX_CHARACTERS = 10_000
"""Number of characters to which a longer text is cut, as encoders read hundreds at most."""
BATCH = 64
"""Number of texts that are encoded at a time."""


@dataclass(frozen=True)
class TextLabels:
    """The labels of a training batch of B images with T texts.

    Attributes:
        classes: class ids (B,).
        own: (B,); the texts with the same number in `of_texts` are right for the image.
        of_texts: (T,).
        texts: tokens (T, 2, L), or a frozen encoder's features (T, F).
        pairs: if such numbers cannot say which texts are right, as when an image has two texts and
            another image one of them: the (P,) images and texts of right and of wrong pairs.
    """

    classes: Tensor
    own: Tensor
    of_texts: Tensor
    texts: Tensor
    pairs: tuple[Tensor, Tensor, Tensor, Tensor] | None

    def __len__(self) -> int:
        return len(self.own)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """Return the labels on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def right_among(self, indices: TripletIndices | None) -> TripletIndices | None:
        """Return a miner's pairs or triplets without those that `pairs` contradicts."""
        if indices is None or self.pairs is None:
            return indices
        right = torch.zeros(len(self.own), len(self.of_texts), dtype=torch.bool)
        right = right.to(self.own.device)
        right[self.pairs[:2]] = True
        if len(indices) == 3:
            anchor, positive, negative = indices
            is_right = right[anchor, positive] & ~right[anchor, negative]
            return anchor[is_right], positive[is_right], negative[is_right]
        anchor_1, positive, anchor_2, negative = indices
        is_right = right[anchor_1, positive]
        is_wrong = ~right[anchor_2, negative]
        return anchor_1[is_right], positive[is_right], anchor_2[is_wrong], negative[is_wrong]

    def pin_memory(self) -> Self:
        """Return the labels in pinned memory, which a GPU copies asynchronously."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Any) -> Self:
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                changed[field.name] = tuple(map(change, value))
            elif value is not None:
                changed[field.name] = change(value)
        return replace(self, **changed)


class ItemTexts:
    """The distinct texts of a dataset's items.

    Args:
        dataset: the dataset, whose metadata hold the texts.
        table: the recipe's `[text]`.

    Attributes:
        distinct: the texts, each once.
        of_item: for each item of the dataset, the positions of its texts in `distinct`.

    Raises:
        DataError: no item has a text.
    """

    def __init__(self, dataset: Dataset, table: Text) -> None:
        number_of: dict[str, int] = {}
        self.of_item: list[list[int]] = []
        metadata = dataset.metadata or [{}] * len(dataset)
        for row in metadata:
            texts = dict.fromkeys(_texts(row.get(table.column), table.separator))
            self.of_item.append([number_of.setdefault(text, len(number_of)) for text in texts])
        self.distinct = list(number_of)
        if not self.distinct:
            columns = sorted({str(name) for row in metadata for name in row})
            raise DataError(
                f"[text] column: no item has a text in a metadata column '{table.column}' (the data"
                f" have: {', '.join(columns) or 'none'}).{did_you_mean(table.column, columns)}"
            )

    def of(self, items: Ints | Sequence[int]) -> list[list[str]]:
        """Return the texts of each item."""
        return [[self.distinct[number] for number in self.of_item[item]] for item in items]

    def numbers(self, items: Ints | Sequence[int]) -> Ints:
        """Return the positions in `distinct` of all texts of the items, each once, ascending."""
        numbers = [number for item in items for number in self.of_item[item]]
        return np.unique(np.array(numbers, np.int64))

    def drawn(self, items: Ints, key: tuple[int, int, int]) -> tuple[Ints, Bools]:
        """Draw a text of each item of a batch that has one.

        Args:
            items: (B,), the batch's items.
            key: seed, epoch and number of the batch.

        Returns:
            The T drawn texts, as ascending positions in `distinct`, each once; and which of them
            are right for each item (B, T).
        """
        seed, epoch, batch = key
        random = np.random.default_rng([seed % 2**64, epoch, batch, _TEXT_KEY])
        chosen = set()
        for item, draw in zip(items, random.random(len(items)), strict=True):
            if texts := self.of_item[item]:
                chosen.add(texts[int(draw * len(texts))])
        numbers = np.array(sorted(chosen), np.int64)
        column_of = {number: column for column, number in enumerate(numbers.tolist())}
        right = np.zeros((len(items), len(numbers)), bool)
        for row, item in enumerate(items):
            for number in self.of_item[item]:
                if number in column_of:
                    right[row, column_of[number]] = True
        return numbers, right


def _texts(value: Any, separator: str) -> list[str]:
    """Return the texts in a value of metadata: text with separators, a list, or `None`."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        parts = [str(part) for part in value if part is not None]
    else:
        parts = str(value).split(separator)
    texts = [valid_text(part).replace("\0", " ").strip()[:MAX_CHARACTERS] for part in parts]
    return [text for text in texts if text]


class EncodedTexts:
    """The texts of a dataset's items as a text encoder takes them.

    Args:
        texts: the texts.
        part: the model's part for texts. A frozen encoder computes the features of all texts now.
        device: where the part is.
        ahead: whether a frozen encoder computes them; otherwise all texts stay tokens.
    """

    def __init__(
        self, texts: ItemTexts, part: TextPart, device: torch.device, ahead: bool = True
    ) -> None:
        self.texts = texts
        self.part = part
        self.device = device
        self.features: Tensor | None = None
        if part.frozen and ahead:
            self.features = self._all_features()

    def _all_features(self) -> Tensor:
        """Return the features (N, F) of all texts, on the CPU; long texts go together."""
        texts = self.texts.distinct
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        parts = []
        self.part.to(self.device)
        meter = Meter("texts", len(texts), "texts")
        with evaluation_mode(self.part), torch.no_grad(), meter:
            for start in range(0, len(order), BATCH):
                chunk = [texts[number] for number in order[start : start + BATCH]]
                parts.append(self.part.features(self.part.tokens(chunk).to(self.device)).cpu())
                meter.update(len(chunk))
        return torch.cat(parts)[np.argsort(order)]

    def inputs(self, numbers: Ints) -> Tensor:
        """Return features (T, F) or tokens (T, 2, L) of the texts at some positions."""
        if self.features is not None:
            return self.features[numbers]
        return self.part.tokens([self.texts.distinct[number] for number in numbers])

    def codes(self, numbers: Ints, part: TextPart) -> Tensor:
        """Return the codes (T, C) of texts by `part` in evaluation mode, on the CPU."""
        codes = []
        with evaluation_mode(part), torch.inference_mode():
            for start in range(0, len(numbers), BATCH):
                inputs = self.inputs(numbers[start : start + BATCH]).to(self.device)
                codes.append(codes_of(part, inputs).float().cpu())
        return torch.cat(codes)

    def labels(self, items: Ints, classes: Ints, key: tuple[int, int, int]) -> TextLabels:
        """Return the labels of a batch; see `ItemTexts.drawn` for the arguments."""
        numbers, right = self.texts.drawn(items, key)
        count = len(numbers)
        inputs = torch.empty(0, 1)
        own = np.arange(len(items)) + count
        of_texts = np.arange(count)
        pairs: Any = None
        if count:
            inputs = self.inputs(numbers)
            # an image, and a text, has the number of the first text that is right for the image
            own = np.where(right.any(1), right.argmax(1), own)
            of_texts = own[right.argmax(0)]
            if not np.array_equal(own[:, None] == of_texts, right):
                listed = [*np.nonzero(right), *np.nonzero(~right)]
                pairs = tuple(torch.from_numpy(numbers) for numbers in listed)
        numbers_of_images = torch.from_numpy(own)
        return TextLabels(
            torch.from_numpy(classes), numbers_of_images, torch.from_numpy(of_texts), inputs, pairs
        )


def codes_of(part: TextPart, inputs: Tensor) -> Tensor:
    """Return the codes (T, C) of tokens (T, 2, L), or of a frozen encoder's features (T, F)."""
    if inputs.ndim == 3:
        inputs = part.features(inputs)
    codes: Tensor = part.head(inputs)
    return codes
