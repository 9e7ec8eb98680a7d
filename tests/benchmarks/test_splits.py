"""The benchmark chooses its settings with items that it never searches."""

import numpy as np
import pytest


@pytest.mark.parametrize("name", ["digits", "letter"])
def test_items_that_choose_settings_are_never_searched(name):
    import daml_real

    y = np.repeat(np.arange(26), 7)
    choosing = np.concatenate(
        [np.concatenate(daml_real.divided(name, y, s)) for s in daml_real.CHOOSING_SEEDS]
    )
    for seed in daml_real.SEEDS:
        train, searched = daml_real.divided(name, y, seed)
        assert len(train) and len(searched)
        assert not np.intersect1d(np.concatenate([train, searched]), choosing).size
        assert not np.intersect1d(train, searched).size
        if name == "letter":
            assert not np.intersect1d(y[train], y[searched]).size


def test_each_seed_gives_another_split():
    import daml_real

    y = np.repeat(np.arange(26), 7)
    searched = {
        tuple(sorted(daml_real.divided("digits", y, seed)[1].tolist())) for seed in daml_real.SEEDS
    }
    assert len(searched) == len(daml_real.SEEDS)


def test_settings_are_chosen_by_the_metric_whose_gains_are_shown():
    import daml_real

    best = daml_real.CANDIDATES[3]
    rows = [
        {"set": "vehicle", "method": "one metric", "choice": list(choice), "seed": seed}
        | {"recall_at_1": 1 - number / 100, "map_at_r": 0.9 if choice == best else 0.5}
        for seed in daml_real.CHOOSING_SEEDS
        for number, choice in enumerate(daml_real.CANDIDATES)
    ]
    assert daml_real.Runs(rows).chosen("vehicle", "one metric") == best
