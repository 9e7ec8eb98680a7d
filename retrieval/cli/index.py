"""`retrieval index`: a noun, and verbs after it."""

from __future__ import annotations

import importlib

import click

from retrieval.errors import did_you_mean

COMMANDS = {
    "create": "index_create:create",
    "add": "index_items:add",
    "delete": "index_items:delete",
    "list": "index_items:list_items",
    "show": "index_items:show",
    "check": "index_whole:check",
    "compact": "index_whole:compact",
    "tune": "index_look:tune",
    "duplicates": "index_look:duplicates",
    "clusters": "index_look:clusters",
    "migrate": "index_whole:migrate",
    "rollback": "index_whole:rollback",
    "snapshot": "index_whole:snapshot",
    "restore": "index_whole:restore",
}


class _Index(click.Group):
    """A noun with verbs after it, whose modules are imported when one is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command by name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(f"retrieval.cli.{module}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb.

        Raises:
            UsageError: there is none of that name.
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
    epilog="""\b
Examples:
  retrieval index create photos.index photos/ --bundle demo/bundle
  retrieval index add photos.index photos/ --sync
  retrieval index migrate photos.index better.bundle
""",
)
def index() -> None:
    """Create an index, and change, look through, move and repair it while it is searched."""
