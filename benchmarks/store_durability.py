"""Whether a system's acknowledged writes are on the disk, and whether a killed process has left them."""

from __future__ import annotations

import shutil
from typing import Any

from store_run import WAIT, Failed, Run, Worker
from store_trace import between, judge, strace


def durability(run: Run, name: str) -> dict[str, Any]:
    """Trace one acknowledged write of each kind, then kill the process and count what is there."""
    folder, trace = run.folder / "stores" / "durability" / name.replace(" ", "-"), run.folder / "trace.txt"
    shutil.rmtree(folder, ignore_errors=True)
    worker = Worker(run, name, folder)
    worker.ask("open")
    worker.ask("fill", ids=list(range(1000)))
    worker.ask("loaded")
    worker.end()
    worker = Worker(run, name, folder, before=tuple(strace(trace)))
    worker.ask("open")
    worker.ask("fill", ids=[1000])
    deletes = "cannot" not in worker.ask("marked", do_="delete", ids=[5])
    worker.ask("marked", do_="add", ids=[2000])
    seen = {}
    for kind in ("add", *(["delete"] if deletes else [])):
        calls = between(trace.read_text(), f"{kind}-begins", f"{kind}-ends", folder)
        seen[kind] = judge(calls, folder)
    worker.kill()
    trace.unlink()
    worker = Worker(run, name, folder)
    worker.ask("open")
    added = list(range(3000, 3020))
    for id in added:
        worker.ask("fill", ids=[id])
    worker.ask("fill", ids=list(range(4000, 4100)))
    worker.kill()
    worker = Worker(run, name, folder)
    worker.ask("open")
    expected = [1000, 2000, *added, *range(4000, 4100)]
    found = worker.ask("find", ids=expected)["found"]
    gone = not deletes or not worker.ask("find", ids=[5])["found"]
    count = worker.ask("count")["count"]
    worker.end()
    shutil.rmtree(folder)
    worker = Worker(run, name, folder)
    worker.ask("open", load=True)
    worker.ask("load", upto=20_000, seconds=WAIT)
    worker.kill()
    worker = Worker(run, name, folder)
    try:
        worker.ask("open")
        after = worker.ask("count")["count"]
    except Failed as fault:
        after = str(fault).strip().splitlines()[-1]
    worker.kill()
    shutil.rmtree(folder)
    return {**seen, "loaded, then killed": after, "kill": {"written": len(expected), "found": len(found), "gone": gone, "count": count, "expected": 1000 + len(expected) - deletes}}  # fmt: skip
