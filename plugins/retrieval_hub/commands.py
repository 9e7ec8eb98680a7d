"""`retrieval push-hub`."""

from __future__ import annotations

from pathlib import Path

import click
from retrieval.cli import say
from retrieval.cli.common import PATH, command


@command("push-hub", "retrieval push-hub runs/photos/bundle OWNER/NAME")
@click.argument("bundle", type=PATH)
@click.argument("repository")
@click.option("--private", is_flag=True, help="Make a new repository private.")
@click.option("--licence", metavar="NAME", help="Licence in the card, such as apache-2.0.")
def push_hub(bundle: Path, repository: str, private: bool, licence: str | None) -> None:
    """Upload BUNDLE to the repository OWNER/NAME of a model hub, with a card.

    The repository is created if it does not exist; a card that it has is kept. The token comes from
    HF_TOKEN or `hf auth login`, the hub's address from HF_ENDPOINT. Wherever a bundle is named,
    hf://OWNER/NAME opens it again.
    """
    from retrieval.bundle.bundle import Bundle

    from retrieval_hub.push import push_bundle

    address = push_bundle(Bundle.open(bundle), repository, private=private, licence=licence)
    say(f"Uploaded {bundle}. Open it with: {address}")
