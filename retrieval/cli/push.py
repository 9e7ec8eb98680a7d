"""`retrieval push`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrieval.cli import say
from retrieval.cli.common import PATH, command
from retrieval.errors import DataError

if TYPE_CHECKING:
    from retrieval.client.folder import PushProgress


@command(
    "push",
    "retrieval push photos http://127.0.0.1:8000",
    "RETRIEVAL_KEY=$(cat key) retrieval push photos https://search.example.com --index photos",
)
@click.argument("folder", type=PATH)
@click.argument("url")
@click.option("--index", metavar="NAME", help="Name of the index, if the server has several.")
@click.option("--connections", default=4, type=click.IntRange(1, 64), help="Concurrent requests.")
@click.option("--batch", default=16, type=click.IntRange(1), help="Most images per request.")
def push_command(folder: Path, url: str, index: str | None, connections: int, batch: int) -> None:
    """Add the images below FOLDER to the index of the search server at URL.

    An image's id is its path below FOLDER, and its label is the first folder of that path. Images
    that the index already has with the same content are skipped, so that after an interruption the
    same command can be run again. The API key is read from the environment variable RETRIEVAL_KEY.
    """
    from retrieval.client.clients import Client
    from retrieval.serving.progress import Meter

    done = 0
    with (
        Client(url, key=os.environ.get("RETRIEVAL_KEY") or None, index=index) as client,
        Meter("pushing", 0, "images") as meter,
    ):

        def show(progress: PushProgress) -> None:
            nonlocal done
            done = progress.done
            meter.reach(progress.done, progress.total, "pushing")

        try:
            report = client.push(folder, connections=connections, batch=batch, progress=show)
        except KeyboardInterrupt:
            say(f"{done:,} images were done. The same command goes on.", err=True)
            raise
    files = "file" if report.left_out == 1 else "files"
    say(
        f"{report.added:,} images added, {report.replaced:,} replaced, {report.unchanged:,} there"
        f" already, {len(report.bad):,} refused; {report.left_out:,} {files} left out, being no"
        " images by their names."
    )
    for id, why in report.bad:
        say(f"{id}: {why}", err=True)
    if report.bad:
        raise DataError(
            f"{len(report.bad):,} of the images below {folder} are not on the server, for the"
            " reasons above."
        )
