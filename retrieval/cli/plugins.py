"""`retrieval plugins list | show | new`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from retrieval.cli import say
from retrieval.cli.types import Choice


def named(ctx: click.Context, param: click.Parameter, items: tuple[str, ...]) -> tuple[str, ...]:
    """Return plugins that an option named: what the user names is theirs to run, now and wherever it is found again."""
    if items:
        from retrieval.host.trust import name_files

        name_files(items)
    return items


def plugin_option(callback: Callable[..., Any] = named, **settings: Any) -> Callable[..., Any]:
    """Return the option that names plugins besides the installed ones."""
    return click.option(
        "--plugin",
        "extra",
        multiple=True,
        metavar="FILE|MODULE",
        callback=callback,
        help="Also load this plugin file or module; repeatable.",
        **settings,
    )


PLUGIN_OPTION = plugin_option()


def _answer(ctx: click.Context, param: click.Parameter, trusted: bool) -> None:
    from retrieval.host.trust import answering

    alone = os.environ.get("WORLD_SIZE", "1") == "1"  # several processes cannot all be answered
    asked = alone and sys.stdin.isatty() and sys.stderr.isatty()
    ctx.with_resource(answering((lambda _: True) if trusted else _confirm if asked else None))


def _confirm(brings: str) -> bool:
    say(brings, err=True)
    return click.confirm("Run what is in there?", default=False, err=True)


TRUST_OPTION = click.option(
    "--trust",
    is_flag=True,
    expose_value=False,
    callback=_answer,
    help="Run the plugin files that the recipe or run brings, and remember them.",
)


@click.group()
def plugins() -> None:
    """See what plugins offer, or start a new one.

    Example:  retrieval plugins show pml.multi_similarity
    """


@plugins.command("list")
@click.option("--kind", help="Only this kind, such as losses or backbones.")
@PLUGIN_OPTION
def list_command(kind: str | None, extra: tuple[str, ...]) -> None:
    """List everything that the installed plugins offer.

    Example:  retrieval plugins list --kind losses
    """
    from retrieval.host.describe import list_text
    from retrieval.host.plugins import load_plugins

    say(list_text(load_plugins(extra), kind))


@plugins.command()
@click.argument("name")
@PLUGIN_OPTION
def show(name: str, extra: tuple[str, ...]) -> None:
    """Show what NAME is: its documentation, its parameters, and lines to paste into a recipe.

    Example:  retrieval plugins show pml.multi_similarity
    """
    from retrieval.host.describe import show_text
    from retrieval.host.plugins import load_plugins

    say(show_text(load_plugins(extra), name))


@plugins.command("trust")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--forget", is_flag=True, help="No longer trust these.")
def trust_command(paths: tuple[Path, ...], forget: bool) -> None:
    """Let recipes bring these plugins: a file with what it holds now, a FOLDER of your own whatever is in it.

    Without PATHS: list what is trusted.

    Example:  retrieval plugins trust ~/experiments
    """
    from retrieval.host.trust import read_record, record_file, trust

    if paths:
        trust(paths, forget)
        return
    record = read_record()
    lines = [*(f"folder {each}" for each in record.folders)]
    lines += [f"file   {at}  SHA-256 {sha}" for sha, at in sorted(record.files.items(), key=lambda x: x[1])]
    say("\n".join(lines) or f"Nothing is trusted.{record.note} See {record_file()}.")


@plugins.command()
@click.argument("name")
@click.option(
    "--kind",
    default="loss",
    show_default=True,
    type=Choice(
        [
            "loss",
            "miner",
            "generator",
            "combiner",
            "learner",
            "dataset",
            "backbone",
            "metric",
            "index",
            "store",
        ]
    ),
    help="What it offers.",
)
@click.option(
    "--output", type=click.Path(path_type=Path), help="Folder to write; by default ./retrieval-NAME."
)
def new(name: str, kind: str, output: Path | None) -> None:
    """Write a working third-party package NAME with a part of a kind, its test and a recipe, ready to install.

    Example:  retrieval plugins new acme --kind miner
    """
    from retrieval.host.scaffold import EXAMPLES, TRAIN, write_package

    folder = write_package(name, output, kind)
    example = EXAMPLES[kind]
    use = (
        f"retrieval train {folder}/recipe.toml" if example.use == TRAIN else example.use.replace("acme", name)
    )
    say(
        f"Wrote {folder}. Next:\n  pip install -e {folder}\n  retrieval plugins show {name}.{example.part}\n  {use}"
    )
