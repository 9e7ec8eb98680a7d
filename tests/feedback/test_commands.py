"""`retrieval feedback` lists, exports and forgets."""

import json
import time

import numpy as np
import pytest
from retrieval.feedback.feedback_record import (
    CLICKED,
    DISLIKED,
    FEEDBACK_FILE,
    LIKED,
    FeedbackRecord,
    Search,
    Trial,
)

QUERY = np.arange(4, dtype=np.float32)


@pytest.fixture
def folder(tmp_path):
    """A folder with feedback of a key, its user and another key."""
    now = time.time()
    with FeedbackRecord.open(tmp_path / FEEDBACK_FILE, create=True) as record:
        record.note_searches(
            Search(id, now - days * 86_400, voter, "base", "served", QUERY, None, ("x", "y", "z"))
            for id, voter, days in (("a", "shop", 40), ("b", "shop/ann", 1), ("c", "app", 1))
        )
        record.add("a", "shop", {"x": LIKED})
        record.add("b", "shop/ann", {"x": DISLIKED, "y": CLICKED})
        record.add("c", "app", {"z": LIKED})
    return tmp_path


def test_list_counts_the_feedback_of_each_voter(cli, folder):
    done = cli("feedback", "list", folder)
    assert done.code == 0, done.err
    assert "3 searches, 3 of them with 4 marks by 3 keys and users; 0 trials." in done.out
    assert "shop/ann  1 search, 2 marks" in done.out
    listed = json.loads(cli("feedback", "list", folder / FEEDBACK_FILE, "--json").out)
    assert [entry["voter"] for entry in listed["of"]] == ["app", "shop", "shop/ann"]
    assert listed["marks"] == 4


def test_export_writes_json_lines(cli, folder, tmp_path):
    output = tmp_path / "out.jsonl"
    assert cli("feedback", "export", folder, "--output", output).code == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["search_id"] for line in lines] == ["a", "b", "c"]
    assert lines[1]["marks"] == {"shop/ann": {"x": "disliked", "y": "clicked"}}
    assert lines[0]["query"] == QUERY.tolist() and lines[0]["hits"] == ["x", "y", "z"]
    assert output.stat().st_mode & 0o777 == 0o600
    for options, ids in ((("--key", "shop"), "ab"), (("--key", "shop", "--user", "ann"), "b")):
        assert cli("feedback", "export", folder, "--output", output, *options).code == 0
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert "".join(line["search_id"] for line in lines) == ids


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (("--key", "shop"), "c"),
        (("--key", "shop", "--user", "ann"), "ac"),
        (("--user", "ann"), "abc"),
        (("--key", ""), "abc"),
        (("--item", "x"), "bc"),
        (("--older-than", "30d"), "bc"),
    ],
)
def test_forget_deletes_and_says_how_much(options, kept, cli, folder):
    done = cli("feedback", "forget", folder, *options)
    assert done.code == 0 and done.out.startswith("Forgot "), done.err
    with FeedbackRecord.open(folder / FEEDBACK_FILE) as record:
        assert "".join(entry.search.id for entry in record.judged()) == kept


def test_forget_says_that_a_metric_had_learned_from_it(cli, folder):
    with FeedbackRecord.open(folder / FEEDBACK_FILE) as record:
        fields = {"kind": "challenge", "base": "base", "challenger": "c", "head": b"h"}
        fields |= {"incumbent": "served", "learner": "x", "alpha": 0.1, "cutoff": 9}
        record.begin_trial(Trial(**fields, voters=frozenset({"shop"})))
    assert "1 metric had learned" in cli("feedback", "forget", folder, "--key", "shop").out
    with FeedbackRecord.open(folder / FEEDBACK_FILE) as record:
        assert record.open_trials()[0].tainted


def test_a_mistake_is_one_sentence(cli, folder, tmp_path):
    for words, sentence in (
        (("list", tmp_path / "none"), "There is no feedback at"),
        (("list", __file__), "is not a file of feedback"),
        (("forget", folder), "one of them"),
        (("forget", folder, "--item", "x", "--key", "shop"), "one of them"),
        (("export", folder, "--output", tmp_path / "no" / "out"), "cannot be written"),
    ):
        done = cli("feedback", *words)
        assert done.code == 2 and sentence in done.err, done
        assert "Traceback" not in done.err and done.err.count("\n") <= 2
