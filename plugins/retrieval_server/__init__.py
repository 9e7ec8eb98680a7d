"""The HTTP server of one or more indexes, its keys, its web page and its client."""

from __future__ import annotations

from retrieval.host.hookspecs import Commands, hookimpl


@hookimpl
def retrieval_commands(app: Commands) -> None:
    """`retrieval serve`, `keys` and `push`."""
    app.add_location("serve", "retrieval_server.commands:serve_command")
    app.add_location("keys", "retrieval_server.commands:keys")
    app.add_location("push", "retrieval_server.commands:push_command")
