"""The click log: its triplets, its counters, and following a file that grows."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path

import pytest
from retrieval.errors import DataError

from retrieval_oahu import ClickLog, with_closure

IDS = {name: row for row, name in enumerate(["a", "b", "c", "d", "e f.jpg"])}
HEADER = "time,query,shown,chosen\n"


def log(folder: Path, text: str, header: str = HEADER) -> ClickLog:
    path = folder / "clicks.csv"
    path.write_text(header + text, encoding="utf-8")
    return ClickLog(path, IDS)


def test_items_shown_but_not_chosen_are_negatives(tmp_path):
    lines = '2024-05-01T10:00:00,a,b|c|d,c\n2024-05-01T10:00:05,"e f.jpg",a| b |e f.jpg,a|b\n'
    clicks = log(tmp_path, lines)
    assert list(clicks) == [(0, 2, 1), (0, 2, 3)]
    assert clicks.lines == 2 and clicks.unusable == 1  # the second search has no negative
    assert list(log(tmp_path, "7.5,a,b|c|d,b|c\n")) == [(0, 1, 3), (0, 2, 3)]


def test_unusable_searches_are_counted(tmp_path):
    clicks = log(
        tmp_path,
        "5,a,b|nowhere|c,c\n"  # one unknown id
        "4,a,b|c,b\n"  # earlier than the line above
        "6,nobody,b|c,b\n6,a,b|c,\n6,a,b|c,a\n"  # unknown query, no choice, the query is chosen
        "yesterday,a,b|c,b\n7,a,b\ninf,a,b|c,b\n\n",  # malformed
    )
    assert list(clicks) == [(0, 2, 1), (0, 1, 2)]
    names = ("lines", "unknown", "unusable", "late", "malformed")
    assert [getattr(clicks, name) for name in names] == [5, 2, 3, 1, 3]


def test_contradictions_of_users_are_found(tmp_path):
    stream = with_closure(log(tmp_path, "1,a,b|c,b\n2,a,b|c,c\n3,a,b|c,b\n"), per_seed=0)
    assert list(stream) == [(0, 1, 2)]
    assert stream.contradictions == 1 and stream.duplicates == 1


@pytest.mark.parametrize(
    ("header", "words"),
    [("query,shown,chosen\n", "no column time"), ("", "no column query, shown, chosen, time")],
)
def test_columns_that_are_missing_are_named(header, words, tmp_path):
    with pytest.raises(DataError, match=words):
        list(log(tmp_path, "", header))


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path):
    with pytest.raises(DataError, match="cannot be read as a click log: No such file"):
        list(ClickLog(tmp_path / "none.csv", IDS))
    (tmp_path / "binary.csv").write_bytes(b"query,shown,chosen,time\n\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read as a click log"):
        list(ClickLog(tmp_path / "binary.csv", IDS))


def test_it_follows_a_file_that_is_being_written(tmp_path):
    path = tmp_path / "clicks.csv"
    # the last line is not complete yet
    path.write_text(HEADER + "1,a,b|c,b\n2,a,c|", encoding="utf-8")

    def write() -> None:
        time.sleep(0.1)
        with path.open("a", encoding="utf-8") as file:
            file.write("d,d\n3,b,a|c,a\n")

    writer = threading.Thread(target=write)
    writer.start()
    actual = list(itertools.islice(ClickLog(path, IDS, follow=True, poll=0.01), 3))
    writer.join()
    assert actual == [(0, 1, 2), (0, 3, 2), (1, 0, 2)]
