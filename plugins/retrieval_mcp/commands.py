"""`retrieval mcp`."""

from __future__ import annotations

import os
from pathlib import Path

import click
from retrieval.cli.common import PATH, command, refuse_options
from retrieval.errors import DataError, needing


@command(
    "mcp",
    "retrieval mcp photos.index --photos photos",
    "RETRIEVAL_KEY=$(cat key) retrieval mcp https://search.example.com --index photos",
)
@click.argument("address", metavar="INDEX")
@click.option(
    "--photos",
    type=PATH,
    default=Path(),
    help="Folder whose images an agent may name as queries; by default the current folder.",
)
@click.option("--index", metavar="NAME", help="Name of the index, if a server has several.")
def mcp(address: str, photos: Path, index: str | None) -> None:
    """Let an agent search INDEX by the Model Context Protocol, over standard input and output.

    INDEX is a folder, an address, or the URL of a search server. The tools are search, identify and
    get; none changes anything. At a server they have the rights of the API key in the environment
    variable RETRIEVAL_KEY.
    """
    if not photos.is_dir():
        raise DataError(f"There is no folder {photos}, which --photos names. Create it first.")
    is_server = address.startswith(("http://", "https://"))
    if not is_server:
        refuse_options("unless INDEX is a server", {"index"})
    with needing("A server for agents needs mcp", "mcp"):
        from retrieval_mcp.tools import server_of
    from retrieval_mcp.searched_index import LocalIndex, ServedIndex

    if is_server:
        from retrieval.client import Client

        key = os.environ.get("RETRIEVAL_KEY") or None
        with Client(address, key=key, index=index) as client:
            server_of(ServedIndex(client), photos).run()
    else:
        from retrieval.index.index import open_index

        with open_index(address) as opened:
            server_of(LocalIndex(opened), photos).run()
