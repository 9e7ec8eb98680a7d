"""Image models of other libraries: their towers as backbones."""

from __future__ import annotations

from retrieval.plugin import Factories, hookimpl


@hookimpl
def retrieval_backbones() -> Factories:
    """Image towers of transformers, open_clip and sentence-transformers."""
    return {
        "open_clip": "retrieval_models.towers:open_clip_model",
        "sentence_transformers": "retrieval_models.towers:sentence_transformers_model",
        "transformers": "retrieval_models.towers:transformers_model",
    }
