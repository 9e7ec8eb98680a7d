"""`retrieval init` describes a folder of photos and writes recipes that run unchanged."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from retrieval.recipe.read import read_recipe
from retrieval.training.process import make_accelerator

from retrieval_lab.proposal import Facts, recipes_for

FACTS = Facts(Path("photos"), 5000, 400, (2, 9, 80), 300, grey=False, divided=False, duplicates=0)


@pytest.fixture
def folder(tmp_path):
    """Three classes of noise: one photo is in two of them, another cannot be read."""
    random = np.random.default_rng(0)
    for label in ("cup", "pot", "jug"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for i in range(6):
            pixels = random.integers(0, 256, (40, 52), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{i}.png")
    twice = (tmp_path / "photos" / "cup" / "0.png").read_bytes()
    (tmp_path / "photos" / "pot" / "again.png").write_bytes(twice)
    (tmp_path / "photos" / "jug" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return tmp_path / "photos"


def test_the_folder_is_described_and_the_recipe_runs(folder, tmp_path, cli, monkeypatch):
    monkeypatch.setattr("retrieval_lab.proposal.WEIGHTS", "not_installed")
    output = tmp_path / "recipes"
    done = cli("init", folder, "--output", output)
    assert done.code == 0, done.err
    assert "19 grey photos of 3 classes, 6 to 7 of each (median 6), about 40 pixels" in done.out
    assert "in more than one class" in done.out
    (only,) = output.iterdir()  # without weights, a net from scratch
    assert "on this machine" in only.read_text().splitlines()[0]
    assert "embedding-retrieval[efficientnet]" in done.out
    assert f"retrieval train {only}" in done.out and "retrieval compare" not in done.out
    checked = cli("check", only)
    assert checked.code == 0 and "The recipe" in checked.out, checked.err

    refused = cli("init", folder, "--output", output)
    assert refused.code == 2 and "exists already" in refused.err
    assert cli("init", folder, "--output", output, "--replace").code == 0
    flat = cli("init", folder / "cup", "--output", tmp_path / "none")
    assert flat.code == 2 and "no class folder" in flat.err and not (tmp_path / "none").exists()


def test_all_recipes_are_valid_and_share_a_split(tmp_path):
    recipes = []
    for name, (_, text) in recipes_for(FACTS, weights=True).items():
        file = tmp_path / f"{name}.toml"
        file.write_text(text)
        recipes.append(read_recipe(file))
        explained = ("[data", "[split", "[back")  # each table has a comment on its choices
        assert all("#" in table for table in text.split("\n\n") if table.startswith(explained))
    assert [recipe.name for recipe in recipes] == ["frozen", "finetune", "scratch"]
    assert len({(str(recipe.split), str(recipe.sampler)) for recipe in recipes}) == 1
    assert recipes[0].backbone.frozen and recipes[1].phases[0].train == ["head", "loss"]
    assert recipes[0].split.by == "class" and recipes[0].split.validation_by == "class"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
@pytest.mark.parametrize("instructions", [[], ["avx512_bf16"], ["bf16"]])
def test_bf16_is_proposed_to_processors_with_its_instructions(
    tmp_path, monkeypatch, caplog, instructions
):
    """Others emulate it: an epoch of the net from scratch took 87 seconds instead of 13."""
    capabilities = {"avx512_f": True, "amx_bf16": False, **dict.fromkeys(instructions, True)}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    _, text = recipes_for(FACTS, weights=True)["scratch"]
    assert ('precision = "bf16"' in text) is bool(instructions)

    file = tmp_path / "scratch.toml"
    file.write_text(text)
    make_accelerator(read_recipe(file, ["train.precision=bf16"]))
    warned = "this processor has no bf16 instructions" in caplog.text
    assert warned is not bool(instructions)


def test_few_photos_get_no_net_from_scratch():
    few = Facts(Path("photos"), 120, 10, (3, 12, 20), 300, grey=True, divided=True, duplicates=None)
    recipes = recipes_for(few, weights=True)
    assert "scratch" not in recipes
    assert 'by = "given"             # the folders train, validation, test' in recipes["frozen"][1]
