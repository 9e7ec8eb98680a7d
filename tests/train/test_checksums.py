"""A flipped bit in a checkpoint is refused, wherever it is."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from retrieval.cli.app import app
from retrieval.errors import DataError
from retrieval.recipe.read import to_toml
from retrieval.run import checkpoint
from retrieval.training.trainer import train


def retrieval(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from retrieval.recipe.read import check_recipe

    folder = tmp_path_factory.mktemp("flips")
    table = {
        "name": "flips",
        "data": {"name": "core.digits"},
        "split": {"by": "class"},
        "sampler": {"classes": 4, "items": 4, "batches": 4},
        "backbone": {"name": "core.convnet", "size": 8, "width": 2, "depth": 2},
        "head": {"embedding_size": 4},
        "loss": {"name": "pml.contrastive"},
        "train": {"epochs": 2, "device": "cpu"},
    }
    recipe = check_recipe(table)
    (folder / "recipe.toml").write_text(to_toml(recipe))
    train(folder / "run", recipe)
    (folder / "run" / "summary.json").unlink()  # as if it were stopped before its end
    return folder


@pytest.mark.parametrize("name", ["last", "previous", "best"])
def test_a_hundred_of_a_hundred_flips_are_refused(run: Path, tmp_path: Path, name: str) -> None:
    content = (run / "run" / "checkpoints" / f"{name}.safetensors").read_bytes()
    path = tmp_path / f"{name}.safetensors"
    path.write_bytes(content)
    assert checkpoint.load(path)
    generator = random.Random(14)
    header = 8 + int.from_bytes(content[:8], "little")
    # half of them anywhere, half in the header: it is what says where each tensor begins, and which
    # checksum to trust
    bits = [generator.randrange(8 * len(content)) for _ in range(50)]
    bits += [generator.randrange(8 * header) for _ in range(50)]
    for bit in bits:
        path.write_bytes(content)
        flip(path, bit)
        with pytest.raises(
            DataError, match=rf"{name}\.safetensors (is damaged|is not a checkpoint)"
        ):
            checkpoint.load(path)


def test_no_bit_of_a_small_checkpoint_can_be_flipped(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    checkpoint.save(path, {"sha256": "0" * 64, "x": torch.arange(3.0)})
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        path.write_bytes(content)
        flip(path, bit)
        with pytest.raises(DataError, match=r"x\.safetensors is"):
            checkpoint.load(path)


def test_resume_evaluate_and_export_name_the_file_and_what_to_do(run: Path, tmp_path: Path) -> None:
    for name, command, advice in (
        (
            "last",
            ["train", run / "recipe.toml", "--resume", "--output"],
            r"resume from the checkpoint before it",
        ),
        ("best", ["evaluate"], r"Remove the file to use last\.safetensors"),
        ("best", ["export"], r"Remove the file to use last\.safetensors"),
    ):
        folder = tmp_path / command[0]
        shutil.copytree(run / "run", folder)
        path = folder / "checkpoints" / f"{name}.safetensors"
        flip(path, 8 * (path.stat().st_size - 5))
        with pytest.raises(DataError, match=rf"{path} is damaged.*SHA-256.*{advice}"):
            raise retrieval(*command, folder).exception
        path.unlink()  # as the sentence says
        assert retrieval(*command, folder).exit_code == 0


def test_going_on_from_the_checkpoint_before_the_last_ends_the_same(
    run: Path, tmp_path: Path
) -> None:
    whole = checkpoint.load(run / "run" / "checkpoints" / "last.safetensors")
    before = checkpoint.load(run / "run" / "checkpoints" / "previous.safetensors")
    assert (before["progress"]["epoch"], whole["progress"]["epoch"]) == (1, 2)
    folder = tmp_path / "run"
    shutil.copytree(run / "run", folder)
    (folder / "checkpoints" / "last.safetensors").unlink()
    done = retrieval("train", run / "recipe.toml", "--resume", "--output", folder)
    assert done.exit_code == 0 and "epoch 2" in done.output and "epoch 1:" not in done.output
    again = checkpoint.load(folder / "checkpoints" / "last.safetensors")
    assert all(torch.equal(value, again["model"][name]) for name, value in whole["model"].items())
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
