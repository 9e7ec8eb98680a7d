"""A short attack on a real server; `attack.py` is the long one, run by hand."""

from itertools import islice

import pytest

import attack

REQUESTS = 300


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacked")
    index, sound = attack.prepare(folder)
    images = [*islice(attack.worst(0), 4), *attack.damaged(0, 2)]  # the others: test_hostile_images
    return index, folder / "log", attack.Generator(images, sound, 16)


def test_an_attack_costs_others_nothing(prepared):
    index, log, generator = prepared
    sound = generator.sound
    server = attack.Server.start(index, log)
    try:
        attack.Attack(server, generator, sound, 10**6).run(50, 16)
        result = attack.Attack(server, generator, sound).run(REQUESTS, 16)
    finally:
        took, code = server.end()
    text = attack.report(result)
    assert not result.faults, text
    assert not result.honest.wrong, text
    assert not result.honest.late, text
    assert len(result.honest.answered) > 20, text
    before, after = result.memory
    assert after.total - before.total < 60_000_000, text
    assert (took < attack.GRACE, code) == (True, 0)
    assert len(log.read_text().splitlines()) < 200
