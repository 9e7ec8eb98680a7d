"""What the commands `retrieval index …` have in common: arguments, options, and opening an index."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from retrieval.cli import say, say_json
from retrieval.cli.plugins import PLUGIN_OPTION, plugin_option
from retrieval.cli.types import Bytes, Choice, IndexArgument, Pixels

if TYPE_CHECKING:
    from retrieval.serving.index.index import Index
    from retrieval.serving.index.tuning import Tuned
    from retrieval.serving.store.address import IndexPlace
    from retrieval.serving.store.contract import Store

_DEVICE = Choice(["auto", "cpu", "cuda", "tensorrt"])
_KEEP = Choice(["reference", "copy", "thumbnail", "nothing"])

PLACE = click.argument("path", metavar="INDEX", type=IndexArgument())
_PLUGINS = "retrieval.plugins"
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
WHERE = click.option(
    "--where", metavar="FILTER", help="Only items that match: \"price < 20 and label in ('shoe', 'boot')\"."
)


def INDEX(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument INDEX, a folder or an address, and the option that brings the plugin of its store."""

    def keep(ctx: click.Context, param: click.Parameter, items: tuple[str, ...]) -> None:
        ctx.meta[_PLUGINS] = items

    option: Callable[..., Any] = plugin_option(callback=keep, expose_value=False)(command)
    return PLACE(option)


def plugins_given() -> tuple[str, ...]:
    """Return what the option of `INDEX` named in this call of the command line."""
    found: tuple[str, ...] = click.get_current_context().meta.get(_PLUGINS, ())
    return found


def embedding(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of everything that embeds images."""
    for option in reversed(
        [
            click.option(
                "--skip-bad", is_flag=True, help="Leave out images that cannot be used; each is reported."
            ),
            click.option(
                "--batch",
                default=32,
                show_default=True,
                type=click.IntRange(1),
                help="Items encoded at once.",
            ),
            click.option(
                "--max-pixels", default="25M", show_default=True, type=Pixels(), help="Largest image."
            ),
            click.option(
                "--max-bytes", default="20MB", show_default=True, type=Bytes(), help="Largest file."
            ),
            click.option(
                "--keep",
                default="reference",
                show_default=True,
                type=_KEEP,
                help="What the index keeps of originals.",
            ),
        ]
    ):
        command = option(command)
    return command


def creating(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of making an index."""
    for option in reversed(
        [
            click.option(
                "--backend",
                default="auto",
                show_default=True,
                help="auto (by size), flat, hnsw, ivf, sq8, ivfpq, rabitq, or PLUGIN.name.",
            ),
            click.option(
                "--set",
                "options",
                multiple=True,
                metavar="KEY=VALUE",
                help="A parameter of the back end; repeatable.",
            ),
            PLUGIN_OPTION,
            click.option("--variant", help="Encode with this variant of the bundle's encoder, such as int8."),
            click.option(
                "--keep-features",
                is_flag=True,
                help="Keep the backbone's features too: another head then takes seconds (index migrate). For bundles of export --split.",
            ),
            click.option("--replace", is_flag=True, help="Put the new index in the place of an older one."),
            click.option(
                "--device", default="auto", show_default=True, type=_DEVICE, help="Where the encoder runs."
            ),
        ]
    ):
        command = option(command)
    return command


def tell(path: IndexPlace, as_json: bool, sentence: str, **figures: Any) -> None:
    """Print what a command did to an index: a sentence, or one JSON object, which begins with the index as it was named."""
    if as_json:
        say_json({"index": str(path), **figures})
    else:
        say(sentence)


def say_tuned(tuned: Tuned) -> None:
    """Print what tuning measured, as a table; a star marks the structure that was chosen."""
    say(f"{'':2}{'structure':46}{'recall@10':>10}{'ms a query':>12}{'MB':>10}{'built in s':>12}")
    for one in tuned.trials:
        name = " ".join([one.backend, *(f"{key}={value}" for key, value in one.options.items())])
        mark = "* " if one is tuned.chosen else "  "
        say(
            f"{mark}{name:46}{one.recall:10.3f}{one.milliseconds:12.3f}{one.bytes / 1e6:10.1f}{one.seconds:12.1f}"
        )


def opened_index(path: IndexPlace) -> Index:
    """Open an index.

    Raises:
        StoreError: it is none.
    """
    quiet_threads()
    from retrieval.serving.index.index import open_index

    return open_index(path, plugins=plugins_given())


def opened_store(path: IndexPlace) -> Store:
    """Open the store of an index alone, without its bundle.

    Raises:
        StoreError: it is none.
    """
    quiet_threads()
    from retrieval.serving.index.index import open_store

    return open_store(path, plugins_given())


def quiet_threads() -> None:
    """Keep FAISS and ONNX Runtime from spinning; before either is imported."""
    from retrieval.serving.runtime import quiet_threads as quiet

    quiet()
