"""A pretrained backbone's bundle in one call."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrieval.export.export_backbone import BackboneEncoder
from retrieval.results import Bundle


def export_backbone(
    name: str,
    output: Path,
    *,
    parameters: Mapping[str, Any] | None = None,
    plugins: Sequence[str] = (),
    random_weights: bool = False,
    **options: Any,
) -> Bundle:
    """Load a backbone and export it."""
    encoder = BackboneEncoder(name, parameters, plugins, random_weights)
    return encoder.export(output, **options).bundle
