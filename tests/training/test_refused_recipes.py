"""Options of training that have a wrong value, or exclude each other, are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from retrieval.errors import RecipeError

UNVALIDATED = {"split": {"by": "class", "validation": 0.0}}
PLATEAU = {"name": "ReduceLROnPlateau"}
FROZEN = {"backbone": {"name": "toolbox.net", "frozen": True}}
LEARNER = {"loss": None, "learner": {"name": "core.pca"}}
PARTIAL_FC = {"loss": {"name": "core.partial_fc"}}
SIMILAR = {"name": "pml.multi_similarity"}
STEPS = 'a share from 0 to below 1, "500 steps" or "2 epochs"'
CASES: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"lr_factor": {"hed": 2}}}, "'hed' selects no parameters.*Did you mean 'head'"),
    ({"optimizer": {"lr_factor": {"stages:2.*": 2}}}, "'stages:2.*' selects no parameters"),
    ({"optimizer": {"weight_decay": {"head": -1}}}, r"\[optimizer\] weight_decay"),
    ({"optimizer": {"name": "Rprop", "weight_decay": {"head": 1}}}, "Rprop takes none"),
    ({"optimizer": {"layer_decay": 0}}, "layer_decay"),
    ({"schedule": {"warmup": 1.5}}, STEPS),
    ({"schedule": {"warmup": "2 weeks"}}, STEPS),
    ({"schedule": PLATEAU, **UNVALIDATED}, "ReduceLROnPlateau needs a validation part"),
    ({"schedule": {**PLATEAU, "options": {"mode": "min"}}}, "takes no such argument"),
    ({"train": {"ema": 0.9, "average_last": 2}}, "Remove one of the two"),
    ({"train": {"ema": 0.9}, **LEARNER}, r"\[train\] ema: a \[learner\] is fitted once"),
    ({"train": {"monitor": "map_at_s"}}, r"\[train\] monitor: There is no metric 'map_at_s'"),
    ({"train": {"monitor": "map"}, **UNVALIDATED}, "monitor needs a validation part"),
    ({"train": {"accumulate": 4}}, "never compare items of different batches.*chunk"),
    ({"train": {"chunk": 0}}, "chunk"),
    ({"train": {"chunk": 4}, **FROZEN}, "frozen = true.*Remove chunk"),
    ({"train": {"chunk": 4}, **LEARNER}, "Remove chunk"),
    ({"train": {"compile": True}, **FROZEN}, r"frozen = true its features"),
    ({"train": {"compile": True}, **LEARNER}, r"with a \[learner\] its features"),
    ({"train": {"compile": True, "sync_batch_norm": True}}, "sync_batch_norm = .*Remove one of"),
    ({"lora": {}, **FROZEN}, r"\[lora\] .*frozen"),
    ({"sampler": {"name": "core.hierarchical"}}, "level: is required"),
    ({"sampler": {"name": "core.clas_balanced"}}, "Did you mean 'core.class_balanced'"),
    ({"sampler": {"classes": 4, "itms": 3}}, "itms.*Did you mean 'items'"),
    ({"sampler": {"classes": 1}}, "classes.*2"),
    ({**PARTIAL_FC, "miner": SIMILAR}, r"\[miner\]"),
    ({**PARTIAL_FC, "generator": {"name": "toolbox.mover"}}, r"\[generator\]"),
]


@pytest.mark.parametrize(("tables", "sentence"), CASES)
def test_a_wrong_option_is_refused(make, tables, sentence):
    with pytest.raises(RecipeError, match=sentence):
        make(**tables)
