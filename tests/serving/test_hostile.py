"""Bundles made by someone who means harm are refused soon, without much memory."""

import sys

import pytest
from retrieval.errors import BundleError
from retrieval.serving.bundle import Bundle
from retrieval.serving.files.strict_json import strict_loads


@pytest.fixture
def bundle(makers, tmp_path):
    return makers.make_bundle(tmp_path / "b")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"format": 1, "format": 1}', "'format' appears twice"),
        ('{"format": 1, "count": ' + "9" * 5000 + "}", "not JSON"),
        ('{"format": ' + "9" * 400 + "}", "reads format 1"),
        ("\x00" * 100, "not JSON"),
        ("{" + " " * 5_000_000 + "}", "bytes"),
    ],
)
def test_json_that_is_meant_to_break_its_reader(text, says, bundle):
    (bundle / "manifest.json").write_text(text)
    with pytest.raises(BundleError, match=says):
        Bundle.open(bundle)


NAMED = {"sha256": "0" * 64, "bytes": 1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(vector=10**9), "vector"),
        (lambda c: c["input"].update(shape=[1, 10**5, 10**5]), "numbers|takes uint8"),
        (lambda c: c["input"]["preprocessing"].update(resize=10**9), "the limit is"),
        (lambda c: c["input"]["preprocessing"].update(mean=["x"]), "mean"),
        (lambda c: c["files"].update({"../../x": NAMED}), "not the plain name"),
        (lambda c: c["files"].update({"x\n\x1b]0;": NAMED}), "not the plain name"),
        (
            lambda c: c["files"]["encoder.onnx"].update(bytes=10**18),
            "is not what the bundle's manifest says|bytes instead",
        ),
        (lambda c: c["versions"].update(x=[1]), "versions"),
        (lambda c: c.update(name={"a": 1}), "name"),
        (lambda c: c.update(evaluation={"a": "b"}), "evaluation"),
    ],
)
def test_a_manifest_that_lies(change, says, bundle, makers):
    makers.change_manifest(bundle, change)
    with pytest.raises(BundleError, match=says):
        Bundle.open(bundle)


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
def test_depth_is_bounded_whatever_python_s_own_limit_is(text, says):
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 100_000)  # as some libraries do
    try:
        with pytest.raises(ValueError, match=says):
            strict_loads(text)
    finally:
        sys.setrecursionlimit(before)
    wide = '["' + "[" * 200 + '"' + ", []" * 100 + "]"  # neither text nor width is depth
    assert strict_loads(wide)[100] == []
