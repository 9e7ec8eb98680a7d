"""Encoders from images to embeddings: the base class and the encoder of a bundle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from retrieval.base.arrays import Floats32, as_rows
from retrieval.base.progress import Progress
from retrieval.bundle.bundle import Bundle
from retrieval.errors import BundleError
from retrieval.images.image_files import listed_images

Embeddings = Floats32


class Encoder(ABC):
    """Base class of the encoders that `retrieval.load` returns for a backbone, run or bundle."""

    @abstractmethod
    def encode(self, images: Any, *, batch_size: int = 32, progress: Progress = True) -> Embeddings:
        """Return the embeddings (N, D) of N images, float32, as an index stores them.

        Args:
            images: one image, a list of images, or a folder. An image is a path, an encoded image's
                bytes, a Pillow image, pixels (H, W) or (H, W, 3) as uint8 or as real numbers from 0
                to 1, or, in a list, a tensor of such pixels with channels first. An array (N, H, W)
                or (N, H, W, 3), or a tensor (N, H, W) or (N, 3, H, W), is N images; (3, H, W) alone
                is refused, because it may be one colour image or three grey ones. A folder's
                images, subfolders included, are encoded in the order in which
                `retrieval.plugin.find_images` lists them. An encoder trained on vectors takes rows
                (N, F).
            batch_size: number of items per batch.
            progress: True shows a bar, False nothing; a function is called with (what, done,
                total).

        Raises:
            DataError: an image cannot be used; the message names it.
        """

    def encode_text(self, texts: Sequence[str]) -> Embeddings:
        """Return the embeddings (N, D) of N texts, in the space of those of images.

        Args:
            texts: one text or several.

        Raises:
            BundleError: this encoder takes no texts.
            DataError: a text cannot be used; the message names it.
        """
        raise BundleError(
            f"{self!r} has no text encoder. Train a model with images and their texts ([text])."
        )

    @abstractmethod
    def exported(self) -> AbstractContextManager[Path]:
        """Return a context manager that yields a folder with the encoder's bundle."""


class BundleEncoder(Encoder):
    """The encoder of a bundle, run by ONNX Runtime.

    Attributes:
        path: folder of the bundle.
        bundle: the opened bundle.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.path = bundle.path
        self.bundle = bundle

    def __repr__(self) -> str:
        return repr(self.bundle).replace("Bundle", "Encoder", 1)

    def encode(self, images: Any, *, batch_size: int = 32, progress: Progress = True) -> Embeddings:
        """Return the embeddings (N, D) of N images; see `Encoder.encode`."""
        if self.bundle.manifest.input.kind == "features":
            return self.bundle.encode(as_rows(images), batch_size=batch_size).vector
        return self.bundle.encode_images(
            listed_images(images), batch_size=batch_size, progress=progress
        )

    def encode_text(self, texts: Sequence[str]) -> Embeddings:
        """Return the embeddings (N, D) of N texts; see `Encoder.encode_text`."""
        return self.bundle.encode_text(texts).vector

    def exported(self) -> AbstractContextManager[Path]:
        """Return a context manager that yields the bundle's folder."""
        return nullcontext(self.path)
