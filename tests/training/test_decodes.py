"""Images are decoded once, by processes that end with the run."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from typing import Any

import pytest
from PIL import Image
from retrieval.data.datasets import FileDataset
from retrieval.errors import DataError, Interrupted
from retrieval.training.step import Step
from retrieval.training.trainer import train_run
from trained_weights import digit_photos, log

TABLES: dict[str, Any] = {
    "backbone": {"name": "core.convnet", "size": 8, "width": 4, "depth": 2},
    "split": {"by": "item", "test": 0.25, "validation": 0.4},
    "sampler": {"classes": 4, "items": 2, "batches": 2},
    "head": {"embedding_size": 4},
}


@pytest.fixture
def photos(tmp_path):
    """The `[data]` of 64 small files of four classes."""
    return {"name": "core.image_folder", "folder": str(digit_photos(tmp_path / "photos", 16))}


def test_four_epochs_decode_each_image_once(make, photos, tmp_path, monkeypatch):
    decoded: Counter[int] = Counter()
    real = FileDataset.__getitem__

    def counted(self: FileDataset, index: int) -> Image.Image:
        decoded[index] += 1
        return real(self, index)

    monkeypatch.setattr(FileDataset, "__getitem__", counted)
    run = train_run(tmp_path / "run", make(**TABLES, data=photos, train={"epochs": 4}))
    assert len([line["validation_map_at_r"] for line in log(run.path)]) == 4
    assert len(run.splits.validation) > 8
    assert {decoded[i] for i in run.splits.validation.tolist()} == {1}
    # the trial batch, and a batch that is decoded ahead, are decoded once more
    twice = [i for i in run.splits.train.tolist() if decoded[i] > 1]
    assert 0 < len(twice) <= 2 * 8 and {decoded[i] for i in twice} == {2}


@pytest.mark.parametrize(
    ("signals", "error"), [(0, DataError), (1, Interrupted), (2, KeyboardInterrupt)]
)
def test_the_processes_that_decode_end_with_a_run_that_fails_or_is_stopped(
    make, photos, tmp_path, monkeypatch, signals, error
):
    """The loss is NaN in step 2; Ctrl-C comes in step 1, once or twice."""
    before, seen, call = set(multiprocessing.active_children()), [], Step.__call__
    monkeypatch.setenv("NAN_AT", "2")

    def interrupted(self: Step, *batch: Any) -> Any:
        seen.append(set(multiprocessing.active_children()) - before)
        for _ in range(signals):
            signal.raise_signal(signal.SIGINT)
        return call(self, *batch)

    monkeypatch.setattr(Step, "__call__", interrupted)
    tables = {"augmentation": {"crop_scale": [0.5, 1.0]}, "train": {"epochs": 1, "workers": 1}}
    # the caught error keeps the frames, and so the trainer, alive
    with pytest.raises(error) as caught:
        train_run(tmp_path / "run", make(**TABLES, data=photos, **tables))
    assert [len(children) for children in seen] == [1] * (1 if signals else 2)
    assert set(multiprocessing.active_children()) == before, caught.value
