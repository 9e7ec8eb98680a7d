"""Strict JSON: the fast parser agrees with the strict one, and the depth is limited."""

import sys

import pytest
from retrieval.base import strict_json
from retrieval.base.strict_json import strict_loads

TEXTS = [
    b"{}",
    b"[]",
    b"1",
    b'"a"',
    b"",
    b' {"a" : [1 , 2]} ',
    b'{"a":1,"b":[0.5,-1e-3,2]}',
    b'{"a":1,"a":2}',
    b'{"\\u0061":1,"a":2}',
    b'{"a":{"b":1,"b":2}}',
    b'{"a":[{"b":1,"b":2}]}',
    b'{"a":":"}',
    b'{"a:b":1,"c":2}',
    b'{"a":NaN,"b":-Infinity,"c":1e400}',
    b'{"a":-NaN}',
    b'{"a":1,}',
    b'{"a":01}',
    b'{"a":1.}',
    b'{"a":.5}',
    b'{"a":+1}',
    b'{"a":1}x',
    b'{"a":1}{"a":2}',
    b'\xef\xbb\xbf{"a":1}',
    '{"a":1}'.encode("utf-16"),
    b'{"a":"\\ud800"}',
    b'{"a":"\\ud83d\\ude00"}',
    b'{"a":"x\xff"}',
    b'{"a":"\x01"}',
    b'{"a":"\\u0000"}',
    b'{"a":12345678901234567890123}',
    b'{"a":' + b"9" * 5000 + b"}",
    b'{"a":-0,"b":-0.0,"c":1E5}',
    b'{"a":' + b"[" * 64 + b"]" * 64 + b"}",
    b'{"a":' + b"[" * 63 + b"]" * 63 + b"}",
    b'{"a":' + b"[" * 100_000,
    b'{"a":true,"b":false,"c":null}',
    b"{'a':1}",
    b'{"a":1 "b":2}',
    b'{"a" "b"}',
    b"{1:2}",
    b"\x0c{}",
]


def read(text: bytes) -> str:
    """Return the parsed text, to the last bit, or the name of the error."""
    try:
        return repr(strict_loads(text, finite=False))
    except (ValueError, RecursionError) as fault:
        return type(fault).__name__


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:24]))
def test_both_parsers_agree(text, monkeypatch):
    quick = read(text)
    monkeypatch.setattr(strict_json, "_fast_object", lambda text: None)
    assert quick == read(text) or {quick, read(text)} <= {
        "ValueError",
        "JSONDecodeError",
        "UnicodeDecodeError",
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 5000, "nested too deeply"),
        ('{"a": ' * 65 + "1" + "}" * 65, "nested too deeply"),
        ('["\\"[", ' + "[" * 64 + "]" * 64 + "]", "nested too deeply"),
        ('"' + '\\"[' * 200_000 + "\\", "Unterminated"),
    ],
    ids=range(4),
)
def test_depth_is_limited_even_if_python_allows_more(text, says):
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 100_000)  # as some libraries do
    try:
        with pytest.raises(ValueError, match=says):
            strict_loads(text)
    finally:
        sys.setrecursionlimit(before)
    wide = '["' + "[" * 200 + '"' + ", []" * 100 + "]"  # brackets in text and in a row are not deep
    assert strict_loads(wide)[100] == []
