"""`retrieval export-items`: the items of an index in layouts that other programs open."""

from __future__ import annotations

from retrieval.host.hookspecs import Commands, hookimpl


@hookimpl
def retrieval_commands(app: Commands) -> None:
    """`retrieval export-items`."""
    app.add_location("export-items", "retrieval_exports.commands:export_items")
