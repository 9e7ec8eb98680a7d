"""A short attack on a real server; `attack.py` is the long one, run by hand."""

from itertools import islice

import wire

import attack


def test_an_attack_costs_others_nothing(tmp_path_factory):
    images = [*islice(attack.worst(0), 4), *attack.damaged(0, 2)]  # the others: test_hostile_images
    attacked = attack.Attacked(tmp_path_factory.mktemp("a"))  # sockets need a short path
    keys, sound = attacked.keys, attacked.sound
    generator = attack.WritingGenerator(images, sound, 16, keys, attack.OPEN)
    try:
        attacked.attack(generator, 10**6).run(50, 16)
        processes = len(attacked.server.processes())
        result = attacked.attack(generator).run(300, 16)

        def is_given_back() -> bool:
            decoders = len(attacked.server.processes()) - processes  # that were being replaced
            allowed = 60_000_000 + max(0, decoders) * 40_000_000
            return attacked.server.resident() - result.resident[0] < allowed

        wire.until(is_given_back)
    finally:
        broken = attacked.end(attack.GRACE)
    text = attack.report(result)
    assert not result.faults, text
    assert not result.honest.wrong, text
    assert not result.honest.late, text
    assert len(result.honest.answered) > 20, text
    assert not broken
    assert len(attacked.log.read_text().splitlines()) < 200
