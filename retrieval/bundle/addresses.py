"""Bundles at addresses, such as `hf://OWNER/NAME`, which plugins download."""

from __future__ import annotations

from pathlib import Path

from retrieval.base.folder_kinds import StrPath
from retrieval.base.photo_files import address_of


def bundle_folder(path: StrPath) -> Path:
    """Return the folder of a bundle.

    A path is returned as it is. So is an address that no plugin knows.

    Raises:
        BundleError: the address does not exist, or its bundle cannot be used.
        ServerError: the address cannot be reached.
    """
    address = address_of(path)
    if address is None:
        return Path(path)
    from retrieval.host.factory import calling
    from retrieval.host.plugins import load_plugins

    hook = load_plugins().hook.retrieval_bundle_at
    with calling("A plugin's retrieval_bundle_at"):
        folder: Path | None = hook(address=address)
    return folder or Path(path)
