"""Encoders of this package in MTEB, the benchmark of embeddings.

    import mteb
    from retrieval_mteb import MtebEncoder

    mteb.evaluate(MtebEncoder("runs/photos"), mteb.get_task("CUB200I2IRetrieval"))

There is no entry point, because MTEB needs a class and no hook. The extra `mteb` installs MTEB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import retrieval
import torch
from retrieval.errors import BundleError, DataError, needing
from retrieval.results import Bundle, BundleEncoder
from torch import Tensor

with needing("retrieval_mteb needs mteb, which is not installed", "mteb"):
    from mteb.models import ModelMeta
    from mteb.models.model_meta import ScoringFunction
    from mteb.types import PromptType


class MtebEncoder:
    """A bundle, run or pretrained backbone as an encoder of images, MTEB's `EncoderProtocol`.

    Similarity is minus the distance by which the bundle orders search results. MTEB stores results
    under the SHA-256 of the bundle as the model's revision. A run or backbone is exported first.

    Attributes:
        bundle: the opened bundle, which encodes the images.
        mteb_model_meta: MTEB's record of the model.
    """

    def __init__(self, source: str | Path | retrieval.Encoder) -> None:
        """Open a bundle.

        Args:
            source: what `retrieval.load` takes, or an encoder that it returned.

        Raises:
            DataError: the encoder takes vectors, not images.
            BundleError: distances in the bundle depend on the number of hits (merge "score").
        """
        if isinstance(source, retrieval.Encoder):
            encoder = source
        else:
            encoder = retrieval.load(source)
        if isinstance(encoder, BundleEncoder):
            self.bundle = encoder.bundle
        else:
            with encoder.exported() as folder:
                self.bundle = Bundle.open(folder)
        manifest = self.bundle.manifest
        if manifest.input.kind != "image":
            raise DataError(
                f"{source} takes vectors of {manifest.input.shape[0]} features, and MTEB has images"
                " and texts. Evaluate it with retrieval.evaluate."
            )
        if manifest.merge == "score":
            raise BundleError(
                f"{source} merges sub-spaces by score, and such distances depend on the number of"
                " hits, so MTEB cannot rank by them. Evaluate the run with retrieval evaluate."
            )
        self.mteb_model_meta = ModelMeta.create_empty(
            {
                "name": f"retrieval/{manifest.name}",
                "revision": self.bundle.sha256,
                "embed_dim": manifest.code or manifest.vector,
                "framework": ["ONNX"],
                "modalities": ["image"],
                "similarity_fn_name": ScoringFunction.CUSTOM,
            }
        )

    def encode(
        self, inputs: Any, *, prompt_type: PromptType | None = None, **options: Any
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the embeddings (N, D) of a loader's N images.

        They are the codes that the rescorer compares, if the bundle has one; otherwise the vectors
        of an index, or those of its queries if `prompt_type` says so. MTEB's other arguments are
        ignored; its loader makes the batches.
        """
        parts = []
        for batch in inputs:
            encoded = self.bundle.encode_each(batch["image"], progress=False)
            if encoded.code is not None:
                parts.append(encoded.code)
            elif prompt_type == PromptType.query:
                parts.append(encoded.query)
            else:
                parts.append(encoded.vector)
        return np.concatenate(parts)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return minus the distances (Q, N) of queries (Q, D) to items (N, D)."""
        queries = torch.as_tensor(embeddings1).double()
        items = torch.as_tensor(embeddings2).double()
        manifest = self.bundle.manifest
        if self.bundle.has_code:
            # One query at a time: the rescorer may need much memory for each pair.
            rows = [self.bundle.rescore(code[None], items.numpy()) for code in queries.numpy()]
            return -torch.from_numpy(np.concatenate(rows))
        if manifest.distance.measure == "inner":
            # Distances, √(2 − 2 p), fall as the products p rise.
            return queries @ items.T
        # The distance in several sub-spaces is the smallest of them.
        spans = [slice(s.start, s.stop) for s in manifest.subspaces] or [slice(None)]
        nearness = [-torch.cdist(queries[:, span], items[:, span]) for span in spans]
        return torch.stack(nearness).amax(dim=0)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Return minus the distance (N,) of each of N pairs of embeddings (N, D)."""
        pairs = zip(embeddings1, embeddings2, strict=True)
        return torch.cat([self.similarity(first[None], second[None])[0] for first, second in pairs])
