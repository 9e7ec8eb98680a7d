"""The identity of an embedding, which every file of its vectors carries.

`docs/identity.md` specifies it for other programs.
"""

from __future__ import annotations

import json
from typing import Any

from retrieval.bundle.bundle import Bundle

IDENTITY_KEY = b"embedding"
"""Key of the identity in the metadata of a Parquet file's schema."""
IDENTITY_FORMAT = 1


def embedding_identity(bundle: Bundle) -> dict[str, Any]:
    """Return the identity of the vectors that a bundle computes, as JSON values.

    `bundle` and `variant` name the embedding. `probe` is the bundle's probe: the pattern, and the
    vector of the encoder that runs. It is `None` if the bundle has none.
    """
    manifest = bundle.manifest
    probe = None
    if manifest.probe is not None:
        vector: str | None = manifest.probe.vector
        if bundle.variant is not None:
            vector = manifest.probe.variants.get(bundle.variant)
        if vector is not None:
            probe = {"pattern": manifest.probe.pattern, "vector": vector}
    return {
        "format": IDENTITY_FORMAT,
        "bundle": bundle.sha256,
        "variant": bundle.variant,
        "vector": manifest.vector,
        "normalized": manifest.normalized,
        "distance": manifest.distance.name,
        "probe": probe,
    }


def identity_metadata(bundle: Bundle) -> dict[bytes, bytes]:
    """Return the identity as an entry of a Parquet file's metadata."""
    return {IDENTITY_KEY: json.dumps(embedding_identity(bundle)).encode()}
