"""Memory maps of files that others may cut short.

Reading a mapped page that is beyond the end of its file, or on a disk that fails, raises the signal
SIGBUS, which ends the process. No check beforehand can prevent this: the file may be cut during a
search. On Linux, a handler puts zeros in the place of the map, so that the interrupted read goes
on. The reader then asks the map whether it is still intact, and discards what it has read.

The handler is a Python function. It may be one, because only reads of a map raise the signal, and
these happen in NumPy, zlib and FAISS, which hold no lock of the interpreter or of the allocator
meanwhile. Windows refuses to cut a mapped file. On macOS, only cuts between two reads are detected.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import signal
import sys
import threading
import weakref
from typing import IO, Any

import numpy as np

from retrieval.base.arrays import Floats32

# <sys/mman.h> and <signal.h> on Linux; the module `mmap` lacks these
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_SA_SIGINFO = 4
_SA_NODEFER = 0x40000000
_ADDRESS = 16  # offset of the faulty address, `si_addr`, in `siginfo_t`
_LIBC = ctypes.CDLL(None)


class FileMap(mmap.mmap):
    """A file that is mapped as a whole.

    Args:
        file: the open file, not empty.
        last_words: what to tell the user if the file is cut, before the process ends with exit
            code 2. Without it, zeros take the place of the content, and `intact` returns False.
    """

    def __new__(cls, file: IO[bytes], last_words: str = "") -> FileMap:
        """Map a file for reading; with `last_words`, writing changes memory only."""
        if last_words:
            access = mmap.ACCESS_COPY
        else:
            access = mmap.ACCESS_READ
        return super().__new__(cls, file.fileno(), 0, access=access)

    def __init__(self, file: IO[bytes], last_words: str = "") -> None:
        self.last_words = last_words
        self.lost = False
        self.start = np.frombuffer(self, np.uint8).ctypes.data
        _watch(self)

    def floats(self, shape: tuple[int, ...], offset: int = 0) -> Floats32:
        """Return the array of float32 that begins `offset` bytes after the start of the file."""
        return np.frombuffer(self, "<f4", math.prod(shape), offset).reshape(shape)

    def intact(self, size: int | None = None) -> bool:
        """Return whether the file has kept its first `size` bytes, or all, since it was mapped."""
        return not self.lost and self.size() >= (len(self) if size is None else size)


_maps: weakref.WeakSet[FileMap] = weakref.WeakSet()
_lock = threading.Lock()


class _Action(ctypes.Structure):
    """The `struct sigaction` of Linux."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_earlier = _Action()
"""What the process did on SIGBUS before."""


def _on_bus_error(number: int, info: int, context: int) -> None:
    """Replace the map that the signal is about by zeros."""
    address = ctypes.c_void_p.from_address(info + _ADDRESS).value or 0
    for file_map in list(_maps):
        if not file_map.start <= address < file_map.start + len(file_map):
            continue
        if file_map.last_words:
            os.write(2, f"{file_map.last_words}\n".encode())
            os._exit(2)
        file_map.lost = True
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        start = ctypes.c_void_p(file_map.start)
        size = ctypes.c_size_t(len(file_map))
        _LIBC.mmap(start, size, mmap.PROT_READ, flags, -1, ctypes.c_long(0))
        return
    # Not a file of ours: the same read raises the signal again, and the earlier action runs.
    _LIBC.sigaction(signal.SIGBUS, ctypes.byref(_earlier), None)


_handler: Any = None  # ctypes' function must stay referenced


def _watch(file_map: FileMap) -> None:
    """Add a map to those that the handler replaces; install the handler with the first."""
    global _handler
    with _lock:
        _maps.add(file_map)
        if _handler is not None or sys.platform != "linux":
            return
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        _handler = kind(_on_bus_error)
        action = _Action(handler=ctypes.cast(_handler, ctypes.c_void_p))
        action.flags = _SA_SIGINFO | _SA_NODEFER
        _LIBC.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(_earlier))
