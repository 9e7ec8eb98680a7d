"""Upload a bundle to a hub, with a card that says what it is and how it was verified."""

from __future__ import annotations

import re
from typing import Any

from retrieval.bundle.bundle import Bundle
from retrieval.bundle.identity import embedding_identity
from retrieval.bundle.manifest import FILE, manifest_text, read_files
from retrieval.errors import BundleError

from retrieval_hub.hub import REPOSITORY, hub_errors, load_hub

CARD = "README.md"


def push_bundle(
    bundle: Bundle, repository: str, *, private: bool = False, licence: str | None = None
) -> str:
    """Upload a bundle in one commit, and return the address of this commit.

    The repository is created if it does not exist. A card that it has already is kept.

    Args:
        bundle: the opened bundle.
        repository: name of the repository, OWNER/NAME.
        private: whether a new repository is private.
        licence: the licence in the card, such as "apache-2.0".

    Raises:
        BundleError: the name is wrong, the files have changed since the bundle was opened, or the
            repository may not be changed.
        ServerError: the hub cannot be reached.
        MissingDependency: `huggingface_hub` is not installed.
    """
    if not re.fullmatch(REPOSITORY, repository):
        raise BundleError(f"'{repository}' is not the name of a repository. Write OWNER/NAME.")
    hub = load_hub()
    contents = {FILE: manifest_text(bundle.path), **read_files(bundle.path, bundle.manifest.files)}
    api = hub.HfApi()
    address = f"hf://{repository}"
    with hub_errors(address):
        api.create_repo(repository, private=private, exist_ok=True)
        if not api.file_exists(repository, CARD):
            contents[CARD] = card_of(bundle, address, licence).encode()
        commit = api.create_commit(
            repository,
            [hub.CommitOperationAdd(name, content) for name, content in contents.items()],
            commit_message=f"Bundle {bundle.sha256[:12]}",
        )
    return f"{address}@{commit.oid}"


def card_of(bundle: Bundle, address: str, licence: str | None = None) -> str:
    """Return the card of a bundle: YAML from its manifest, then Markdown for people."""
    manifest = bundle.manifest
    verified = manifest.verified.model_dump()
    about = embedding_identity(bundle)
    del about["probe"]
    takes_images = manifest.input.kind == "image"
    front = load_hub().ModelCardData(
        license=licence,
        library_name="embedding-retrieval",
        pipeline_tag="image-feature-extraction" if takes_images else None,
        tags=["embedding-retrieval", "onnx", "image-retrieval", "embeddings"],
        embedding={
            **about,
            "input": list(manifest.input.shape),
            "verified": verified,
            "evaluation": manifest.evaluation,
        },
    )
    rows: dict[str, Any] = {
        "name of the embedding": f"`{bundle.sha256}`",
        "input": f"{manifest.input.kind}, {' × '.join(map(str, manifest.input.shape))}",
        "vector": f"{manifest.vector} numbers" + ", of length 1" * manifest.normalized,
        "distance": manifest.distance.name,
        "made by": ", ".join(f"{name} {text}" for name, text in manifest.versions.items()),
    }
    agreement = (
        f"torch and ONNX Runtime encoded {manifest.verified.items:,} items and differed by"
        f" {manifest.verified.largest_difference:.2g} at most;"
        f" {manifest.verified.tolerance:.2g} was allowed."
    )
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {_line(manifest.name)}",
        "A bundle of embedding-retrieval: an ONNX model that embeds for search by similarity, and"
        " its manifest.",
        "```python\nimport retrieval\n\n"
        f'encoder = retrieval.load("{address}?bundle={bundle.sha256}")\n'
        'vectors = encoder.encode(["a.jpg", "b.jpg"])\n```',
        _table("", rows),
        f"## Verification\n\nAt export, {agreement}",
    ]
    if manifest.variants:
        drift = {
            name: f"cosine to the encoder {variant.cosine.mean:.4f} (at least"
            f" {variant.cosine.min:.4f})"
            for name, variant in manifest.variants.items()
        }
        parts.append(_table("variant", drift))
    if manifest.evaluation:
        metrics = {name: f"{value:.4f}" for name, value in manifest.evaluation.items()}
        parts.append(
            f"## Evaluation\n\nOn the run's held-out items:\n\n{_table('metric', metrics)}"
        )
    return "\n\n".join(parts) + "\n"


def _table(head: str, rows: dict[str, Any]) -> str:
    """Return a Markdown table of two columns."""
    lines = [f"| {name} | {_line(str(value))} |" for name, value in rows.items()]
    return "\n".join([f"| {head} | |", "| --- | --- |", *lines])


def _line(text: str) -> str:
    """Return text that cannot end a line or a cell of a table."""
    return " ".join(text.split()).replace("|", r"\|")
