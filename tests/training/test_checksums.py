"""Checkpoints are saved whole, and refused if a bit is flipped anywhere."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from limits import files_of_at_most
from retrieval.errors import DataError
from retrieval.recipe.read import check_recipe, to_toml
from retrieval.run import checkpoint_format
from retrieval.run.open import Run
from retrieval.training.trainer import train_run
from trained_weights import SMALL, log, ran, retrieval, same


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with `recipe.toml` and its `run`, which looks as if it had been stopped."""
    folder = tmp_path_factory.mktemp("flips")
    (folder / "recipe.toml").write_text(to_toml(check_recipe(SMALL)))
    train_run(folder / "run", check_recipe(SMALL))
    (folder / "run" / "summary.json").unlink()
    return folder


@pytest.mark.parametrize("name", ["last", "previous", "best"])
def test_a_hundred_random_flips_are_refused(run, tmp_path, name):
    content = (run / "run" / "checkpoints" / f"{name}.safetensors").read_bytes()
    path = tmp_path / f"{name}.safetensors"
    path.write_bytes(content)
    assert checkpoint_format.load_checkpoint(path)
    generator = random.Random(14)
    header = 8 + int.from_bytes(content[:8], "little")
    # half of them in the header, which has the tensors' places and the checksum
    bits = [generator.randrange(8 * len(content)) for _ in range(50)]
    bits += [generator.randrange(8 * header) for _ in range(50)]
    for bit in bits:
        path.write_bytes(content)
        flip(path, bit)
        says = rf"{name}\.safetensors (is damaged|is not a checkpoint)"
        with pytest.raises(DataError, match=says):
            checkpoint_format.load_checkpoint(path)


def test_no_bit_of_a_small_checkpoint_can_be_flipped(tmp_path):
    path = tmp_path / "x.safetensors"
    checkpoint_format.save(path, {"sha256": "0" * 64, "x": torch.arange(3.0)})
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        path.write_bytes(content)
        flip(path, bit)
        with pytest.raises(DataError, match=r"x\.safetensors is"):
            checkpoint_format.load_checkpoint(path)


def test_resume_evaluate_and_export_name_the_file_and_what_to_do(run, tmp_path):
    resume = ["train", run / "recipe.toml", "--resume", "--output"]
    use_last = r"Remove the file to use last\.safetensors"
    for name, command, advice in (
        ("last", resume, r"resume from the checkpoint before it"),
        ("best", ["evaluate"], use_last),
        ("best", ["export"], use_last),
    ):
        folder = tmp_path / command[0]
        shutil.copytree(run / "run", folder)
        path = folder / "checkpoints" / f"{name}.safetensors"
        flip(path, 8 * (path.stat().st_size - 5))
        with pytest.raises(DataError, match=rf"{path} is damaged.*SHA-256.*{advice}"):
            raise retrieval(*command, folder).exception
        path.unlink()
        output = ran(*command, folder)
        if name == "last":  # the checkpoint before it is of the first epoch
            assert "epoch 2" in output and "epoch 1:" not in output
            assert same(folder, run / "run") and len(log(folder)) == 2


def test_half_a_checkpoint_and_a_pickle_are_refused(run, tmp_path):
    shutil.copytree(run / "run", tmp_path / "run")
    best = tmp_path / "run" / "checkpoints" / "best.safetensors"
    content = best.read_bytes()
    for damaged in (content[: len(content) // 2], b"\x80\x04K\x01."):
        best.write_bytes(damaged)
        with pytest.raises(DataError, match=r"best\.safetensors is damaged"):
            Run.open(tmp_path / "run")


def test_checkpoints_keep_every_nesting_and_type(tmp_path):
    half, mixed = torch.tensor(2.0, dtype=torch.bfloat16), (2.5, None, "x", True)
    state = {"a": {1: [torch.arange(3), mixed]}, "e": {}, "l": [], "t": half}
    checkpoint_format.save(tmp_path / "x.safetensors", state)
    loaded = checkpoint_format.load_checkpoint(tmp_path / "x.safetensors")
    assert torch.equal(loaded["a"][1][0], state["a"][1][0])
    assert loaded["a"][1][1] == mixed and loaded["t"].dtype == torch.bfloat16
    assert (loaded["e"], loaded["l"]) == ({}, [])


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "last.safetensors"
    checkpoint_format.save(path, {"x": torch.ones(3)})
    says = r"cannot be written.*previous checkpoint"
    with files_of_at_most(100_000), pytest.raises(DataError, match=says):
        checkpoint_format.save(path, {"x": torch.ones(1_000_000)})
    assert torch.equal(checkpoint_format.load_checkpoint(path)["x"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["last.safetensors"]
