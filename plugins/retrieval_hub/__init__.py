"""Bundles on a model hub: `retrieval push-hub` uploads one, and `hf://OWNER/NAME` opens it."""

from __future__ import annotations

from pathlib import Path

from retrieval.host.hookspecs import Commands, Factories, hookimpl


@hookimpl
def retrieval_commands(app: Commands) -> None:
    """`retrieval push-hub`."""
    app.add_location("push-hub", "retrieval_hub.commands:push_hub")


@hookimpl
def retrieval_bundle_at(address: str) -> Path | None:
    """Bundles at `hf://OWNER/NAME`."""
    if not address.startswith("hf://"):
        return None
    from retrieval_hub.download import bundle_folder

    return bundle_folder(address)


@hookimpl
def retrieval_encoders() -> Factories:
    """Bundles at `hf://OWNER/NAME`, to be measured beside others."""
    return {"hf": "retrieval_hub.download:HubBundle"}
