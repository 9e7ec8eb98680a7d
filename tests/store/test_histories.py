"""Answers of an index that changes, compared with its states during the search."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def histories(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import histories

    return histories


def test_every_answer_is_of_a_state_between_its_question_and_itself(histories, tmp_path):
    report = histories.run(tmp_path, 4, 0, threads=4, processes=2)
    assert report["wrong"] == []
    assert report["from threads"] > 50 and report["from processes"] > 50
    assert report["operations"]["upsert"] > 3 and report["several"] > 20


IDS = ["id 1", "id 2", "id 3"]
ABOUT = {"search": 3, "search cheap": 3, "get": IDS, "count": None, "count cheap": None}


def answers(
    histories: ModuleType, state: Any, maps: list[Any], after: int, until: int
) -> list[Any]:
    return [
        histories.Answer(after, until, kind, what, state.answer(kind, what, maps))
        for kind, what in ABOUT.items()
    ]


def test_an_answer_of_another_state_is_found(histories):
    random = np.random.default_rng(0)
    maps = [random.integers(-9, 10, (histories.NUMBERS, 12)).astype(float) for _ in range(2)]

    def items(*numbers):
        return {
            f"id {n}": (tuple(random.integers(-9, 10, histories.NUMBERS).tolist()), n % 5)
            for n in numbers
        }

    history = [
        ("upsert", items(*range(30))),
        ("upsert", items(1, 2, 40)),
        ("delete", ["id 2", "id 5", "id 6"]),
        ("compact", None),
        ("cheap", 1),
        ("migrate", 1),
    ]
    states = [histories.State()]
    for change in history:
        states.append(histories.State(states[-1].bundle, dict(states[-1].items)))
        states[-1].apply(change)
    for number, state in enumerate(states):
        questions = answers(histories, state, maps, number, number)
        assert histories.wrong(history, questions, maps) == []
        around = answers(histories, state, maps, max(0, number - 2), min(6, number + 1))
        assert histories.wrong(history, around, maps) == []
    for kept, moment in ((1, 2), (3, 2), (3, 5), (5, 6)):  # too old, too new, another bundle
        bad = histories.wrong(history, answers(histories, states[kept], maps, moment, moment), maps)
        kinds = {entry.kind for entry in bad}
        assert "search" in kinds and (kept < 5 or kinds <= {"search", "search cheap"}), kept
    half = histories.State(0, dict(states[1].items))
    half.apply(("delete", ["id 2"]))
    bad = histories.wrong(history, answers(histories, half, maps, 1, 3), maps)
    assert "count" in {entry.kind for entry in bad}
