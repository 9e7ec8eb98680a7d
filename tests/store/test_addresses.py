"""Addresses: parsed, refused if they hold a secret, and the store of each scheme."""

from pathlib import Path

import pytest
import retrieval
from retrieval.bundle.bundle import Bundle
from retrieval.errors import PluginError, StoreError
from retrieval.store.address import Address, place_of
from retrieval.store.contract import widths_of
from retrieval.store.find_store import find_store, store_place
from retrieval.store.local_place import LocalPlace

SHELF = """
from retrieval.plugin import hookimpl
from retrieval.store.local_place import LocalPlace

class Shelf(LocalPlace):
    def __init__(self, address, timeout: int = 1) -> None:
        super().__init__(address)
        self.timeout = timeout

retrieval_stores = hookimpl(lambda: {"shelf": Shelf})
"""


@pytest.fixture
def shelf(tmp_path):
    """The file of a plugin with a store that takes an option."""
    (tmp_path / "mine.py").write_text(SHELF)
    return str(tmp_path / "mine.py")


OPTIONS = "timeout=5&fast=true&level=strong&share=.5&big=NaN&none=null&list=[1]&empty="
READ = {"timeout": 5, "fast": True, "level": "strong", "share": ".5", "big": "NaN"}
READ |= {"none": None, "list": "[1]", "empty": ""}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("milvus://db.example:19530/photos", ("milvus", "db.example", 19530, "/photos", {})),
        ("journal:///data/my%20photos", ("journal", None, None, "/data/my photos", {})),
        ("acme.x://[::1]:80/a/b", ("acme.x", "::1", 80, "/a/b", {})),
        ("qdrant://h", ("qdrant", "h", None, "", {})),
        (f"x1://h/n?{OPTIONS}", ("x1", "h", None, "/n", READ)),
    ],
)
def test_an_address_is_read(text, expected):
    address = place_of(text)
    assert isinstance(address, Address) and str(address) == text and place_of(address) is address
    parts = (address.scheme, address.host, address.port, address.path, address.options)
    assert parts == expected and address.name == expected[3].rpartition("/")[2]


def test_everything_else_is_a_folder():
    for text in ("photos.index", "/a/b", "./a:b", "C:/photos", "c://photos", "a:/b", "s3:"):
        assert place_of(text) == Path(text), text
    assert place_of("local:///data/my%20photos") == Path("/data/my photos")
    assert place_of("core.local://photos.index") == Path("photos.index")
    assert place_of(Path("photos.index")) == Path("photos.index")
    for text in ("local://", "local:///a?x=1"):
        with pytest.raises(StoreError, match="names no folder"):
            place_of(text)


SECRETS = [
    "milvus://user:hunter2@host/photos",
    "milvus://user:hun/hunter2@host/photos",
    "milvus://host/photos?token=hunter2",
    "milvus://host/photos?a=1&API_KEY=hunter2",
    "milvus://host/photos?p%61ssword=hunter2",
]


def test_a_secret_is_refused_and_not_repeated(cli):
    for text in SECRETS:
        with pytest.raises(StoreError, match="environment variable") as fault:
            retrieval.Index.open(text)
        assert "hunter2" not in str(fault.value)
    for words in (("index", "list", text), ("search", text, "a.png"), ("serve", text)):
        result = cli(*words)
        assert result.code == 2 and "environment variable" in result.err
        assert "hunter2" not in result.err + result.out


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("milvus://host:port/photos", "is not an address: "),
        ("milvus://host/a#b", "in a name as %23"),
        ("milvus://host/a?b", "name=value"),
        ("milvus://host/a?b=1&b=2", "has the option 'b' twice"),
        ("milvus://host/a\x1b[2J", "not printable"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(text, sentence):
    with pytest.raises(StoreError) as fault:
        place_of(text)
    message = str(fault.value)
    assert sentence in message and message.endswith(".") and "\x1b" not in message


def test_a_scheme_that_is_not_there(shelf):
    with pytest.raises(PluginError) as fault:
        retrieval.Index.open("shelv://host/photos", plugins=[shelf])
    for sentence in (
        "There is no store 'shelv' (there are: local://, ",
        " shelf://",
        "; a folder needs only its path)",
        "Did you mean 'shelf'?",
        "Install the plugin that has shelv://",
        "--plugin",
    ):
        assert sentence in str(fault.value)


def test_local_comes_through_the_hook_and_loads_no_plugin(process):
    local = find_store("local")
    assert local.make is LocalPlace and find_store("core.local") is local
    code = """
import sys
from retrieval.store.find_store import store_place
store_place("photos.index"); store_place("core.local:///data/photos.index")
print([name for name in sys.modules if name.startswith("retrieval_") or name == "torch"])
"""
    assert process("-c", code).out.strip() == "[]"


def test_what_a_store_does_not_know_is_refused(shelf, tmp_path):
    place = store_place("shelf:///x?timeout=3", [shelf])
    assert place.timeout == 3 and str(place.address) == "shelf:///x?timeout=3"
    for options, sentence in (
        ("tmieout=3", r"shelf:///x\?tmieout=3: tmieout: .* Did you mean 'timeout'"),
        ("timeout=soon", "timeout: should be"),
        ("address=y", "given by the host"),
    ):
        with pytest.raises(StoreError, match=sentence):
            store_place(f"shelf:///x?{options}", [shelf])
    other = tmp_path / "other.py"
    other.write_text(SHELF)
    both = [shelf, str(other)]
    with pytest.raises(PluginError, match=r"Write mine\.shelf:// or other\.shelf://"):
        store_place("shelf:///x", both)
    assert type(store_place("mine.shelf:///x", both)).__name__ == "Shelf"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("lambda: 3", "unexpected keyword argument 'address'"),
        ("lambda address: 3", "returned a int, not a retrieval.plugin.stores.StorePlace"),
        ("3", "a factory is a class or a function"),
    ],
)
def test_a_store_that_is_none(body, sentence, tmp_path):
    file = tmp_path / "odd.py"
    file.write_text(
        "from retrieval.plugin import hookimpl\n\n@hookimpl\ndef retrieval_stores():\n"
        f"    return {{'odd': {body}}}\n"
    )
    with pytest.raises((PluginError, StoreError)) as fault:
        retrieval.Index.open("odd://here", plugins=[str(file)])
    assert sentence in str(fault.value)


def test_an_index_at_an_address_knows_where_it_is(shelf, tmp_path, plain_bundle):
    address, bundle = f"shelf://{tmp_path}/items", Bundle.open(plain_bundle, threads=1)
    store_place(address, [shelf]).create(bundle, widths_of(bundle), identity="mine").close()
    with retrieval.Index.open(address, plugins=[shelf]) as index:
        assert str(index.path) == address and index.identity == "mine"
        assert address in repr(index)
    with pytest.raises(StoreError, match=f"^The index {address} was closed"):
        index.search(b"")
