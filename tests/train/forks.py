"""One interpreter that has imported what training needs, and forks the processes of a group: so
each costs no import.

Reads a line of JSON for each group: a script, its arguments, and of each process the environment
and the files of its output. Answers with a line: the exit codes. It computes nothing itself, so it
has no threads that a fork would lose.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from typing import Any

import retrieval.export.export_run
import retrieval.training.trainer  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
import torch._dynamo
import torchvision.transforms.v2  # noqa: F401

warnings.filterwarnings("error", category=RuntimeWarning)
torch.set_num_threads(1)


def run(arguments: list[str], environment: dict[str, str], files: list[str]) -> int:
    """Run a script as if Python had been started with it; return its exit code."""
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(environment)
    sys.argv = arguments
    code = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    return code


def group(order: dict[str, Any]) -> list[int]:
    """Run the processes of a group to their end, or kill them: 300 seconds after they began, 5
    after one has failed.
    """
    running = {}
    for one in order["processes"]:
        pid = os.fork()
        if pid == 0:
            os._exit(run(order["arguments"], **one))
        running[pid] = len(running)
    ended, over = [0] * len(running), time.monotonic() + 300
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ended[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            if status:  # the others may wait for it for ever
                over = min(over, time.monotonic() + 5)
        elif time.monotonic() > over:
            for each in running:
                os.kill(each, signal.SIGKILL)
            over = float("inf")
        else:
            time.sleep(0.02)
    return ended


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(group(json.loads(line))), flush=True)
