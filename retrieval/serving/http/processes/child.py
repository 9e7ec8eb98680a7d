"""One of a server's processes: `python -m retrieval.serving.http.processes.child FD NUMBER`.

FD is its connection with the supervisor; its number is there for who lists processes.
"""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from pydantic import TypeAdapter

from retrieval.errors import RetrievalError
from retrieval.host.scratch import remove
from retrieval.serving.http.processes.group import Member, Setup, line, share
from retrieval.serving.runtime import quiet_threads


def main() -> None:
    """Serve until the supervisor says that it is enough, or is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    with control.makefile("rb") as said:
        told = said.readline()
    if not told:  # the supervisor has ended already
        return
    setup = TypeAdapter(Setup).validate_json(told)
    quiet_threads()
    try:
        _serve(setup, control)
    except RetrievalError as fault:
        control.sendall(line({"fault": str(fault)}))
        sys.exit(fault.exit_code)


def _serve(setup: Setup, control: socket.socket) -> None:
    from retrieval.serving.http.server import Starting, checked, require_server

    require_server()
    from retrieval.serving.http.processes.figures import count_in
    from retrieval.serving.index.index import open_index

    settings = checked(setup.settings, setup.host)
    member = Member(setup, control)
    count_in(member)
    own = (
        share(settings) if member.writes else replace(share(settings), audit=None)
    )  # changes are made by one
    starting = Starting(own, setup.host, settings.workers)
    opener = partial(
        open_index,
        threads=starting.threads,
        device=setup.device,
        plugins=setup.plugins,
    )
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket(fileno=each)) for each in setup.listeners]
        running, finish = starting.start(setup.indexes, opener, listeners, member)
        finish(running.run())
    if member.orphaned:
        remove(member.folder)


if __name__ == "__main__":
    main()
