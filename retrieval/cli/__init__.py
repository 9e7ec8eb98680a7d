"""The commands, a thin function each; their modules are imported when a command is called.

What they print goes through here.
"""

from __future__ import annotations

import json
import re
from typing import Any

import click

from retrieval.errors import printable


def say(text: str, err: bool = False) -> None:
    """Print text that may hold names from outside: file names, labels, keys, what plugins say."""
    click.echo(printable(text), err=err)


def say_json(value: Any) -> None:
    """Print JSON as it is, with characters that a terminal would obey escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    click.echo(re.sub(r"[^\n -~]", _escaped, text))


def _escaped(match: re.Match[str]) -> str:
    if match[0].isprintable():
        return match[0]
    return json.dumps(match[0])[1:-1].replace("\x7f", "\\u007f")  # which JSON lets stand
