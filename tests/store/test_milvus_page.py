"""The commands of the page of stores, run on a Milvus server."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import retrieval
from retrieval.client import Client
from retrieval.store.find_store import store_place

pytest.importorskip("pymilvus", reason="the extra `milvus` is not installed")
PAGE = Path(__file__).parents[2] / "docs" / "stores.md"
SHOWN = "db.example:19530"


def test_the_commands_of_the_page(
    milvus, makers, plain_bundle, other_bundle, cli, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    images = makers.write_digits(tmp_path / "photos", 12)
    (tmp_path / "more" / "9").mkdir(parents=True)
    images[-1].rename(tmp_path / "more" / "9" / "late.png")
    shutil.copytree(plain_bundle, tmp_path / "runs" / "photos" / "bundle")
    shutil.copytree(other_bundle, tmp_path / "better.bundle")
    address = f"milvus://{milvus.place}/photos"
    printed: dict[str, str] = {}
    blocks = re.findall(
        r"test_milvus_page.py runs it -->\n```sh\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    try:
        for line in "".join(blocks).splitlines():
            name, *words = shlex.split(line.replace(SHOWN, milvus.place))
            if words[0] == "serve":
                with (
                    retrieval.serve(words[1], port=0, wait=False) as entry,
                    Client(entry.url) as client,
                ):
                    printed["serve"] = client.search(images[3], k=1).results[0].key
            elif name == "retrieval":
                done = cli(*words)
                assert done.code == 0, (line, done.err)
                printed[" ".join(words[: 1 + (words[0] == "index")])] = done.out
        assert "Indexed 11 items" in printed["index create"]
        assert printed["serve"] in printed["search"]
        assert "1 added" in printed["index add"] and "items: 12" in printed["index show"]
        assert "generation 2 is served" in printed["index migrate"]
        assert "generation 1 is served again" in printed["index rollback"]
        with retrieval.Index.open(tmp_path / "photos.copy") as copy:
            assert len(copy) == 12
    finally:
        store_place(address).drop()
