"""`retrieval keys`: the API keys of a server. Heavy modules are imported inside the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrieval.cli import say, say_json
from retrieval.cli.common import JSON, PATH, Choice, Group

_FILE = click.argument("path", metavar="KEYS", type=PATH)
_OUTPUT = click.option(
    "--output", "-o", "path", required=True, metavar="KEYS", type=PATH, help="The file of keys."
)


@click.group(cls=Group)
def keys() -> None:
    """Create, list and remove the API keys of a server (retrieval serve INDEX --keys KEYS).

    The file holds salted hashes; a key itself is shown only once, when it is created. A running
    server reloads a changed file.

    Example:  retrieval keys add shop --role read --output keys.jsonl
    """


@keys.command()
@click.argument("name")
@_OUTPUT
@click.option(
    "--role",
    default="read",
    type=Choice(["read", "write", "admin"]),
    help="read: search and read items. write: also add, change and delete items. admin: also"
    " snapshots and metrics.",
)
@click.option(
    "--index", "indexes", multiple=True, metavar="NAME", help="Only this index; repeatable."
)
def add(name: str, path: Path, role: Any, indexes: tuple[str, ...]) -> None:
    """Create a key called NAME, write its hash to a file, and print the key, this once.

    Example:  retrieval keys add importer --role write --index photos --output keys.jsonl
    """
    from retrieval.serving.http.keys import add_key, new_key

    sent, kept = new_key(name, role, indexes)
    add_key(path, kept)
    click.echo(sent)
    say(f"Wrote its hash to {path}. Requests send it as 'Authorization: Bearer KEY'.", err=True)


@keys.command("list")
@_FILE
@JSON
def list_keys(path: Path, as_json: bool) -> None:
    """Print the names, roles and indexes of the keys in a file.

    Example:  retrieval keys list keys.jsonl
    """
    from retrieval.serving.http.keys import read_keys

    records = [
        key.model_dump(exclude={"salt", "hash"}, exclude_none=True) for key in read_keys(path)
    ]
    if as_json:
        say_json(records)
        return
    for key in records:
        name, role, id = key.pop("name"), key.pop("role"), key.pop("id")
        rest = [f"indexes {', '.join(key.pop('indexes'))}"] if "indexes" in key else []
        rest += [f"{what.replace('_', ' ')} {value}" for what, value in key.items() if value != ""]
        say(f"{name}  {role}  rk_{id}_…  {'; '.join(rest)}".rstrip())


@keys.command()
@click.argument("name")
@_OUTPUT
def remove(name: str, path: Path) -> None:
    """Remove the key called NAME from a file. A running server rejects it within seconds.

    Example:  retrieval keys remove shop --output keys.jsonl
    """
    from retrieval.serving.http.keys import remove_key

    remove_key(path, name)
    say(f"Removed {name} from {path}.")
