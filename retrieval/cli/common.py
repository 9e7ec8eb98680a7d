"""Types of arguments, and other helpers that several commands share."""

from __future__ import annotations

import atexit
import gc
import math
import re
import shlex
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from retrieval.errors import did_you_mean

PATH = click.Path(path_type=Path)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


class IndexArgument(click.Path):
    """The place of an index: a folder, or an address such as `milvus://host:19530/photos`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the folder's path or the parsed address."""
        from retrieval.store.address import Address, place_of

        place = place_of(value)
        if isinstance(place, Address):
            return place
        return PATH.convert(place, param, ctx)


class SizeParameter(click.ParamType):  # type: ignore[type-arg]  # older click's is not generic
    """A whole number, in full or as 20M or 1.5G; with the unit "B", also as 10MB or 64KiB."""

    name = "size"

    def __init__(self, unit: str = "") -> None:
        self.unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number."""
        # click may pass a value that is converted already
        if isinstance(value, int):
            return value
        text = str(value).strip().upper()
        match = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([KMG]I?)?(B)?", text)
        if match is None or (match[3] and not self.unit):
            self.fail(f"'{value}' is not a size: write 20000000 or 20M{self.unit}.", param, ctx)
        number = round(float(re.sub("[_,]", "", match[1])) * _UNITS[match[2] or ""])
        if number < 1:
            self.fail(f"'{value}' is less than 1.", param, ctx)
        return number


PIXELS = SizeParameter()
BYTES = SizeParameter("B")


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A time such as 90d, 12h, 30m or, unless it must be positive, 0."""

    name = "time"

    def __init__(self, positive: bool = False) -> None:
        self._positive = positive

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the time as a `timedelta`."""
        match = re.fullmatch("([0-9]{1,5})([mhd])|0", value)
        if match is None or (self._positive and not int(match[1] or 0)):
            self.fail(f"'{value}' is not a time: write 90d, 12h or 30m.", param, ctx)
        minutes = {"m": 1, "h": 60, "d": 1440, None: 0}[match[2]]
        return timedelta(minutes=minutes * int(match[1] or 0))


class Choice(click.Choice):  # type: ignore[type-arg]
    """A choice that suggests the closest word for a mistyped one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the chosen word."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as fault:
            self.fail(fault.message + did_you_mean(str(value), map(str, self.choices)), param, ctx)


class Number(click.FloatRange):
    """A finite number within bounds; click accepts NaN within any bounds."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"'{value}' is not a finite number.", param, ctx)
        return number


FILTER = click.option(
    "--filter",
    metavar="FILTER",
    help="Only items that match, such as \"price < 20 and label in ('shoe', 'boot')\".",
)
VARIANT = click.option(
    "--variant", help="Encode with this variant of the bundle's encoder, such as int8."
)
DEVICE = click.option(
    "--device", default="auto", type=Choice(["auto", "cpu", "cuda"]), help="Where the encoder runs."
)


def options(*decorators: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator that adds options, in their order in the help."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return add


def limited(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --max-pixels and --max-bytes, which the function gets together as `limits`."""

    @click.option("--max-pixels", default="25M", type=PIXELS, help="Largest image, in pixels.")
    @click.option("--max-bytes", default="20MB", type=BYTES, help="Largest file, in bytes.")
    @wraps(function)
    def call(max_pixels: int, max_bytes: int, **arguments: Any) -> Any:
        from retrieval.images.decoding import Limits

        return function(limits=Limits(max_pixels, max_bytes), **arguments)

    return call


class Group(click.Group):
    """A group that keeps the order of its commands, and suggests a command for a mistyped name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands in the order in which they were added."""
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name."""
        names = self.list_commands(ctx)
        if cmd_name not in names:
            hint = did_you_mean(cmd_name, names)
            raise click.UsageError(f"There is no command '{cmd_name}'.{hint}", ctx)
        return self.commands[cmd_name]


def command(
    name: str, *examples: str, group: Any = click
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator for a command (of a group) whose help ends with these examples."""
    if len(examples) > 1:
        head = "Examples:"
    else:
        head = "Example:"
    decorator: Callable[[Callable[..., Any]], click.Command] = group.command(
        name, epilog="\n  ".join([f"\b\n{head}", *examples])
    )
    return decorator


def backbone_parameters(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the values of `--set`, which are read like those of a recipe's `[backbone]`."""
    from retrieval.recipe.read import apply_overrides

    table: dict[str, Any] = {"backbone": {}}
    apply_overrides(table, [f"backbone.{text.removeprefix('backbone.')}" for text in overrides])
    parameters: dict[str, Any] = table["backbone"]
    return parameters


def bundle_or_model(bundle: Path | None, model: str | None) -> tuple[Path | None, str | None]:
    """Return `--bundle` and `--model`; a model at the address of a bundle becomes the bundle."""
    from retrieval.base.folder_kinds import kind_of
    from retrieval.bundle.addresses import bundle_folder

    if model is not None and kind_of(folder := bundle_folder(model)) == "bundle":
        return folder, None
    return bundle, model


def refuse_options(when: str, names: Container[str]) -> None:
    """Refuse some parameters of the current command if they are on the command line.

    `when` ends the error message with the reason, such as "without --model".
    """
    context = click.get_current_context()
    wrong = []
    for param in context.command.params:
        # a default is no mistake of the user
        if param.name in names:
            source = context.get_parameter_source(param.name)
            if source is ParameterSource.COMMANDLINE:
                wrong.append(param.opts[0])
    if wrong:
        raise click.UsageError(f"Leave {' and '.join(wrong)} out {when}.")


@contextmanager
def loading() -> Iterator[None]:
    """Pause garbage collection during imports, and exempt the imported objects from later runs.

    Importing torch creates a million objects that live as long as the process. Collecting among
    them takes a sixth of the time of `retrieval check`. Only commands use this: a user's own
    process may have garbage to collect.
    """
    if not gc.isenabled() or "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        # at exit, libraries that use nanobind would report frozen objects as leaks
        atexit.register(gc.unfreeze)


def this_command(*further: str, without: Container[str] = ()) -> str:
    """Return this process's command line for a shell, with `further` words and `without` others."""
    words = [word for word in sys.argv[1:] if word not in without]
    words += [word for word in further if word not in words]
    return shlex.join(["retrieval", *words])
