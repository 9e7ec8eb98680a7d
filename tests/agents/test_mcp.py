"""`retrieval mcp`, asked by the client of the official SDK over standard input and output."""

import base64
import io
import json
import os
import re
import subprocess
import sys

import anyio
import makers
import pytest
import retrieval
from PIL import Image
from retrieval.bundle.bundle import Bundle
from retrieval.index.index import create_index, open_index

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed")

from mcp import Client, StdioServerParameters, stdio_client  # noqa: E402


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A folder with photos and a calibrated index of them. Not to be changed."""
    folder = tmp_path_factory.mktemp("shop")
    makers.write_digits(folder / "photos", 200)
    bundle = makers.make_bundle(folder / "bundle")
    create_index(folder / "photos.index", bundle, [folder / "photos"], progress=False)
    with open_index(folder / "photos.index") as index:
        index.calibrate(progress=False)
    return folder


def ask(place, calls, *options, photos=None, **environment):
    """Start `retrieval mcp`, call tools, and return the client's tools and the answers."""
    words = ["-m", "retrieval.cli", "mcp", str(place), *map(str, options)]
    if photos is not None:
        words += ["--photos", str(photos)]
    parameters = StdioServerParameters(
        command=sys.executable,
        args=words,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )

    async def talk():
        async with Client(stdio_client(parameters)) as client:
            tools = (await client.list_tools()).tools
            return tools, [await client.call_tool(name, arguments) for name, arguments in calls]

    return anyio.run(talk)


def text_of(answer):
    return "\n".join(part.text for part in answer.content if part.type == "text")


def data_url(content, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def check_answers(place, shop, **settings):
    """Ask every tool, and compare with the index itself."""
    photos = shop / "photos"
    file = sorted(photos.rglob("*.png"))[3]
    with open_index(shop / "photos.index", threads=1) as index:
        hits = index.search(file, k=3)
        filtered = index.search(file, k=3, filter="label = '3'")
        near = index.search(None, 3, like=[hits[0].id])
        verdict = index.identify(file, 0.2)
    calls = [
        ("search", {"image": str(file), "k": 3}),
        ("search", {"image": data_url(file.read_bytes()), "k": 3, "filter": "label = '3'"}),
        ("search", {"like": [hits[0].id], "k": 3}),
        ("identify", {"image": str(file.relative_to(photos)), "far": 0.2}),
        ("get", {"id": hits[0].id}),
        ("get", {"id": hits[0].id, "picture": True}),
    ]
    tools, answers = ask(place, calls, photos=photos, **settings)
    assert [tool.name for tool in tools] == ["search", "identify", "get"]
    assert all(tool.annotations.read_only_hint for tool in tools)
    assert not any(answer.is_error for answer in answers), [*map(text_of, answers)]
    content = [answer.structured_content for answer in answers]
    for answer, expected in zip(content, (hits, filtered, near), strict=False):
        assert [hit["id"] for hit in answer["results"]] == [hit.id for hit in expected]
        assert answer["bundle"] == Bundle.open(shop / "bundle").sha256
    assert (content[3]["label"], content[3]["second"]) == (verdict.label, verdict.second)
    assert content[4] == {"id": hits[0].id, "label": hits[0].label, "metadata": {}}
    (picture,) = [part for part in answers[5].content if part.type == "image"]
    assert Image.open(io.BytesIO(base64.b64decode(picture.data))).size == (8, 8)


def test_an_agent_searches_an_index_in_a_folder(shop):
    check_answers(shop / "photos.index", shop)


@pytest.mark.parametrize("takes_text", [True, False])
def test_an_agent_searches_by_words(takes_text, tmp_path):
    """By vectors of a text encoder; by these and the items' words; and by words alone."""
    photos = tmp_path / "photos"
    makers.write_digits(photos, 100)
    bundle = makers.make_bundle(tmp_path / "bundle")
    if takes_text:
        makers.add_text(bundle)
    place = tmp_path / "photos.index"
    create_index(place, bundle, [photos], progress=False)
    calls = [
        ("search", {"text": "three"}),
        ("search", {"text": "a red MUG, three", "k": 40, "filter": "label != '7'"}),
    ]

    def check():
        with open_index(place, threads=1) as index:
            expected = [
                index.search(text="three"),
                index.search(text="a red MUG, three", k=40, filter="label != '7'"),
            ]
        with retrieval.serve(place, port=0, wait=False) as server:
            answers_of = [ask(where, calls, photos=photos)[1] for where in (place, server.url)]
        for answers in answers_of:
            for answer, hits in zip(answers, expected, strict=True):
                assert not answer.is_error, text_of(answer)
                found = answer.structured_content["results"]
                assert [hit["id"] for hit in found] == [hit.id for hit in hits] != []
                assert [hit.get("score") for hit in found] == pytest.approx(
                    [hit.score for hit in hits]
                )
                distances = [None if hit.distance != hit.distance else hit.distance for hit in hits]
                assert [hit["distance"] for hit in found] == pytest.approx(distances, abs=1e-5)
                json.loads(text_of(answer), parse_constant=pytest.fail)

    with open_index(place) as index:
        index.update(filter="label = '3'", label="three")
        index.update(filter="label = '5'", metadata={"what": "red mug"})
    if takes_text:
        check()
    else:
        _, answers = ask(place, calls[:1], photos=photos)
        assert answers[0].is_error and "takes no texts" in text_of(answers[0])
    with open_index(place) as index:
        index.keep_words(progress=False)
    check()


@pytest.fixture
def guarded(shop, tmp_path):
    """A server with keys: its address, and the keys by role."""

    def run(*words):
        line = [sys.executable, "-m", "retrieval.cli", *map(str, words)]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout

    file = tmp_path / "keys.jsonl"
    keys = {}
    for role in ("read", "write"):
        shown = run("keys", "add", role, "--role", role, "--output", file)
        keys[role] = re.search(r"rk_\S+", shown)[0]
    line = [sys.executable, "-m", "retrieval.cli", "serve", str(shop / "photos.index")]
    line += ["--port", "0", "--keys", str(file), "--images", str(shop / "photos")]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = re.search(r"http://[\d.:]+", process.stdout.readline())[0]
            yield url, keys
        finally:
            process.terminate()


def test_an_agent_searches_a_served_index_with_the_rights_of_its_key(shop, guarded, cli):
    url, keys = guarded
    check_answers(url, shop, RETRIEVAL_KEY=keys["read"])
    for key in ("", "rk_0000000000000000_wrong"):
        os.environ["RETRIEVAL_KEY"] = key
        try:
            done = cli("mcp", url)
        finally:
            del os.environ["RETRIEVAL_KEY"]
        assert done.code == 2 and "key" in done.err and done.out == ""


def test_what_an_agent_may_not_ask_is_refused_in_a_sentence(shop, tmp_path):
    photos = shop / "photos"
    secret = tmp_path / "secret.png"
    secret.write_bytes(sorted(photos.rglob("*.png"))[0].read_bytes())
    (tmp_path / "link.png").symlink_to(secret)
    large = data_url(b"\x89PNG\r\n\x1a\n" + b"\0" * 10_000_001)
    bomb = io.BytesIO()
    Image.new("1", (19_000, 19_000)).save(bomb, "PNG")
    id = sorted(photos.rglob("*.png"))[0].relative_to(photos).as_posix()
    cases = [
        ("search", {"image": str(secret)}, "is not below"),
        ("search", {"image": "../../etc/passwd"}, "is not below"),
        ("search", {"image": "/dev/zero"}, "is not below"),
        ("search", {"image": "missing.png"}, "cannot be read"),
        ("search", {"image": "0"}, "cannot be read"),
        ("search", {"image": "data:image/png;base64,!!"}, "not base64"),
        ("search", {"image": data_url(b"#!/bin/sh")}, "is not an image in a known format"),
        ("search", {"image": data_url(bomb.getvalue())}, "pixels"),
        ("search", {"image": large}, "13333433|bytes; the limit"),
        ("search", {}, "exactly one of image, text and like"),
        ("search", {"text": "a", "like": [id]}, "exactly one of image, text and like"),
        ("search", {"text": "red mug"}, "text"),
        ("search", {"like": ["/etc/passwd"]}, "has no item /etc/passwd"),
        ("search", {"like": [id] * 101}, "100"),
        ("search", {"like": [id], "k": 101}, "100"),
        ("search", {"like": [id], "k": 0}, "1"),
        ("search", {"like": [id], "filter": "label ="}, "filter"),
        ("search", {"like": [id], "filter": "x" * 10_001}, "10000"),
        ("identify", {"image": id, "far": 2}, "less than 1"),
        ("get", {"id": "nothing"}, "has no item nothing"),
        ("get", {"id": "x" * 1001}, "1000"),
    ]
    _, answers = ask(
        shop / "photos.index", [(name, given) for name, given, _ in cases], photos=photos
    )
    for (name, given, says), answer in zip(cases, answers, strict=True):
        said = text_of(answer)
        assert answer.is_error, (name, str(given)[:80], said[:300])
        assert re.search(says, said), (name, str(given)[:80], said[:300])
        assert "Traceback" not in said and "passwd:" not in said


def test_a_link_in_the_folder_leads_nowhere_else(shop, tmp_path):
    folder = tmp_path / "queries"
    folder.mkdir()
    (folder / "out.png").symlink_to(sorted((shop / "photos").rglob("*.png"))[0])
    _, (answer,) = ask(shop / "photos.index", [("search", {"image": "out.png"})], photos=folder)
    assert answer.is_error and "is not below" in text_of(answer)


def test_mistakes_on_the_command_line(shop, cli, monkeypatch, tmp_path):
    assert "is not an index" in cli("mcp", tmp_path).err
    assert "Leave --index out" in cli("mcp", shop / "photos.index", "--index", "a").err
    done = cli("mcp", shop / "photos.index", "--photos", tmp_path / "none")
    assert done.code == 2 and "There is no folder" in done.err
    assert "127.0.0.1:9" in cli("mcp", "http://127.0.0.1:9").err
    for name in [name for name in sys.modules if name.split(".")[0] == "mcp"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "retrieval_mcp.tools", raising=False)
    done = cli("mcp", shop / "photos.index")
    assert done.code == 2 and "embedding-retrieval[mcp]" in done.err
