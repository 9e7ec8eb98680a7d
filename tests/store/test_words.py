"""The words of items: which texts find which items, and that no write leaves words behind."""

import random
import sqlite3
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from retrieval.errors import DataError
from retrieval.index.index import open_index
from retrieval.index.integrity import check_index
from retrieval.store import words
from retrieval.store.address import Address
from retrieval.store.contract import Item, widths_of
from retrieval.store.copy_store import write_copy
from retrieval.store.filters import as_filter
from retrieval.store.local import LocalStore
from stored import VECTORS, items


def item(id: str, label: str | None = None, **metadata: object) -> Item:
    return Item(id, label, metadata, arrays={"vector": VECTORS[len(id)]})


CATALOGUE = [
    item("a42", "mug", colour="red", size=7),
    item("b", "shoe", colour="red", size=42),
    item("c", "shoe", colour="blue", size=42, used=True),
    item("d", None, notes=[{"inner": "Café Ünïcode"}, 19.99], empty=None),
    item("e", "t-shirt", colour="NEAR blue", maker={"country": "AND"}),
    item("f"),
]


@pytest.fixture(params=["folder", "postgres"])
def store(request, bundle):
    """An empty store that can keep words."""
    if request.param == "folder":
        with LocalStore(request.getfixturevalue("index"), upkeep=False) as opened:
            yield opened
        return
    request.getfixturevalue("postgres_server")
    from retrieval_engines.postgres.place import PostgresPlace

    place = PostgresPlace(Address.parse("postgresql:///postgres/words"))
    with place.create(bundle, widths_of(bundle)) as opened:
        yield opened
    place.drop()


@pytest.fixture
def filled(store, bundle):
    """A store of the catalogue that keeps words."""
    store.keep_words()
    store.upsert(CATALOGUE, bundle.sha256)
    return store


in_a_folder = pytest.mark.parametrize("store", ["folder"], indirect=True)


def ids(store, text, count=10, **options):
    return [id for id, _ in store.search_words(text, count, **options)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("red", "a42 b"),
        ("RED Mug", "a42 b"),
        ("size 42 red", "b a42 c"),
        ("42", "b c"),
        ("cafe", "d"),
        ("CAFÉ", "d"),
        (unicodedata.normalize("NFD", "café"), "d"),
        ("19.99", "d"),
        ("t-shirt", "e"),
        ("and", "e"),
        ("near", "e"),
        ("colour", ""),
        ("true null inner", ""),
        ("a42 b", ""),
        ("", ""),
        ("?! \t*", ""),
    ],
)
def test_words_are_those_of_labels_and_of_values_of_metadata(filled, text, found):
    assert sorted(ids(filled, text)) == sorted(found.split())
    if found:
        assert ids(filled, text)[0] == found.split()[0]


def bm25(texts: list[list[str]], query: list[str]) -> list[float]:
    """Okapi BM25 as its papers state it, with FTS5's smallest weight of a word."""
    mean = sum(map(len, texts)) / len(texts)
    scores = []
    for text in texts:
        score = 0.0
        for term in query:
            having = sum(term in other for other in texts)
            weight = np.log((len(texts) - having + 0.5) / (having + 0.5))
            count = text.count(term)
            length = 1.2 * (0.25 + 0.75 * len(text) / mean)
            score += max(weight, 1e-6) * count * 2.2 / (count + length)
        scores.append(score)
    return scores


def test_scores_are_bm25(store, bundle):
    random_ = random.Random(0)
    texts = [
        random_.choices(["red", "blue", "mug", "shoe", "old", "new"], k=n % 9 + 1)
        for n in range(60)
    ]
    rows = [item(f"{n:02}", None, text=" ".join(text)) for n, text in enumerate(texts)]
    store.keep_words()
    store.upsert(rows, bundle.sha256)
    # Deleted items count no more.
    store.upsert([item(f"gone {n}", "red mug") for n in range(50)], bundle.sha256)
    store.delete([f"gone {n}" for n in range(50)])
    found = store.search_words("old red mug", 100)
    expected = bm25(texts, ["old", "red", "mug"])
    assert {id: pytest.approx(expected[int(id)], rel=1e-9) for id, _ in found} == dict(found)
    assert len(found) == sum(bool({"old", "red", "mug"} & set(text)) for text in texts)
    assert [score for _, score in found] == sorted(dict(found).values(), reverse=True)


def test_filter_count_and_also(filled, bundle):
    assert ids(filled, "red shoe", filter=as_filter("size = 42")) == ["b", "c"]
    assert ids(filled, "mug", filter=as_filter("size = 42")) == []
    with pytest.raises(DataError, match="has a field 'sise'"):
        filled.search_words("nothing", 3, filter=as_filter("sise = 42"))
    assert ids(filled, "size 42 red", 1) == ["b"]
    filled.upsert([item(f"same {n}", "lamp") for n in range(20)], bundle.sha256)
    assert ids(filled, "lamp", 3) == ["same 0", "same 1", "same 2"]
    also = ["same 1", "same 9", "b", "no such", "\udcff", "nul \0"]
    assert ids(filled, "lamp", 3, also=also) == ["same 0", "same 1", "same 2", "same 9"]


def test_words_follow_every_write(filled, bundle, other):
    filled.upsert([item("b", "boot")], bundle.sha256)
    assert ids(filled, "42 shoe") == ["c"] and ids(filled, "boot") == ["b"]
    filled.update(["c"], {"metadata": {"colour": "green"}}, bundle.sha256)
    assert ids(filled, "blue") == ["e"] and ids(filled, "green shoe") == ["c"]
    filled.delete(["e"])
    filled.delete(filter=as_filter("size = 7"))
    assert ids(filled, "blue shirt mug") == []
    # A migration changes no item, and the next generation has the same words.
    generation = filled.begin(other, widths_of(other))
    pending = filled.pending(generation, 100)
    filled.embed(generation, [], [row.id for row in pending])
    assert filled.switch(generation) and ids(filled, "boot") == ["b"]
    if isinstance(filled, LocalStore):
        filled.compact()
    assert sorted(ids(filled, "green boot")) == ["b", "c"]
    filled.delete(["b"])
    assert ids(filled, "green boot") == ["c"]


def test_an_index_without_words_pays_nothing_and_says_so(store, bundle, request):
    store.upsert(CATALOGUE, bundle.sha256)
    store.delete(["c"])
    assert not store.keeps_words()
    with pytest.raises(DataError, match="'retrieval index words'"):
        store.search_words("red", 3)
    if isinstance(store, LocalStore):
        with store.record.reading() as connection:
            names = [name for (name,) in connection.execute("select name from sqlite_master")]
    else:
        with request.getfixturevalue("postgres_server").connect() as connection:
            names = [name for (name,) in connection.execute("select tablename from pg_tables")]
    assert names and not [name for name in names if "words" in name.rpartition("__")[2]]


def test_words_of_earlier_items_are_read_in_blocks(store, bundle, monkeypatch):
    monkeypatch.setattr(words, "_READ_AT_ONCE", 7)
    # Postgres reads 1,000 at a time.
    size = 40 if isinstance(store, LocalStore) else 1040
    store.upsert(items(range(size)), bundle.sha256)
    store.delete(["id3", "id39"])

    class Killed(BaseException):
        pass

    def stop(count: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        store.keep_words(stop)
    assert not store.keeps_words()
    with pytest.raises(DataError, match="index words"):
        store.search_words("1", 3)
    store.upsert([item("new", "lamp"), item("id5", "changed")], bundle.sha256)
    store.delete(["id6", "id38"])
    if isinstance(store, LocalStore):
        assert check_index(store.folder) == ([], [])
    blocks: list[int] = []
    store.keep_words(blocks.append)
    remaining = 38 - 7 - 2
    if not isinstance(store, LocalStore):
        remaining = 1038 - 1000 + 1  # the new item is read with them
    assert sum(blocks) == remaining and store.keeps_words()
    assert ids(store, "lamp changed") == ["new", "id5"]
    left = {f"id{n}" for n in range(size)} - {"id3", "id39", "id6", "id38", "id5"}
    numbers = [" ".join(map(str, range(start, start + 40))) for start in range(0, size, 40)]
    assert left == {id for text in numbers for id in ids(store, text, 2000)}
    store.keep_words(blocks.append)
    assert sum(blocks) == remaining
    if isinstance(store, LocalStore):
        assert check_index(store.folder) == ([], [])


def test_snapshots_and_copies_keep_words(filled, tmp_path, bundle):
    filled.snapshot(tmp_path / "snapshot")
    write_copy(filled, tmp_path / "copy")
    for name in ("snapshot", "copy"):
        with LocalStore(tmp_path / name, upkeep=False) as copy:
            assert dict(copy.search_words("size 42 red", 9)) == pytest.approx(
                dict(filled.search_words("size 42 red", 9))
            )


@in_a_folder
@pytest.mark.parametrize(
    "sql",
    [
        "delete from words where rowid = 1",
        "insert into words (rowid, text) values (99, 'lamp')",
        "update words_data set block = zeroblob(20) where id > 10",
    ],
)
def test_check_finds_words_that_do_not_fit(filled, index, sql):
    assert check_index(index) == ([], [])
    with filled.record.writing() as (connection, _):
        connection.execute(sql)
    faults, _ = check_index(index)
    assert faults and "items.sqlite" in faults[0]


HOSTILE = [
    '"',
    '""red',
    "'; drop table items; --",
    "red\0mug",
    "\0" * 100,
    "\ud800 red \udfff",
    "NEAR(red mug, 2)",
    "red AND NOT (mug OR",
    "text : red",
    "{text} : red",
    "- text : red",
    "^red",
    "red*",
    "(" * 10_000,
    "a " * 5000,
    " ".join(f"w{n}" for n in range(3000)),
    "x" * 10_000,
    "-".join("a" * 5000),
    "_".join("a" * 5000),
    "\u0301" * 10_000,
    "e\u0301" * 5000,
    "\u202e red \u200f",
    "👩‍👩‍👧‍👦" * 900,
    "日本語" * 3000,
    "🄰🅱 𝐫𝐞𝐝 ①②",
    "\\u0000 \\ red",
    "%s %n {0} ?1 :x @x $x",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_only_words(filled, text):
    found = ids(filled, text)
    assert ("b" in found) == ("red" in words._TERM.findall(text))
    filled.search_words(text, 2, filter=as_filter("size = 42"), also=["a42"])


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_no_text_is_syntax(text):
    with sqlite3.connect(":memory:") as connection:
        connection.execute("create virtual table t using fts5(text)")
        connection.execute("insert into t values (?), ('')", (text,))
    match = words.match_of(text)
    found = connection.execute("select rowid from t where t match ?", (match,)) if match else ()
    # No text finds the empty one, as syntax such as NOT could.
    assert set(found) <= {(1,)}


def test_words_beyond_the_first_64_do_not_count(filled):
    many = " ".join(f"w{n}" for n in range(words.MAX_TERMS))
    assert ids(filled, f"{many} red") == [] and ids(filled, f"red {many}") != []
    assert ids(filled, f"{many.replace('w63', '')} w0 w0 red") != []


def test_metadata_of_the_largest_size(store, bundle):
    store.keep_words()
    wide = {f"k{n}": "v" for n in range(60_000)}
    deep: dict[str, object] = {"word": "deepest"}
    for _ in range(60):
        deep = {"a": deep}
    many = ["x" * 60 + str(n) for n in range(14_000)]
    rows = [item("wide", None, **wide), item("deep", None, d=deep), item("m", None, many=many)]
    big = [item("long", "z" * 900_000 + " end")]
    store.upsert(rows + big, bundle.sha256)
    assert ids(store, "deepest") == ["deep"] and ids(store, "v") == ["wide"]
    assert ids(store, many[-1]) == ["m"] and ids(store, "end") == ["long"]


@in_a_folder
def test_command(cli, store, index, bundle):
    store.upsert(CATALOGUE, bundle.sha256)
    store.close()
    done = cli("index", "words", index)
    assert done.code == 0 and done.out == f"{index} keeps the words of its 6 items.\n"
    with open_index(index) as opened:
        assert ids(opened.store, "red shoe")[0] == "b"
        opened.keep_words(progress=False)
        assert opened.store.settings()["words"] is True
