"""An index for agents: `retrieval mcp INDEX` is a server of the Model Context Protocol."""

from __future__ import annotations

from retrieval.host.hookspecs import Commands, hookimpl


@hookimpl
def retrieval_commands(app: Commands) -> None:
    """`retrieval mcp`."""
    app.add_location("mcp", "retrieval_mcp.commands:mcp")
