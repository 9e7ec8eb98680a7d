"""`retrieval index` and its subcommands."""

from __future__ import annotations

import click

from retrieval.cli import index_items, index_whole
from retrieval.errors import did_you_mean

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


class _Index(click.Group):
    """A group that lists its subcommands in the order of use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the subcommands in the order of use."""
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand.

        Raises:
            UsageError: the subcommand does not exist.
        """
        word = args[0] if args else ""
        if word in COMMANDS:
            return super().resolve_command(ctx, args)
        raise click.UsageError(
            f"There is no command 'retrieval index {word}'.{did_you_mean(word, COMMANDS)} "
            "To make an index: retrieval index create INDEX IMAGES… --bundle BUNDLE",
            ctx,
        )


@click.group(
    "index",
    cls=_Index,
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
