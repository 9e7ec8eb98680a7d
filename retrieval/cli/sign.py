"""`retrieval sign`."""

from __future__ import annotations

from pathlib import Path

import click

from retrieval.cli import say


@click.command("sign")
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--key", required=True, type=click.Path(path_type=Path), help="File of the private key.")
@click.option("--new-key", is_flag=True, help="Make the key first; its public half is written to KEY.pub.")
def sign_command(folder: Path | None, key: Path, new_key: bool) -> None:
    """Sign FOLDER, a bundle or an index, so that others can ask for it with --require-signature KEY.pub.

    \b
    Examples:
      retrieval sign --key maker.key --new-key
      retrieval sign photos.index --key maker.key
    """
    from retrieval.serving import signing

    if folder is None and not new_key:
        raise click.UsageError("Name the bundle or index to sign, or make a key with --new-key.")
    if new_key:
        public = signing.new_key(key)
        say(f"Wrote {key}, to be kept to yourself, and {public}, for those who check.")
    if folder is not None:
        say(f"Signed {folder}: {signing.sign(folder, key)}")
