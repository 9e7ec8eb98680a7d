"""Off-the-shelf models: towers of other libraries as backbones, and encoders at addresses."""

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


@hookimpl
def retrieval_text_encoders() -> Factories:
    """Text towers of transformers and open_clip."""
    return {
        "open_clip": "retrieval_models.towers:open_clip_text",
        "transformers": "retrieval_models.towers:transformers_text",
    }


@hookimpl
def retrieval_encoders() -> Factories:
    """HTTP endpoints, vectors in files, and models of MTEB."""
    return {
        "http": "retrieval_models.endpoint:Endpoint",
        "https": "retrieval_models.endpoint:Endpoint",
        "mteb": "retrieval_models.mteb_models:MtebModel",
        "vectors": "retrieval_models.vectors:Vectors",
    }
