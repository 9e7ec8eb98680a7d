"""DAML's recipes over digits of 8 × 8 pixels."""

from pathlib import Path
from typing import Any

import torch
from retrieval.recipe.read import check_recipe
from retrieval.training.trainer import Trainer
from trained_weights import trainer_of

BASE: dict[str, Any] = {
    "name": "daml",
    "data": {"name": "core.digits"},
    "split": {"by": "class"},
    "sampler": {"classes": 3, "items": 4, "batches": 4},
    "backbone": {"name": "core.convnet", "size": 8, "width": 4, "depth": 2},
    "head": {"embedding_size": 8},
    "loss": {"name": "daml.triplet"},
    "generator": {"name": "daml.hard_negative"},
    "train": {"epochs": 1, "device": "cpu"},
}
METRIC = ["backbone", "head", "combiner", "loss"]
ALGORITHM = [
    {"name": "metric", "epochs": 1, "train": METRIC, "synthetic": False},
    {"name": "generator", "epochs": 1, "train": ["generator"]},
    {"name": "both", "epochs": 1},
]
POSITIVE = {"generator": {"name": "daml.hard_positive"}}
SIMILAR = {"miner": {"name": "pml.multi_similarity"}}
ONE = {"name": "daml.one_per_class"}
LOSSES: list[dict[str, Any]] = [
    {
        "loss": {"name": "daml.contrastive"},
        "generator": {"name": "daml.hard_negative", "form": "contrastive"},
    },
    {"loss": {"name": "daml.triplet"}},
    {"loss": {"name": "daml.lifted"}, "miner": ONE},
    {"loss": {"name": "daml.lifted", "form": "original"}},
    {"loss": {"name": "daml.npair"}, "miner": {**ONE, "anchors": "one"}},
    {"loss": {"name": "daml.triplet"}, **POSITIVE},
    {"loss": {"name": "pml.contrastive"}},
    {"loss": {"name": "pml.triplet_margin", "margin": 2.0}, "miner": {"name": "pml.batch_hard"}},
    {"loss": {"name": "pml.multi_similarity"}, **SIMILAR},
    {"loss": {"name": "pml.nt_xent"}},
    {"loss": {"name": "pml.circle"}},
    {"loss": {"name": "anml.danml"}},
    {"loss": {"name": "anml.danml"}, **SIMILAR, **POSITIVE},
]


def made(**tables: Any) -> Any:
    return check_recipe({k: v for k, v in {**BASE, **tables}.items() if v is not None})


def trainer(folder: Path, **tables: Any) -> Trainer:
    """A trainer before its first step, with a random generator."""
    trainer = trainer_of(folder, made(**tables))
    for parameter in trainer.objective.generator.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return trainer


def batch(of: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = next(iter(of.batches.epoch(0)))
    return inputs, labels
