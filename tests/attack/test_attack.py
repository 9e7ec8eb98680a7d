"""A short attack on a real server; `attack.py` runs a long one by hand."""

from itertools import islice

import wire

import attack


def test_honest_clients_get_right_answers_during_an_attack(tmp_path_factory):
    # test_hostile_images.py decodes all of them
    images = [*islice(attack.worst(0), 4), *attack.damaged(0, 2)]
    attacked = attack.Attacked(tmp_path_factory.mktemp("a"))  # sockets need a short path
    keys, sound = attacked.keys, attacked.sound
    generator = attack.WritingGenerator(images, sound, 16, keys, attack.OPEN)
    try:
        attacked.attack(generator, 10**6).run(50, 16)
        processes = len(attacked.server.processes())
        result = attacked.attack(generator).run(300, 16)

        def is_memory_returned() -> bool:
            new_decoders = max(0, len(attacked.server.processes()) - processes)
            allowed = 60_000_000 + new_decoders * 40_000_000
            return attacked.server.resident() - result.resident[0] < allowed

        wire.until(is_memory_returned)
    finally:
        broken = attacked.end(attack.GRACE)
    text = attack.report(result)
    assert not result.faults, text
    assert not result.honest.wrong, text
    assert not result.honest.late, text
    assert len(result.honest.answered) > 20, text
    assert not broken
    assert len(attacked.log.read_text().splitlines()) < 200
