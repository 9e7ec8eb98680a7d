"""The server's log: one line an event, and few lines a second, whatever is sent."""

from __future__ import annotations

import logging
import sys
import time

_LINES = 20  # at once
_PER_SECOND = 1.0  # after that
_LONGEST = 500


class FewLines(logging.Filter):
    """Lets a burst of lines pass, then one a second; says how many were left out.

    Args:
        debug: whether tracebacks are kept.
    """

    def __init__(self, debug: bool = False) -> None:
        super().__init__()
        self._debug = debug
        self._left = float(_LINES)
        self._last = time.monotonic()
        self._dropped = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Shorten a line, or leave it out."""
        now = time.monotonic()
        self._left = min(_LINES, self._left + (now - self._last) * _PER_SECOND)
        self._last = now
        if self._left < 1:
            self._dropped += 1
            return False
        self._left -= 1
        text = " ".join(record.getMessage().split())
        if record.exc_info and not self._debug:
            text = f"{text}: {record.exc_info[0].__name__}" if record.exc_info[0] else text
            record.exc_info = None
        text = text[:_LONGEST]
        if self._dropped:
            text += f" ({self._dropped:,} lines left out before this one)"
            self._dropped = 0
        record.msg, record.args = text, ()
        return True


def set_up(debug: bool) -> None:
    """Send what the server, uvicorn and the event loop have to say to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(FewLines(debug))
    for name in ("retrieval.serving.http", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").propagate = False
    for name in ("python_multipart", "python_multipart.multipart"):  # its sentence is in the answer
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
