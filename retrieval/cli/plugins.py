"""`retrieval plugins list | show | new`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from retrieval.cli import say
from retrieval.cli.common import PATH, Choice, Group
from retrieval.host.scaffold import EXAMPLES


def plugin_option(**settings: Any) -> Callable[..., Any]:
    """Return the option `--plugin`, for plugins that are not installed."""
    return click.option(
        "--plugin",
        "extra",
        multiple=True,
        metavar="FILE|MODULE",
        help="Also load this plugin file or module; repeatable.",
        **settings,
    )


PLUGIN_OPTION = plugin_option()


def _answer(ctx: click.Context, param: click.Parameter, allowed: bool) -> None:
    """Set whether this command runs a recipe's plugin files; a terminal without the option asks."""
    from retrieval.host.importing import answering

    # Of several training processes, none asks.
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    interactive = alone and sys.stdin.isatty() and sys.stderr.isatty()
    ctx.with_resource(answering(_confirm if interactive else None, allowed))


def _confirm(question: str) -> bool:
    say(question, err=True)
    return click.confirm("Run these files?", default=False, err=True)


ALLOW_OPTION = click.option(
    "--allow-plugins",
    is_flag=True,
    expose_value=False,
    callback=_answer,
    help="Run the plugin files of the recipe or run.",
)


@click.group(cls=Group)
def plugins() -> None:
    """List and show what plugins offer, or start a new one.

    Example:  retrieval plugins show pml.multi_similarity
    """


@plugins.command("list")
@click.option("--kind", help="Only this kind, such as losses or backbones.")
@PLUGIN_OPTION
def list_plugins_command(kind: str | None, extra: tuple[str, ...]) -> None:
    """List everything that the installed plugins offer.

    Example:  retrieval plugins list --kind losses
    """
    from retrieval.host.describe import list_text
    from retrieval.host.plugins import load_plugins

    say(list_text(load_plugins(extra), kind))


@plugins.command("show")
@click.argument("name")
@PLUGIN_OPTION
def show_plugin_command(name: str, extra: tuple[str, ...]) -> None:
    """Show the documentation and parameters of NAME, and lines to paste into a recipe.

    Example:  retrieval plugins show pml.multi_similarity
    """
    from retrieval.host.describe import show_text
    from retrieval.host.plugins import load_plugins

    say(show_text(load_plugins(extra), name))


@plugins.command("new")
@click.argument("name")
@click.option(
    "--kind",
    "kinds",
    default=["loss"],
    multiple=True,
    type=Choice(list(EXAMPLES)),
    help="What the plugin offers; repeatable.",
)
@click.option("--output", type=PATH, help="Folder to write; by default ./retrieval-NAME.")
def new_command(name: str, kinds: tuple[str, ...], output: Path | None) -> None:
    """Create a package NAME with example parts, their tests and recipes, ready to install.

    Example:  retrieval plugins new acme --kind miner --kind augmentation
    """
    from retrieval.host.scaffold import write_package

    folder = write_package(name, output, *kinds)
    say(f"Wrote {folder}. Next:\n  pip install -e {folder}\n  pytest {folder}")
    for kind in kinds:
        say(f"  retrieval plugins show {name}.{EXAMPLES[kind][1]}")
    for recipe in sorted(folder.glob("*.toml")):
        if recipe.name != "pyproject.toml":
            say(f"  retrieval train {recipe}")
