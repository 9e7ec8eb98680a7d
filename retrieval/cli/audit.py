"""The option --audit, which records a command that changes an index."""

from __future__ import annotations

import os
import platform
import pwd
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from retrieval.cli.common import PATH, this_command


def audited(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option --audit, which records the command as a change of INDEX."""

    @click.option(
        "--audit",
        type=PATH,
        envvar="RETRIEVAL_AUDIT",
        metavar="FILE",
        help="Also log this command here, in the record of 'retrieval serve --audit'; by default in"
        " the file that the environment variable RETRIEVAL_AUDIT names.",
    )
    @wraps(function)
    def recorded(audit: Path | None, **arguments: Any) -> None:
        if audit is None:
            function(**arguments)
            return
        from retrieval.index.change_log import Audit, Change, new_request_id
        from retrieval.store.address import index_name

        verb = str(click.get_current_context().info_name)
        path = arguments["path"]
        command = {
            "user": _user(),
            "path": str(path.absolute() if isinstance(path, Path) else path),
            "command": this_command(),
        }
        change = Change(
            verb,
            index_name(str(path)),
            request=new_request_id(),
            key="",
            role=None,
            address=platform.node(),
            ids=arguments.get("ids", ()),
            command=command,
        )
        with Audit(audit).recording(change):
            change.count = function(**arguments)

    return recorded


def _user() -> str:
    """Return the name of the process's user, which no environment variable can change."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # usual in containers
        return str(os.getuid())
