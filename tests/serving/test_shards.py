"""Tar shards in a living index, and archives that mean harm."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from retrieval.errors import DataError
from retrieval.serving.index.creating import create_index
from retrieval.serving.index.index import open_index
from retrieval.serving.index.sources import collect


def png(makers, number: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(makers.digits()[0][number]).save(out, "PNG")
    return out.getvalue()


def write_tar(
    path: Path, members: list[tuple[str, bytes | None]], mode: str = "w", **given
) -> Path:
    """Write members; one without content is a link to /etc/passwd."""
    with tarfile.open(path, mode, **given) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def samples(makers, count: int) -> list[tuple[str, bytes]]:
    members = []
    for number in range(count):
        members.append((f"in/{number:04}.png", png(makers, number)))
        said = {"price": number, "share": float("nan")}
        members.append((f"in/{number:04}.json", json.dumps(said).encode()))
        members.append((f"in/{number:04}.cls", f"{number % 10}\n".encode()))
    return members


@pytest.mark.parametrize("ending", ["tar", "tar.gz", "tgz"])
def test_a_shard_is_indexed_passed_over_and_embedded_again(ending, makers, bundle_path, tmp_path):
    shard = tmp_path / f"000.{ending}"
    write_tar(shard, samples(makers, 70), "w" if ending == "tar" else "w:gz")
    create_index(tmp_path / "i", bundle_path, shard, keep="copy", progress=False)
    other = makers.make_bundle(tmp_path / "other", seed=5)
    with open_index(tmp_path / "i", threads=1) as index:
        assert len(index) == 70
        item = index.get("000/in/0033")["000/in/0033"]
        assert (item.label, item.metadata, item.path) == ("3", {"price": 33, "share": None}, None)
        assert item.source.startswith(f"{shard}#in/0033.png@")
        assert index.store.original("000/in/0033") == png(makers, 33)
        assert index.add(shard, progress=False).unchanged == 70
        write_tar(shard, samples(makers, 20), "w" if ending == "tar" else "w:gz")
        less = index.add(shard, sync=True, progress=False)
        assert (less.changed, less.removed) == (20, 50)
        assert index.migrate(other, progress=False).embedded == 20
        files = tmp_path / "files"
        files.mkdir()
        (files / "13.png").write_bytes(png(makers, 13))
        create_index(tmp_path / "f", other, files, progress=False)
        with open_index(tmp_path / "f", threads=1) as frozen:
            assert index.vector("000/in/0013") == pytest.approx(frozen.vector("13.png"), abs=1e-6)


def test_text_and_further_members(makers, tmp_path):
    image = png(makers, 0)
    members = [
        ("a.jpg", image),
        ("a.txt", b"a caption"),
        ("a.cls", b"7"),
        ("a.seg.png", image),
        ("b.seg.png", image),
        ("b.png", image),
        ("b.txt", b"cat"),
        ("b.npy", b"1"),
        ("link.png", None),
        ("c.json", b"{}"),
        ("../../x/\x1b[2J.png", image),
    ]
    found = collect([write_tar(tmp_path / "s.tar", members)], "image")
    told = [(item.key, item.label, item.metadata) for item in found.items]
    assert told == [
        ("s/a", "7", {"txt": "a caption"}),
        ("s/b", "cat", {}),
        ("s/../../x/\\x1b[2J", None, {}),
    ]
    assert found.items[1].origin.part.startswith("b.png@")
    notes = "\n".join(found.left_out)
    assert "1 member is left out, being links, devices or files with holes." in notes
    assert "2 members are left out, being neither an image nor .json" in notes


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("a.txt", b"x")], "holds no image"),
        ([("a.png", b"x"), ("a.json", b"[1]")], r"a\.json is no JSON object"),
        ([("a.png", b"x"), ("a.json", b"[" * 100_000)], r"a\.json is not JSON: nested too deeply"),
        ([("a.png", b"x"), ("a.json", b'{"x": 1, "x": 2}')], "'x' is there twice"),
        ([("a.png", b"x"), ("a.txt", b"\xff")], r"a\.txt is not UTF-8 text"),
        ([("a.png", b"x"), ("a.txt", b"x" * 1_000_001)], r"a\.txt has 1,000,001 bytes"),
        ([("a" * 1200 + ".png", b"x")], "has an id of 1,202 characters"),
        ([("a.png", b"x"), ("b.png", b"x"), ("a.png", b"x")], "'s/a' is the id of 2 items"),
        ([("a" * 400_000 + ".png", b"x")], "headers are larger than any that is read"),
    ],
)
def test_bad_shards_are_sentences(members, says, bundle_path, tmp_path):
    write_tar(tmp_path / "s.tar", members)
    with pytest.raises(DataError, match=says):
        create_index(tmp_path / "i", bundle_path, tmp_path / "s.tar", progress=False)


def header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108], block[124:136], block[156:157] = b"0000644\0", size, kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "content",
    [
        header(b"a.png", b"\xff" * 12) + bytes(2048),  # a negative size: for ever, in some tarfile
        header(b"a.png", b"77777777777\0") + bytes(2048),
        header(b"x", b"77777777777\0", b"x") + bytes(2048),
        header(b"x", b"00000001000\0", b"L") * 3000 + bytes(2048),
        (header(b"x", b"00000000013\0", b"x") + b"11 path=abc\n".ljust(512, b"\0")) * 3000
        + bytes(1024),
        header(b"x", b"00000000000\0", b"S") + b"\xff" * 512 * 3000,
        b"",
        b"not a tar" * 1000,
    ],
)
def test_headers_that_mean_harm(content, tmp_path):
    (tmp_path / "s.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"s\.tar (is damaged|holds no image)"):
        collect([tmp_path / "s.tar"], "image")


@pytest.mark.timeout(120)
def test_a_bomb_is_not_unpacked(tmp_path):
    with gzip.open(tmp_path / "s.tar.gz", "wb", 9) as file:
        file.write(header(b"a.png", b"37777777777\0"))  # 4 GB
        for _ in range(300):
            file.write(bytes(1_000_000))
    assert (tmp_path / "s.tar.gz").stat().st_size < 1_000_000
    with pytest.raises(DataError, match=r"s\.tar\.gz is damaged.*more than 100 times its size"):
        collect([tmp_path / "s.tar.gz"], "image")


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_what_is_cut_off_or_turned_over_is_a_sentence(ending, makers, tmp_path):
    path = tmp_path / f"s.{ending}"
    whole = write_tar(path, samples(makers, 20), "w" if ending == "tar" else "w:gz").read_bytes()
    members = 20 * 3 * 1024 if ending == "tar" else len(whole)
    random = np.random.default_rng(0)
    for cut in random.integers(members, size=30):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match="is damaged"):
            collect([path], "image")
    kinds = set()
    for number in range(60):
        spoilt = bytearray(whole)
        for at in random.integers(members, size=1 + number % 4):
            spoilt[at] ^= 1 << random.integers(8)
        path.write_bytes(spoilt)
        try:
            kinds.add(type(collect([path], "image")))
        except DataError as fault:
            kinds.add(str(fault).startswith(str(path)))
    assert True in kinds
    assert False not in kinds
