"""Adapter bundles: the encoder of another bundle, the base, followed by a small learned graph.

An index that moves from a bundle to an adapter over it, or from one adapter to another, computes
the new vectors from those that it stores, and opens no original.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retrieval.base.files import whole_folder
from retrieval.base.folder_kinds import StrPath
from retrieval.base.runtime import load_onnxruntime, session_options, start_session
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.graphs import GraphError, check_graph
from retrieval.bundle.manifest import (
    BASE_FILE,
    FILE,
    AdapterEntry,
    DistanceEntry,
    Manifest,
    write_manifest,
)
from retrieval.bundle.probe import WIDEST, coded, vector_of
from retrieval.errors import BundleError

_ADAPTER = "adapter.onnx"


def make_adapter_bundle(base: Bundle, head: bytes, folder: StrPath) -> Path:
    """Write a bundle that encodes as `base` does, then applies a head; return its folder.

    The same base and head always give the same bundle. Adapters are not chained: if `base` has an
    adapter itself, the head is applied to the vectors of its base. The manifest is that of the
    base, but for the width, distance and test vectors. Its `verified` still describes the encoder.

    Args:
        base: any bundle whose results are ordered by the Euclidean distance of whole vectors.
        head: ONNX graph from "input" (N, P) float32, vectors of the base, to "vector" (N, P').
        folder: the new bundle's folder, which must not exist.

    Raises:
        BundleError: the base orders results in another way, the head cannot be used, the base has
            changed since it was opened, or the folder exists or cannot be written.
    """
    if base.manifest.adapter is not None:
        with tempfile.TemporaryDirectory() as scratch:
            opened = Bundle.open(write_base(base, Path(scratch) / "base"), device="cpu")
            return make_adapter_bundle(opened, head, folder)
    manifest = base.manifest
    if not manifest.compares_by_euclidean:
        raise BundleError(
            f"The bundle {base.path} cannot have an adapter: an adapter needs a bundle whose"
            " results are ordered by the Euclidean distance of whole vectors, without codes,"
            " sub-spaces or vectors of queries alone."
        )
    if reserved := {BASE_FILE, _ADAPTER} & manifest.files.keys():
        raise BundleError(
            f"The bundle {base.path} has a file {min(reserved)}, which an adapter bundle needs for"
            " itself. Export the bundle again."
        )
    manifest = manifest.model_copy(
        update={
            "adapter": AdapterEntry(file=_ADAPTER, base=base.sha256, width=manifest.vector),
            "vector": _width_of(head),
            "normalized": False,
            "distance": DistanceEntry(name="Euclidean", exact=True),
            "evaluation": None,
            "probe": None,
            "text": manifest.text and manifest.text.model_copy(update={"probe": None}),
        }
    )
    with _new_folder(Path(folder)) as fresh:
        base.copy(fresh)
        (fresh / FILE).rename(fresh / BASE_FILE)
        (fresh / _ADAPTER).write_bytes(head)
        write_manifest(fresh, manifest)
        # This tries the graphs.
        opened = Bundle.open(fresh, threads=1, device="cpu")
        if manifest.vector <= WIDEST:
            manifest = manifest.model_copy(update=_adapted_probes(base.manifest, opened))
            write_manifest(fresh, manifest)
    return Path(folder)


def write_base(bundle: Bundle, folder: StrPath) -> Path:
    """Write the base of an adapter bundle, byte for byte, to a new folder; return the folder.

    Raises:
        BundleError: the bundle has no adapter or has changed since it was opened, or the folder
            exists or cannot be written.
    """
    adapter = bundle.manifest.adapter
    if adapter is None:
        raise BundleError(f"The bundle {bundle.path} has no adapter, so it has no base.")
    with _new_folder(Path(folder)) as fresh:
        bundle.copy(fresh)
        (fresh / adapter.file).unlink()
        (fresh / BASE_FILE).replace(fresh / FILE)
    return Path(folder)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Context manager that yields a hidden folder and renames it to `folder` at the end."""
    exists = BundleError(f"{folder} exists already. Choose another folder for the bundle.")
    try:
        with whole_folder(folder, replace=False, exists_error=exists) as fresh:
            yield fresh
    except OSError as fault:
        raise BundleError(
            f"The bundle {folder} cannot be written: {fault.strerror or fault}."
        ) from None


def _width_of(head: bytes) -> int:
    """Return the width of a head's output "vector"."""
    runtime = load_onnxruntime()
    try:
        check_graph(head)
        session, _ = start_session(runtime, head, session_options(runtime, 1), ["cpu"])
    except GraphError as fault:
        raise BundleError(f"The head of the adapter is refused: {fault}.") from None
    except Exception as fault:  # ONNX Runtime's errors share no public base class
        reason = " ".join(str(fault).split())[-400:].rstrip(".")
        raise BundleError(f"The head of the adapter cannot be loaded: {reason}.") from fault
    for output in session.get_outputs():
        if output.name == "vector" and isinstance(output.shape[-1], int):
            return output.shape[-1]
    raise BundleError("The head of the adapter needs an output 'vector' (N, P) of a fixed width P.")


def _adapted_probes(base: Manifest, bundle: Bundle) -> dict[str, Any]:
    """Return the changed entries of an adapter bundle's manifest; `base` is that of its base."""

    def adapted(text: str) -> str:
        return coded(bundle.adapt(vector_of(text)[None]).vector[0])

    changed = dict[str, Any]()
    if base.probe is not None:
        variants = {name: adapted(text) for name, text in base.probe.variants.items()}
        update = {"vector": adapted(base.probe.vector), "variants": variants}
        changed["probe"] = base.probe.model_copy(update=update)
    if base.text is not None and base.text.probe is not None:
        probe = base.text.probe
        probe = probe.model_copy(update={"vector": adapted(probe.vector)})
        changed["text"] = base.text.model_copy(update={"probe": probe})
    return changed
