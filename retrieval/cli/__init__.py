"""The command line: one thin function per command, in a module that is imported when it is called.

Commands print through the functions below.
"""

from __future__ import annotations

from typing import Any

import click

from retrieval.errors import printable, printable_json


def say(*texts: str, err: bool = False) -> None:
    """Print texts, with control characters from file names, labels, keys or plugins escaped."""
    for text in texts:
        click.echo(printable(text), err=err)


def say_json(value: Any) -> None:
    """Print JSON with control characters escaped."""
    click.echo(printable_json(value, indent=2))
