"""The process that decodes for `Decoders`: encoded images come in, pixels or a sentence go out, within limits of its own.

It imports Pillow, numpy and the one decoder, and nothing else. Whoever started it does not trust what it answers.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from retrieval.errors import DataError
from retrieval.serving.images import Limits, Preprocessing, decode, thumbnail, to_png
from retrieval.serving.memory import Memory, return_large_blocks

REQUEST = struct.Struct(">BIIQ")  # kind, bytes of the name, of the preprocessing as JSON, of the image
ANSWER = struct.Struct(">BIIQ")  # kind, width and height of the decoded image, bytes that follow
READY, PIXELS, PNG, SENTENCE, THUMBNAIL = range(5)
LONGEST_SENTENCE = 4096
BUFFER = 65_536  # bytes: one read for a small image
_KEPT = 8_000_000  # bytes of free memory that the next image finds ready


class Setting(NamedTuple):
    """What one process is told when it starts.

    Attributes:
        limits: of an image.
        seconds: of CPU time that one image may take.
        memory: bytes that decoding may take, besides what the process has when it starts.
    """

    limits: dict[str, Any]
    seconds: float
    memory: int


def main() -> None:
    """Serve requests from standard input until it closes."""
    setting = Setting(*json.loads(sys.argv[1]))
    given, out = os.fdopen(os.dup(0), "rb", BUFFER), os.dup(1)
    limits = Limits(**setting.limits)
    return_large_blocks(_KEPT)
    _warm()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # what a library prints about a hostile file helps nobody
        os.dup2(nowhere, stream)
    memory = Memory(_KEPT)
    _confine(setting.memory)
    write(out, ANSWER.pack(READY, 0, 0, 0))
    allowance = _Allowance(setting.seconds)
    while len(head := given.read(REQUEST.size)) == REQUEST.size:
        kind, named, told, size = REQUEST.unpack(head)
        name, preprocessing = given.read(named).decode(), given.read(told)
        content = given.read(size)
        if len(content) < size:  # the other side is gone
            return
        allowance.renew()
        _answer(out, kind, name, content, preprocessing, limits)
        del content
        if memory.grown:
            memory.give_back()


def _answer(out: int, kind: int, name: str, content: bytes, preprocessing: bytes, limits: Limits) -> None:
    try:
        if kind in (PNG, THUMBNAIL):  # an item's own picture may be larger than what may be uploaded
            limits = replace(limits, bytes=max(limits.bytes, len(content)))
        image = decode(content, limits, name)
        if kind == PNG:
            made = memoryview(to_png(image))
        elif kind == THUMBNAIL:
            made = memoryview(thumbnail(image))
        else:
            made = memoryview(_read(preprocessing)(image).data).cast("B")
    except DataError as fault:
        sentence = str(fault).encode("utf-8", "replace")[:LONGEST_SENTENCE]
        write(out, ANSWER.pack(SENTENCE, 0, 0, len(sentence)) + sentence)
        return
    except MemoryError:
        sentence = f"{name} needs more memory to be decoded than an image may take. Save it smaller.".encode()
        write(out, ANSWER.pack(SENTENCE, 0, 0, len(sentence)) + sentence)
        return
    write(out, ANSWER.pack(kind, image.width, image.height, len(made)), made)


@lru_cache(maxsize=4)
def _read(preprocessing: bytes) -> Preprocessing:
    return Preprocessing(**json.loads(preprocessing))


def _warm() -> None:
    """Load what decoding loads on first use: later there may be no room for it."""
    for format in ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"):
        kept = io.BytesIO()
        Image.new("RGB", (1, 1)).save(kept, format)
        Preprocessing((1, 1))(decode(kept.getvalue()))


def _confine(memory: int) -> None:
    """No core dumps, no files, and no more than `memory` beyond what is in use now. POSIX only."""
    try:
        import resource
    except ImportError:  # Windows: the parent's clock is what there is
        return
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    for limit, now in ((resource.RLIMIT_DATA, _in_use("VmData")), (resource.RLIMIT_AS, _in_use("VmSize"))):
        if now:
            resource.setrlimit(limit, (now + memory, now + memory))


def _in_use(field: str) -> int:
    """Return a line of /proc/self/status in bytes, 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    except (OSError, StopIteration):
        return 0


class _Allowance:
    """The CPU time that one image may take; the kernel ends the process when it is spent."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = 0

    def renew(self) -> None:
        """Give the next image its own. The kernel counts in whole seconds, so that most images find the limit right."""
        until = math.ceil(time.process_time() + self._seconds)
        if until == self._until:
            return
        self._until = until
        with suppress(ImportError):  # Windows
            import resource

            resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))


def write(stream: int, *pieces: bytes | memoryview) -> None:
    """Write pieces to a pipe, in one go where it takes them."""
    rest = [memoryview(piece) for piece in pieces]
    while rest:
        done = os.writev(stream, rest) if hasattr(os, "writev") else os.write(stream, rest[0])
        while rest and done >= len(rest[0]):
            done -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][done:]


if __name__ == "__main__":
    main()
