"""`retrieval init` describes a folder of photos and writes recipes that run unchanged."""

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from retrieval.recipe.read import read_recipe
from retrieval.training.process import make_accelerator

from retrieval_lab.proposal import (
    KINDS,
    Facts,
    Timing,
    background_of,
    fitted,
    look,
    names_for,
    recipe_text,
)

FACTS = Facts(
    Path("photos"), 5000, 400, 400, (2, 9, 80), 300, grey=False, divided=False, duplicates=0
)


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
    for name in names_for(FACTS, weights=True):
        text = recipe_text(FACTS, name, 96, 3)
        file = tmp_path / f"{name}.toml"
        file.write_text(text)
        recipes.append(read_recipe(file))
        explained = ("[data", "[split", "[back")  # each table has a comment on its choices
        assert all("#" in table for table in text.split("\n\n") if table.startswith(explained))
    assert [recipe.name for recipe in recipes] == ["frozen", "finetune", "scratch"]
    assert len({(str(recipe.split), str(recipe.sampler)) for recipe in recipes}) == 1
    assert recipes[0].backbone.frozen and recipes[1].phases[0].train == ["head", "loss"]
    assert recipes[0].split.by == "class" and recipes[0].split.validation_by == "class"


@pytest.mark.parametrize(("name", "epochs"), [("frozen", 20), ("finetune", 12)])
def test_the_engineers_page_shows_what_init_writes(name, epochs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # bf16 is for GPUs
    page = Path(__file__).parents[2].joinpath("docs", "engineer.md").read_text(encoding="utf-8")
    shown = page.split(f":caption: {name}.toml\n\n")[1].split("```")[0]
    assert shown == recipe_text(FACTS, name, 160, epochs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
@pytest.mark.parametrize("instructions", [[], ["avx512_bf16"], ["bf16"]])
def test_bf16_is_proposed_to_processors_with_its_instructions(
    tmp_path, monkeypatch, caplog, instructions
):
    """Others emulate it: an epoch of the net from scratch took 87 seconds instead of 13."""
    capabilities = {"avx512_f": True, "amx_bf16": False, **dict.fromkeys(instructions, True)}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    text = recipe_text(FACTS, "scratch", 64, 3)
    assert ('precision = "bf16"' in text) is bool(instructions)

    file = tmp_path / "scratch.toml"
    file.write_text(text)
    make_accelerator(read_recipe(file, ["train.precision=bf16"]))
    warned = "this processor has no bf16 instructions" in caplog.text
    assert warned is not bool(instructions)


def test_few_photos_get_no_net_from_scratch():
    few = Facts(
        Path("photos"), 120, 10, 10, (3, 12, 20), 300, grey=True, divided=True, duplicates=None
    )
    assert names_for(few, weights=True) == ["frozen", "finetune"]
    text = recipe_text(few, "frozen", 96, 3)
    assert 'by = "given"             # the folders train, validation, test' in text
    assert names_for(few, weights=False) == ["scratch"]


@pytest.fixture
def table(tmp_path):
    """60 classes of noise, six photos of each by six cameras; 30 classes are the test side."""
    random = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    lines = ["path,label,split,camera,vendor"]
    for label in range(60):
        side = "train" if label < 30 else "test"
        for camera in range(6):
            path = f"images/{label}-{camera}.png"
            pixels = random.integers(0, 256, (66, 70), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / path)
            lines.append(f"{path},{label},{side},camera {camera},vendor {label}")
    file = tmp_path / "photos.csv"
    file.write_text("\n".join(lines))
    return file


def test_a_table_with_cameras_gets_recipes_that_validate_on_new_ones(
    table, tmp_path, cli, monkeypatch
):
    monkeypatch.setattr("retrieval_lab.proposal.WEIGHTS", "not_installed")
    done = cli("init", table, "--output", tmp_path / "recipes", "--minutes", 0.2)
    assert done.code == 0, done.err
    assert "The column camera says where photos come from" in done.out
    recipe = read_recipe(tmp_path / "recipes" / "scratch.toml")
    assert recipe.data.table == {"name": "core.csv", "manifest": str(table), "skip_bad": True}
    # a vendor has one class only: to hold it out would hold out the class
    assert recipe.split.source == "camera" and recipe.split.by == "given"
    trained = cli(
        "train", tmp_path / "recipes" / "scratch.toml", "--output", tmp_path / "run", "--set",
        "train.epochs=1",
    )  # fmt: skip
    assert trained.code == 0, trained.err
    assert "does not train, and chooses the epoch" in trained.out

    table.write_text(table.read_text().replace("camera 5", "camera 4").replace("images/0-0", "x"))
    refused = cli("init", table, "--output", tmp_path / "none")
    assert refused.code == 2 and "line 2" in refused.err and not (tmp_path / "none").exists()
    endless = cli("init", table, "--output", tmp_path / "none", "--minutes", 0)
    assert endless.code == 2 and "--minutes" in endless.err


def test_two_cameras_are_too_few_to_hold_one_out(table):
    text = table.read_text()
    for camera in range(2, 6):
        text = text.replace(f"camera {camera}", f"camera {camera % 2}")
    table.write_text(text)
    assert look(table).source is None


def test_photos_on_a_plain_background_are_turned_and_others_cropped(tmp_path):
    random = np.random.default_rng(0)
    drawings = []
    for _ in range(5):
        pixels = np.full((40, 50), 250, np.uint8)
        pixels[10:30, 10:30] = random.integers(0, 256, (20, 20))
        drawings.append(Image.fromarray(pixels))
    assert background_of(drawings) == 250
    noise = Image.fromarray(random.integers(0, 256, (40, 50, 3), dtype=np.uint8))
    assert background_of([*drawings, noise]) is None
    for background in (250, None):
        text = recipe_text(replace(FACTS, background=background), "finetune", 96, 3)
        recipe = read_recipe(tomllib.loads(text))
        assert (recipe.augmentation.crop_scale is None) is (background == 250)
        assert [t["fill"] for t in recipe.augmentation.transforms] == [250] * (background == 250)
        assert recipe.backbone.table.get("crop") == (1.0 if background == 250 else None)


def test_more_time_gives_larger_images_and_then_more_epochs(monkeypatch):
    """The least epochs at a larger size come before further epochs at a smaller one."""

    def measured(text):
        size = int(text.split("\nsize = ")[1].split()[0])
        return Timing(once=0, epoch=10 * (size / 64) ** 2)

    monkeypatch.setattr("retrieval_lab.proposal.timed", measured)
    least = KINDS["finetune"].least
    chosen = {}
    for seconds in (5, 10 * least, 22.5 * least, 22.5 * (least + 1), 10**6):
        text, expected = fitted(FACTS, "finetune", seconds)
        recipe = read_recipe(tomllib.loads(text))
        chosen[seconds] = (recipe.backbone.table["size"], recipe.phases[1].epochs)
        assert expected <= max(seconds, 10)
    assert list(chosen.values()) == [
        (64, 1),
        (64, least),
        (96, least),
        (96, least + 1),
        (160, KINDS["finetune"].most),
    ]
