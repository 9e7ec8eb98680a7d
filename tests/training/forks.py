"""Forks the processes of groups from one interpreter that has imported what training needs.

Reads one line of JSON per group: a script, its arguments, and the processes' environments and
output files. Answers with a line: the exit codes. This interpreter computes nothing, so it has no
threads that a fork would lose.
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
    """Run a script as `python SCRIPT …` would, and return its exit code."""
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(environment)
    sys.argv = arguments
    code = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    return code


def group(order: dict[str, Any]) -> list[int]:
    """Run the processes of a group, and return their exit codes.

    They are killed after 300 seconds, or 5 seconds after one has failed.
    """
    running = {}
    for member in order["processes"]:
        pid = os.fork()
        if pid == 0:
            os._exit(run(order["arguments"], **member))
        running[pid] = len(running)
    codes, deadline = [0] * len(running), time.monotonic() + 300
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            if status:  # the others may wait for it for ever
                deadline = min(deadline, time.monotonic() + 5)
        elif time.monotonic() > deadline:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.02)
    return codes


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(group(json.loads(line))), flush=True)
