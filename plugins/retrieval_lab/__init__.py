"""What a researcher does beside training: look at data, propose recipes, distill, write reports."""

from __future__ import annotations

from retrieval.host.hookspecs import Commands, hookimpl


@hookimpl
def retrieval_commands(app: Commands) -> None:
    """`retrieval init`, `data`, `distill` and `report`."""
    app.add_location("init", "retrieval_lab.commands:init")
    app.add_location("data", "retrieval_lab.commands:data")
    app.add_location("distill", "retrieval_lab.commands:distill")
    app.add_location("report", "retrieval_lab.commands:report")
