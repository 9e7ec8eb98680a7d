"""`retrieval index` and its subcommands."""

from __future__ import annotations

import click

from retrieval.cli import index_items, index_whole
from retrieval.cli.common import Group

COMMANDS: dict[str, click.Command] = {
    "create": index_items.create,
    "add": index_items.add,
    "delete": index_items.delete,
    "list": index_items.list_items,
    "show": index_items.show,
    "check": index_whole.check,
    "compact": index_whole.compact,
    "duplicates": index_whole.duplicates,
    "migrate": index_whole.migrate,
    "rollback": index_whole.rollback,
    "snapshot": index_whole.snapshot,
    "restore": index_whole.restore,
}


@click.group(
    "index",
    cls=Group,
    commands=COMMANDS,
    epilog="""\b
Examples:
  retrieval index create photos.index photos/ --bundle demo/bundle
  retrieval index add photos.index photos/ --sync
  retrieval index migrate photos.index better.bundle
""",
)
def index() -> None:
    """Create an index, and change, inspect, copy and repair it while it is searched."""
