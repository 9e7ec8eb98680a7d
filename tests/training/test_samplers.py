"""`[sampler]`: the bundled samplers, torch's batch samplers, exact resume, several processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import retrieval
import torch
from numpy.typing import NDArray
from retrieval.data.loading import as_batch_sampler, drawn_batches
from retrieval.errors import DataError, PluginError, RecipeError
from retrieval.host.plugins import create
from retrieval.plugin import BatchSampler, TrainingItems
from retrieval.recipe.read import Recipe, check_recipe
from retrieval.training.trainer import Trainer, train_run
from torch.utils import data as torch_data
from trained_weights import STEADY, same, trainer_of

from .conftest import BASE

CONTRASTIVE = {"loss": {"name": "pml.contrastive"}}
LABELS = np.repeat(np.arange(12), 10)
GENERA = [f"genus {label // 4}" for label in LABELS]


def items(**changes: Any) -> TrainingItems:
    columns = [{"genus": genus} for genus in GENERA]
    return TrainingItems(**{**vars(TrainingItems(LABELS, columns, 4, 3, 8)), **changes})


def drawn(
    sampler: Any, training: TrainingItems | None = None, epoch: int = 0
) -> list[NDArray[np.int64]]:
    training = training or items()
    return drawn_batches(sampler, training, 7, epoch, training.embeddings)


def test_random_draws_all_items_before_it_draws_one_again():
    batches = drawn(create("sampler", "core.random"), items(batches=25))
    assert [len(batch) for batch in batches] == [12] * 25
    order = np.concatenate(batches)
    assert sorted(order[:120]) == sorted(order[120:240]) == list(range(120))


def test_a_hierarchical_batch_holds_classes_of_few_groups():
    sampler = create("sampler", "core.hierarchical", level="genus", groups=2)
    for batch in drawn(sampler):
        assert sorted(Counter(LABELS[batch]).values()) == [3] * 4
        assert len({GENERA[row] for row in batch}) == 2
    assert {GENERA[row] for batch in drawn(sampler) for row in batch} == set(GENERA)
    # one group of four classes is too small for six classes
    sampler = create("sampler", "core.hierarchical", level="genus", groups=1)
    for batch in drawn(sampler, items(classes=6)):
        assert sorted(Counter(GENERA[row] for row in batch).values()) == [2 * 3, 4 * 3]


def test_a_class_of_two_groups_is_refused():
    columns = [{"genus": genus} for genus in GENERA]
    columns[3] = {"genus": "genus 2"}
    columns[15] = {}
    sampler = create("sampler", "core.hierarchical", level="genus")
    with pytest.raises(DataError, match=r"2 of 12 classes.*'genus'.*nothing"):
        sampler.batches(items(metadata=columns))


def test_hard_classes_takes_the_class_that_is_nearest_to_a_class_of_the_batch():
    embeddings = np.random.default_rng(0).normal(size=(120, 5)).astype(np.float32)
    sampler = create("sampler", "core.hard_classes")
    means = {c: embeddings[c == LABELS].astype(np.float64).mean(0) for c in range(12)}
    for batch in drawn(sampler, items(embeddings=embeddings)):
        order = list(dict.fromkeys(LABELS[batch].tolist()))
        for size in range(1, 4):
            rest = [c for c in means if c not in order[:size]]
            chosen = [means[c] for c in order[:size]]
            gaps = [min(((means[c] - mean) ** 2).sum() for mean in chosen) for c in rest]
            assert order[size] == rest[int(np.argmin(gaps))]


def test_an_epoch_follows_from_seed_and_epoch_alone():
    for name, options in (("random", {}), ("hierarchical", {"level": "genus"})):
        sampler = create("sampler", f"core.{name}", **options)
        first, second = np.stack(drawn(sampler, epoch=0)), np.stack(drawn(sampler, epoch=1))
        assert (first != second).any()
        again = drawn(create("sampler", f"core.{name}", **options), epoch=1)
        np.testing.assert_array_equal(second, again)


class Stateful:
    """A batch sampler that continues where the last epoch ended."""

    def __init__(self, wrong: Any = None) -> None:
        self.generator, self.wrong = torch.Generator().manual_seed(1), wrong

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        yield from torch.randint(100, (2, 8), generator=self.generator).tolist()
        yield self.wrong or torch.randint(100, (4,), generator=self.generator).tolist()


def of_torch(kind: str) -> Any:
    if kind == "own generator":
        order = torch_data.RandomSampler(range(100), generator=torch.Generator().manual_seed(3))
    else:
        order = torch_data.RandomSampler(range(100))  # draws from torch's global generator
    return Stateful() if kind == "state" else torch_data.BatchSampler(order, 10, drop_last=True)


@pytest.mark.parametrize("kind", ["state", "own generator", "global generator"])
def test_torch_batch_samplers_resume_exactly(make, tmp_path, monkeypatch, kind):
    """Also batches of unequal sizes; the epochs differ."""

    def recipe() -> Recipe:
        tables = {**BASE, **CONTRASTIVE, "train": {"epochs": 3, "checkpoint_every": 2}}
        return check_recipe(tables, objects={"sampler": of_torch(kind)})

    sizes: list[int] = []
    real = Trainer._train_batch

    def stop(self: Any, inputs: Any, labels: Any) -> Any:
        sizes.append(len(inputs))
        if len(sizes) == last:
            raise KeyboardInterrupt
        return real(self, inputs, labels)

    monkeypatch.setattr(Trainer, "_train_batch", stop)
    last = 0
    train_run(tmp_path / "whole", recipe())
    assert sizes[:3] == ([8, 8, 4] if kind == "state" else [10] * 3)
    last, count = len(sizes) - 1, len(sizes)
    sizes.clear()
    with pytest.raises(KeyboardInterrupt):
        train_run(tmp_path / "stopped", recipe())
    last = 0
    train_run(tmp_path / "stopped", recipe(), resume=True)
    assert len(sizes) > count  # a checkpoint within the last epoch was used
    assert same(tmp_path / "whole", tmp_path / "stopped")


def test_hard_classes_resume_within_an_epoch(make, resumes):
    # the batches depend on the weights at the start of the epoch, which are overwritten
    sampler = {"name": "core.hard_classes", "classes": 3, "items": 4, "batches": 5}
    options = {"train": {"epochs": 2, "checkpoint_every": 2}}
    resumes(make(sampler=sampler, **CONTRASTIVE, **options), 8)


def test_two_processes_train_as_one(make, trains_as_one):
    tables, sampler = {**STEADY, **CONTRASTIVE, "train": {"epochs": 2}}, STEADY["sampler"]
    names = ("core.hard_classes", "core.random")
    trains_as_one({n: make(**{**tables, "sampler": {"name": n, **sampler}}) for n in names})


def test_a_plugins_sampler_draws_the_batches(make, tmp_path):
    sampler = {"name": "toolbox.forwards", "first": 4}
    recipe = make(sampler=sampler, **CONTRASTIVE, train={"epochs": 1})
    batches = trainer_of(tmp_path, recipe).batches
    expected = [list(range(i, i + 8)) for i in range(4, 60, 8)]
    assert [batch.tolist() for batch in batches.draw(0)] == expected


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [([1, 100000], "not a list of positions"), ([[1, 2]], "not a list"), ([0.5], "not a list")],
)
def test_what_is_no_batch_is_refused(wrong, sentence):
    with pytest.raises(PluginError, match=f"Stateful.*{sentence}"):
        drawn(as_batch_sampler(Stateful(wrong), "object.Stateful", 0))
    with pytest.raises(PluginError, match=r"must be a retrieval.plugin.BatchSampler"):
        as_batch_sampler(7, "mine.seven", 0)


class Short(BatchSampler):
    """Draws one batch, whatever its length."""

    def draw(self, of: TrainingItems, epoch: int, random: Any) -> list[list[int]]:
        return [[1, 2]]


def test_another_number_of_batches_is_refused():
    with pytest.raises(PluginError, match="Short drew 1 batches for epoch 0, but its length is 8"):
        drawn(Short())


def test_a_sampler_without_batches_is_refused(tmp_path):
    table = {**BASE, **CONTRASTIVE, "train": {"epochs": 1}}
    with pytest.raises(PluginError, match="The sampler list draws no batches"):
        retrieval.train(table, tmp_path / "run", sampler=[], progress=False)


def test_numpy_scalars_replace_numbers_of_the_recipe(tmp_path):
    table = {**BASE, **CONTRASTIVE, "train": {"epochs": np.int64(3)}}
    numbers = {"epochs": np.int64(1), "seed": np.int32(2)}
    run = retrieval.train(table, tmp_path / "run", **numbers, progress=False)
    assert (run.recipe.train.epochs, run.recipe.seed) == (1, 2)


def test_a_run_with_a_sampler_object_is_resumed_only_with_the_object(tmp_path):
    table = {**BASE, **CONTRASTIVE, "train": {"epochs": 1}}
    sampler = of_torch("own generator")
    retrieval.train(table, tmp_path / "run", sampler=sampler, progress=False)
    recipe = retrieval.load(tmp_path / "run", sampler=sampler).recipe
    assert recipe.sampler.name.startswith("object")
    assert len(retrieval.load(tmp_path / "run").encode("test", progress=False))
    with pytest.raises(RecipeError, match=r"sampler=…"):
        retrieval.train(tmp_path / "run" / "recipe.toml", tmp_path / "run", resume=True)
