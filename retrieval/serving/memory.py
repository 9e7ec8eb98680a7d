"""Free memory that the C library keeps for itself, given back to the system."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable


class Memory:
    """What this process holds, from now on. Does nothing where there is no glibc or no /proc.

    Args:
        kept: bytes that may be free and are not given back: taking them again costs more.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._trim: Callable[[int], int] | None = None
        try:
            trim = ctypes.CDLL(None).malloc_trim
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, AttributeError, TypeError):
            return
        self._trim = trim
        self._most = self._resident() + kept

    def give_back(self) -> None:
        """Return free memory to the system if the process has grown; takes some microseconds if it has not."""
        if self._trim is not None and self._resident() > self._most:
            self._trim(0)
            self._most = self._resident() + self._kept  # what was loaded meanwhile stays

    def _resident(self) -> int:
        return int(os.pread(self._statm, 100, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")
