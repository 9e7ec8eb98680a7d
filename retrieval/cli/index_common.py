"""Arguments, options and helpers that the commands `retrieval index …` and `embed` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from retrieval.cli import say, say_json
from retrieval.cli.common import BYTES, PIXELS, Choice, IndexArgument
from retrieval.cli.plugins import plugin_option

if TYPE_CHECKING:
    from retrieval.serving.index.index import Index
    from retrieval.serving.store.address import IndexPlace
    from retrieval.serving.store.contract import Store

_PLUGINS = "retrieval.plugins"

PLACE = click.argument("path", metavar="INDEX", type=IndexArgument())
WHERE = click.option(
    "--where",
    metavar="FILTER",
    help="Only items that match, such as \"price < 20 and label in ('shoe', 'boot')\".",
)
VARIANT = click.option(
    "--variant", help="Encode with this variant of the bundle's encoder, such as int8."
)
MAX_PIXELS = click.option("--max-pixels", default="25M", type=PIXELS, help="Largest image.")
MAX_BYTES = click.option("--max-bytes", default="20MB", type=BYTES, help="Largest file.")
DEVICE = click.option(
    "--device", default="auto", type=Choice(["auto", "cpu", "cuda"]), help="Where the encoder runs."
)


def INDEX(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument INDEX, a folder or an address, and the option for its store's plugin."""

    def keep(ctx: click.Context, param: click.Parameter, items: tuple[str, ...]) -> None:
        ctx.meta[_PLUGINS] = items

    option: Callable[..., Any] = plugin_option(callback=keep, expose_value=False)(function)
    return PLACE(option)


def plugins_given() -> tuple[str, ...]:
    """Return the plugins that the user named with the option that `INDEX` added."""
    plugins: tuple[str, ...] = click.get_current_context().meta.get(_PLUGINS, ())
    return plugins


def embedding(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of commands that embed images into an index."""
    for option in (
        click.option(
            "--keep",
            default="reference",
            type=Choice(["reference", "copy", "thumbnail", "nothing"]),
            help="What the index keeps of each original.",
        ),
        MAX_BYTES,
        MAX_PIXELS,
        click.option("--batch", default=32, type=click.IntRange(1), help="Items encoded at once."),
        click.option(
            "--skip-bad", is_flag=True, help="Skip images that cannot be used, and report each."
        ),
    ):
        function = option(function)
    return function


def tell(path: IndexPlace, as_json: bool, sentence: str, **facts: Any) -> None:
    """Print a command's result as a sentence, or as a JSON object that starts with the index."""
    if as_json:
        say_json({"index": str(path), **facts})
    else:
        say(sentence)


def opened_index(path: IndexPlace) -> Index:
    """Open an index."""
    from retrieval.serving.index.index import open_index

    return open_index(path, plugins=plugins_given())


def opened_store(path: IndexPlace) -> Store:
    """Open the store of an index, without its bundle."""
    from retrieval.serving.index.index import open_store

    return open_store(path, plugins_given())
