"""Whether an opened bundle embeds its probe as it did when it was made."""

from __future__ import annotations

import numpy as np

from retrieval.errors import DataError
from retrieval.serving.bundle import Bundle
from retrieval.serving.manifest import Manifest
from retrieval.serving.probe import Probe, coded, input_of, made_up, pattern_of, vector_of

_LEAST = 1e-4  # of the vector's length
_CUDA = 1e-2  # likewise: ONNX Runtime multiplies there with TF32, 10 bits
_LEAST_DRIFT = 1e-3  # 1 - cosine: processors saturate int8 differently


def probe_of(bundles: dict[str | None, Bundle], spread: tuple[float, float]) -> Probe:
    """Return a probe with its vectors as a new bundle gives them.

    Args:
        bundles: the bundle opened with each variant, and, under None, without.
        spread: mean and standard deviation of features.
    """
    given = bundles[None].manifest.input
    pattern = made_up(given.kind, given.shape, spread)
    made = {
        name: coded(one.encode(input_of(pattern, given.shape)).vector[0]) for name, one in bundles.items()
    }
    return Probe(
        pattern=coded(pattern),
        vector=made[None],
        variants={name: vector for name, vector in made.items() if name is not None},
    )


def probe_fault(bundle: Bundle) -> str | None:
    """Return why a bundle's encoder is not what it was when the bundle was made; None where it is, or where the bundle has no probe."""
    said = bundle.manifest
    if said.probe is None:
        return None
    text = said.probe.vector if bundle.variant is None else said.probe.variants.get(bundle.variant)
    pattern = pattern_of(said.probe, said.input.shape)
    if text is None or pattern is None or len(expected := vector_of(text)) != said.vector:
        return "The bundle's probe does not fit its encoder. Export the bundle again."
    try:
        vector = bundle.encode(input_of(pattern, said.input.shape)).vector[0]
    except DataError:
        return "The model is broken: it embeds the bundle's probe as NaN or infinity."
    apart, allowed = _apart(expected, vector, said, bundle.variant, bundle.device)
    if apart <= allowed:
        return None
    return (
        f"The model is broken: it embeds the bundle's probe {apart:.2g} away from where it did when it was exported; "
        f"{allowed:.2g} is allowed. Is this processor, or ONNX Runtime, at fault? `retrieval doctor` tells more."
    )


def _apart(
    expected: np.ndarray, vector: np.ndarray, said: Manifest, variant: str | None, device: str
) -> tuple[float, float]:
    """Return how far two vectors are apart, and how far they may be: by the tolerance of the comparison with torch; by its drift of a variant."""
    wanted, got = expected.astype(np.float64), vector.astype(np.float64)
    length = float(np.linalg.norm(wanted)) or 1.0
    if variant is None:
        allowed = max(said.verified.tolerance, _LEAST if device == "cpu" else _CUDA)
        return float(np.abs(wanted - got).max()) / length, allowed
    cosine = float(wanted @ got) / ((length * float(np.linalg.norm(got))) or 1.0)
    return 1.0 - cosine, max(2.0 * (1.0 - said.variants[variant].cosine.min), _LEAST_DRIFT)
