"""`retrieval serve`, `keys` and `push`: a server, its keys, and its client."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from retrieval.base.machine import cores
from retrieval.cli import say, say_json
from retrieval.cli.common import (
    BYTES,
    JSON,
    PATH,
    PIXELS,
    Choice,
    Duration,
    Group,
    Number,
    command,
)
from retrieval.errors import DataError, one_line

from retrieval_server.settings import MAX_PROCESSES, ROLES, Settings

if TYPE_CHECKING:
    from datetime import timedelta

    from retrieval_server.keys import Key

# The longest --deadline, in seconds.
_DAY = 86_400.0


@command(
    "serve",
    "retrieval serve photos.index",
    "retrieval serve photos.index --port 8080 --open write",
    "retrieval serve photos.index shoes=/data/shoes.index",
    "curl -F image=@query.png -F k=5 http://127.0.0.1:8000/v1/search",
)
@click.argument("indexes", metavar="INDEX…", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 for all.")
@click.option(
    "--port", default=8000, type=click.IntRange(0, 65535), help="Port; 0 picks a free one."
)
@click.option(
    "--health-port",
    type=click.IntRange(0, 65535),
    help="Another port, for /livez, /readyz and /metrics only; 0 picks a free one.",
)
@click.option(
    "--allow-host", "hosts", multiple=True, metavar="NAME", help="Host name to accept; repeatable."
)
@click.option(
    "--proxy-header-from",
    "proxies",
    multiple=True,
    metavar="ADDRESS",
    help="Trust X-Forwarded-For from the proxy at this address or network; repeatable.",
)
@click.option(
    "--keys",
    type=PATH,
    metavar="KEYS",
    help="File of API keys (retrieval keys add); by default the one that the environment variable"
    " RETRIEVAL_KEYS names.",
)
@click.option(
    "--open",
    type=Choice(ROLES),
    help="Role of clients without a key. A server that others can reach needs this or --keys.",
)
@click.option(
    "--audit",
    type=PATH,
    envvar="RETRIEVAL_AUDIT",
    metavar="FILE",
    help="Log each change of an index here, as JSON lines; by default in the file that the"
    " environment variable RETRIEVAL_AUDIT names. 'retrieval index' has this option too.",
)
@click.option(
    "--images",
    multiple=True,
    type=PATH,
    metavar="FOLDER",
    help="Serve the original images below this folder to clients that may read; repeatable.",
)
@click.option(
    "--snapshots", type=PATH, metavar="FOLDER", help="Folder for snapshots that clients request."
)
@click.option(
    "--feedback",
    is_flag=True,
    help="Keep searches, as vectors, and take marks on their hits, to learn from them.",
)
@click.option(
    "--feedback-file",
    type=PATH,
    metavar="FILE",
    help="File of the feedback; by default feedback.sqlite in the folder of the index.",
)
@click.option(
    "--explore",
    metavar="SHARE",
    default=Settings.explore,
    type=Number(0, 1),
    help="Share of searches that show hits of a metric on trial among the others.",
)
@click.option(
    "--keep-searches",
    default="1d",
    type=Duration(positive=True),
    help="How long a search without marks is kept.",
)
@click.option(
    "--keep-marks",
    default="90d",
    type=Duration(positive=True),
    help="How long a search with marks is kept, and its marks.",
)
@click.option(
    "--processes", default=1, type=click.IntRange(1, MAX_PROCESSES), help="Server processes."
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    help="Searches at once per process; by default one per core.",
)
@click.option(
    "--max-pixels",
    default=Settings.max_pixels,
    type=PIXELS,
    help="Largest image; a JPEG may have four times as many pixels.",
)
@click.option("--max-bytes", default=Settings.max_bytes, type=BYTES, help="Largest image file.")
@click.option(
    "--deadline",
    default=Settings.deadline,
    type=Number(0.1, _DAY),
    help="Seconds from the end of a request until it fails with status 503.",
)
@click.option(
    "--log-format",
    type=Choice(["text", "json"]),
    help="Log one line per request, as text or JSON. By default only errors are logged.",
)
def serve_command(
    indexes: tuple[str, ...], host: str, port: int, workers: int | None, **options: Any
) -> None:
    """Serve INDEX, a folder or an address, over HTTP: a web page for searches, and a JSON API.

    Searches are POST /v1/search. Each of several indexes has a name: that of its folder, or NAME in
    NAME=PATH.
    """
    from retrieval_server.server import named, serve

    for name in ("keep_searches", "keep_marks"):
        options[name] = options[name].total_seconds()
    options["feedback"] |= options["feedback_file"] is not None
    settings = Settings(workers=workers or cores(), **options)
    serve(named(indexes), host=host, port=port, settings=settings)


_FILE = click.argument("path", metavar="KEYS", type=PATH)
_OUTPUT = click.option(
    "--output", "-o", "path", required=True, metavar="KEYS", type=PATH, help="The file of keys."
)


@click.group(cls=Group)
def keys() -> None:
    """Create, list, rotate and remove the API keys of a server (retrieval serve INDEX --keys KEYS).

    The file KEYS holds salted hashes. A key itself is printed once, when it is created. A running
    server reloads a changed file.

    Example:  retrieval keys add shop --role read --output keys.jsonl
    """


@keys.command()
@click.argument("name")
@_OUTPUT
@click.option(
    "--role",
    default="read",
    type=Choice(ROLES),
    help="read: search and read items. feedback: also mark hits. write: also add, change and delete"
    " items. admin: also take snapshots and read metrics.",
)
@click.option(
    "--index", "indexes", multiple=True, metavar="NAME", help="Only this index; repeatable."
)
@click.option("--expires", type=Duration(), help="How long the key is valid, such as 90d or 12h.")
def add(
    name: str, path: Path, role: Any, indexes: tuple[str, ...], expires: timedelta | None
) -> None:
    """Create a key called NAME, write its hash to a file, and print the key.

    Example:  retrieval keys add importer --role write --index photos --output keys.jsonl
    """
    from retrieval_server.keys import add_key, new_key

    key, record = new_key(name, role, indexes, expires)
    add_key(path, record)
    _show_key(key, record, path)


@keys.command()
@click.argument("name")
@_OUTPUT
@click.option(
    "--grace", default="24h", type=Duration(), help="How long the old key stays valid, such as 30m."
)
@click.option(
    "--expires",
    type=Duration(),
    help="How long the new key is valid; by default as long as the old one was.",
)
def rotate(name: str, path: Path, grace: timedelta, expires: timedelta | None) -> None:
    """Replace the key called NAME by a new one with the same role and indexes, and print it.

    Example:  retrieval keys rotate shop --grace 7d --output keys.jsonl
    """
    from retrieval_server.keys import rotate_key

    key, record = rotate_key(path, name, grace, expires)
    _show_key(key, record, path)
    assert record.created is not None
    say(f"The old key is refused from {record.created + grace} on, at the latest.", err=True)


def _show_key(text: str, record: Key, path: Path) -> None:
    # Only the key goes to standard output, so that a shell can store it: key=$(retrieval keys add
    # …)
    click.echo(text)
    say(f"Wrote its hash to {path}. Requests send it as 'Authorization: Bearer KEY'.", err=True)
    if record.expires:
        say(f"It expires at {record.expires}.", err=True)


@keys.command("list")
@_FILE
@JSON
def list_keys(path: Path, as_json: bool) -> None:
    """Print the names, roles and indexes of the keys in a file.

    Example:  retrieval keys list keys.jsonl
    """
    from retrieval_server.keys import read_keys

    stored = read_keys(path)
    if as_json:
        secret = {"salt", "hash"}
        say_json([key.model_dump(mode="json", exclude=secret, exclude_none=True) for key in stored])
        return
    for key in stored:
        details = []
        if key.indexes:
            details = [f"indexes {', '.join(key.indexes)}"]
        details += [f"created {key.created}"] if key.created else []
        if key.expires:
            verb = "expires"
            if key.expired:
                verb = "expired"
            details.append(f"{verb} {key.expires}")
        say(f"{key.name}  {key.role}  rk_{key.id}_…  {'; '.join(details)}".rstrip())


@keys.command()
@click.argument("name")
@_OUTPUT
def remove(name: str, path: Path) -> None:
    """Remove the key called NAME from a file. Running servers reject the key within seconds.

    Example:  retrieval keys remove shop --output keys.jsonl
    """
    from retrieval_server.keys import remove_key

    remove_key(path, name)
    say(f"Removed {name} from {path}.")


@command(
    "push",
    "retrieval push photos http://127.0.0.1:8000",
    "RETRIEVAL_KEY=$(cat key) retrieval push photos https://search.example.com --index photos",
)
@click.argument("folder", type=PATH)
@click.argument("url")
@click.option("--index", metavar="NAME", help="Name of the index, if the server has several.")
@click.option("--connections", default=4, type=click.IntRange(1, 64), help="Concurrent requests.")
@click.option(
    "--batch-size", default=16, type=click.IntRange(1), help="Maximum number of images per request."
)
def push_command(
    folder: Path, url: str, index: str | None, connections: int, batch_size: int
) -> None:
    """Add the images below FOLDER to the index of the search server at URL.

    An image's id is its path below FOLDER, and its label is the first folder of that path. Images
    that the index already has with the same content are skipped. To resume after an interruption,
    run the same command again. The environment variable RETRIEVAL_KEY holds the API key.
    """
    from retrieval.base.progress import Meter

    from retrieval_server.client.clients import Client

    done = 0
    with (
        Client(url, key=os.environ.get("RETRIEVAL_KEY") or None, index=index) as client,
        Meter("pushing", 0, "images") as meter,
    ):

        def show(sent: int, total: int) -> None:
            nonlocal done
            done = sent
            meter.reach(sent, total, "pushing")

        try:
            report = client.push(
                folder, connections=connections, batch_size=batch_size, progress=show
            )
        except KeyboardInterrupt:
            say(f"{done:,} images were sent. Run the same command again to continue.", err=True)
            raise
    say(
        f"{report.added:,} images added, {report.replaced:,} replaced, {report.unchanged:,} there"
        f" already, {len(report.bad):,} refused; {report.left_out:,} left out, because their names"
        " do not end like an image's."
    )
    for id, why in report.bad:
        say(one_line(f"{id}: {why}"), err=True)
    if report.bad:
        raise DataError(
            f"The server refused {len(report.bad):,} of the images below {folder}, for the reasons"
            " above."
        )
