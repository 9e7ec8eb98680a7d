"""The command line: one thin function per command, in a module that is imported when it is called.

Commands print through the functions below.
"""

from __future__ import annotations

import json
import re
from typing import Any

import click

from retrieval.errors import printable


def say(text: str, err: bool = False) -> None:
    """Print text, with control characters from file names, labels, keys or plugins escaped."""
    click.echo(printable(text), err=err)


def say_json(value: Any) -> None:
    """Print JSON with control characters escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    click.echo(re.sub(r"[^\n -~]", _escaped, text))


def _escaped(match: re.Match[str]) -> str:
    if match[0].isprintable():
        return match[0]
    return json.dumps(match[0])[1:-1].replace("\x7f", "\\u007f")  # JSON does not escape DEL
