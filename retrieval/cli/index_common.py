"""Arguments, options and helpers that the commands `retrieval index …` and `embed` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from retrieval.cli import say, say_json
from retrieval.cli.common import Bytes, Choice, IndexArgument, Pixels
from retrieval.cli.plugins import plugin_option

if TYPE_CHECKING:
    from retrieval.serving.index.index import Index
    from retrieval.serving.store.address import IndexPlace
    from retrieval.serving.store.contract import Store

_PLUGINS = "retrieval.plugins"

PLACE = click.argument("path", metavar="INDEX", type=IndexArgument())
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
WHERE = click.option(
    "--where",
    metavar="FILTER",
    help="Only items that match, such as \"price < 20 and label in ('shoe', 'boot')\".",
)
VARIANT = click.option(
    "--variant", help="Encode with this variant of the bundle's encoder, such as int8."
)
MAX_PIXELS = click.option(
    "--max-pixels", default="25M", show_default=True, type=Pixels(), help="Largest image."
)
MAX_BYTES = click.option(
    "--max-bytes", default="20MB", show_default=True, type=Bytes(), help="Largest file."
)
DEVICE = click.option(
    "--device",
    default="auto",
    show_default=True,
    type=Choice(["auto", "cpu", "cuda"]),
    help="Where the encoder runs.",
)


def command(name: str, *examples: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator for a command whose help ends with these examples."""
    lines = [
        "\b",
        "Examples:" if len(examples) > 1 else "Example:",
        *(f"  {line}" for line in examples),
    ]
    return click.command(name, epilog="\n".join(lines))


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
            show_default=True,
            type=Choice(["reference", "copy", "thumbnail", "nothing"]),
            help="What the index keeps of each original.",
        ),
        MAX_BYTES,
        MAX_PIXELS,
        click.option(
            "--batch",
            default=32,
            show_default=True,
            type=click.IntRange(1),
            help="Items encoded at once.",
        ),
        click.option(
            "--skip-bad",
            is_flag=True,
            help="Skip images that cannot be used, and report each.",
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
    """Open an index.

    Raises:
        StoreError: the place does not hold an index.
    """
    quiet_threads()
    from retrieval.serving.index.index import open_index

    return open_index(path, plugins=plugins_given())


def opened_store(path: IndexPlace) -> Store:
    """Open the store of an index, without its bundle.

    Raises:
        StoreError: the place does not hold an index.
    """
    quiet_threads()
    from retrieval.serving.index.index import open_store

    return open_store(path, plugins_given())


def quiet_threads() -> None:
    """Keep the threads of FAISS and ONNX Runtime from spinning; call before importing either."""
    from retrieval.serving.runtime import quiet_threads as quiet

    quiet()
