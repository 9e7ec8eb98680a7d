"""`multipart/form-data`, parsed from memory: which fields there are, in order, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from retrieval.serving.http.errors import RequestError

_PARTS = 128  # that are read quickly
_TYPE = re.compile(r"multipart/form-data; ?boundary=([A-Za-z0-9_-]{1,70})")
_HEADER = re.compile(
    rb'Content-Disposition: form-data; name="([a-z]+)"(; filename="[A-Za-z0-9_. -]+")?(?:\r\nContent-Type: [a-z]+/[a-z0-9.+-]+)?'
)

Parts = list[tuple[str, bool, bytes]]
"""Of each field its name, whether it is a file, and its content."""


class Form:
    """The fields of a form.

    Args:
        content_type: with the boundary.
        content: the body.
        fields: names of fields that it may have besides images.
        largest: bytes of an image.
        images: how many files its field `image` may hold.
        parts: what `quick_parts` gave, where it was asked.

    Attributes:
        images: the content of each file in the field `image`, in order.

    Raises:
        RequestError: not a form, or with other fields, or one of them too often.
    """

    def __init__(
        self,
        content_type: str,
        content: bytes,
        fields: Sequence[str],
        largest: int,
        images: int = 1,
        parts: Parts | None = None,
    ) -> None:
        self.images: list[bytes] = []
        self._known, self._most, self._largest = tuple(fields), images, largest
        self._values: dict[str, bytes] = {}
        self._headers: list[tuple[bytes, bytes]] = []
        self._name = b""
        self._value = b""
        self._field = ""
        self._pieces: list[bytes] = []
        self._ended = False
        parts = parts or quick_parts(content_type, content)
        if parts is None:
            self._parse(content_type, content)
            return
        for name, is_file, value in parts:
            self._begin(name, is_file)
            self._pieces = [value]
            self._end_part()

    def _parse(self, content_type: str, content: bytes) -> None:
        """Read a form of any kind."""
        boundary = parse_options_header(content_type.encode("latin-1", "replace"))[1].get(b"boundary")
        if not boundary:
            raise RequestError(400, "The form cannot be read: its content type names no boundary.")
        try:
            parser = MultipartParser(
                boundary,
                {
                    "on_part_data": lambda data, start, end: self._pieces.append(data[start:end]),
                    "on_part_end": self._end_part,
                    "on_header_field": self._on_name,
                    "on_header_value": self._on_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._begin_part,
                    "on_end": self._end,
                },
            )
            parser.write(content)
            parser.finalize()
        except FormParserError as fault:
            raise RequestError(400, f"The form cannot be read: {str(fault).rstrip('.')}.") from None
        if not self._ended:
            raise RequestError(400, "The form cannot be read: its end is missing.")

    def get(self, name: str) -> bytes | None:
        """Return a field's content; None where it has none."""
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        """Return a field's text.

        Raises:
            RequestError: 400, it is not UTF-8.
        """
        given = self._values.get(name)
        try:
            return None if given is None else given.decode()
        except UnicodeDecodeError:
            raise RequestError(400, f'The field "{name}" is not UTF-8 text.') from None

    def pictures(self) -> list[bytes]:
        """Return the files in the field `image`: one at least.

        Raises:
            RequestError: 400, there is none.
        """
        if not self.images:
            raise RequestError(400, 'The form needs a file in its field "image".')
        return self.images

    def _on_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers.append((self._name.lower(), self._value))
        self._name = self._value = b""

    def _begin_part(self) -> None:
        said = [value for name, value in self._headers if name == b"content-disposition"]
        self._headers = []
        kind, options = parse_options_header(said[0]) if len(said) == 1 else (b"", {})
        if kind != b"form-data" or b"name" not in options:
            raise RequestError(400, "The form cannot be read: a part of it does not say which field it is.")
        self._begin(options[b"name"].decode("latin-1"), b"filename" in options)

    def _begin(self, name: str, is_file: bool) -> None:
        """Begin a field, if the form may have it."""
        self._field = name
        if self._field == "image":
            if len(self.images) >= self._most:
                few = "one" if self._most == 1 else f"{self._most:,} at most"
                raise RequestError(400, f'Too many files: give {few}, in the field "image".')
            if not is_file:
                raise RequestError(400, 'The form needs a file in its field "image".')
        elif self._field not in self._known:
            if is_file:
                raise RequestError(
                    400, 'The form needs a file in its field "image", and takes no other file.'
                )
            names = ", ".join(f'"{name}"' for name in ("image", *self._known))
            raise RequestError(400, f"The form has an unknown field; it takes {names}.")
        elif self._field in self._values:
            raise RequestError(400, f'The form repeats its field "{self._field}".')

    def _end_part(self) -> None:
        content = b"".join(self._pieces)
        self._pieces = []
        if self._field == "image":
            if len(content) > self._largest:
                raise RequestError(
                    413, f"The image has {len(content):,} bytes; the limit is {self._largest:,}."
                )
            self.images.append(content)
        else:
            self._values[self._field] = content

    def _end(self) -> None:
        self._ended = True


def quick_parts(content_type: str, content: bytes) -> Parts | None:
    """Return the fields of a form as programs write it; None for any other, and for what is wrong.

    The library looks at each byte of a header by itself, which takes longer than a small image's search.
    """
    kind = _TYPE.fullmatch(content_type)
    if kind is None:
        return None
    mark = b"--" + kind[1].encode()
    if not content.startswith(mark + b"\r\n") or not content.endswith(b"\r\n" + mark + b"--\r\n"):
        return None
    between, start, end = b"\r\n" + mark, len(mark), len(content) - len(mark) - 6
    found: Parts = []
    while start >= 0:
        stop = content.find(between, start, end)
        upto = end if stop < 0 else stop
        blank = content.find(b"\r\n\r\n", start, upto)
        if blank < start + 2 or not content.startswith(b"\r\n", start) or len(found) == _PARTS:
            return None
        known = _HEADER.fullmatch(content, start + 2, blank)
        if known is None:
            return None
        found.append((known[1].decode(), known[2] is not None, content[blank + 4 : upto]))
        start = -1 if stop < 0 else stop + len(between)
    return found
