"""`retrieval export --model`: a pretrained backbone becomes a bundle, whitened or not."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from exporting import export_backbone
from makers import read_manifest
from PIL import Image
from retrieval.bundle.bundle import Bundle
from retrieval.cli.app import app
from retrieval.errors import BundleError, DataError, PluginError, RecipeError
from retrieval.export import export_backbone as exporting, export_model
from retrieval.export.export_backbone import BackboneEncoder
from retrieval.index.index import Index

SMALL = {"parameters": {"size": 4}, "progress": False}
"""`core.pixels` of 16 features."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, photographs):
    """Real photos: 160 crops of scikit-learn's two photographs."""
    made = tmp_path_factory.mktemp("photos")
    for number, pixels in enumerate(photographs(72, 160)):
        Image.fromarray(pixels.transpose(1, 2, 0)).save(made / f"{number:03}.png")
    return made


def command(*words):
    return CliRunner().invoke(app, ["export", *(str(word) for word in words)])


def pixels_of(bundle, folder):
    return np.stack([bundle.preprocess(file) for file in sorted(folder.iterdir())])


def whitened_by_hand(features, fitted, width):
    """PCA whitening by the singular values of the centred features, in double precision."""
    fitted, features = fitted.astype(np.float64), features.astype(np.float64)
    mean = fitted.mean(axis=0)
    _, values, directions = np.linalg.svd(fitted - mean, full_matrices=False)
    variance = values**2 / (len(fitted) - 1)
    out = np.empty((len(features), width))
    for row, each in enumerate(features):
        for column in range(width):
            share = float(directions[column] @ (each - mean))
            out[row, column] = share / np.sqrt(variance[column] + 1e-6 * variance[0])
        out[row] /= np.linalg.norm(out[row])
    return out


@pytest.fixture(scope="module")
def lite(tmp_path_factory, folder):
    """EfficientNet-Lite0 with its real weights, as it is and whitened."""
    made = tmp_path_factory.mktemp("lite")
    name, common = "core.efficientnet_lite0", {"parameters": {"size": 64}, "progress": False}
    plain = export_backbone(name, made / "plain", **common)
    return plain, export_backbone(name, made / "white", whiten=folder, dimensions=24, **common)


def test_a_pretrained_backbone_becomes_a_bundle_of_its_features(lite, folder):
    from retrieval_core import efficientnet_lite0

    bundle, backbone = lite[0], efficientnet_lite0(size=64).eval()
    said = bundle.manifest
    shape = (said.name, said.vector, said.input.shape)
    assert shape == ("core.efficientnet_lite0", 1280, (3, 64, 64))
    assert said.input.preprocessing == backbone.preprocessing
    assert said.verified.items == 64
    assert said.verified.largest_difference < 1e-4
    assert not said.normalized
    pixels = pixels_of(bundle, folder)[:4]
    prepared = said.input.preprocessing
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (prepared.mean, prepared.std))
    with torch.no_grad():
        wanted = backbone((torch.from_numpy(pixels) / 255 - mean) / std).numpy()
    assert np.allclose(bundle.encode(pixels).vector, wanted, atol=1e-4)
    assert wanted.std(axis=0).max() > 0.1  # the photos differ


def test_whitened_vectors_are_those_of_a_decomposition_by_hand(lite, folder):
    plain, white = lite
    pixels = pixels_of(plain, folder)
    features = plain.encode(pixels).vector
    wanted = whitened_by_hand(features, features, 24)
    found = white.encode(pixels).vector
    assert white.manifest.vector == 24 and white.manifest.normalized
    # a direction and its opposite are the same component
    signs = np.sign((found * wanted).sum(axis=0))
    assert np.abs(found * signs - wanted).max() < 1e-3
    assert white.manifest.verified.items == 160


def test_a_backbone_with_random_weights_is_refused_unless_asked_for(tmp_path):
    small = {"parameters": {"width": 2, "depth": 2, "layers": 1, "size": 8}}
    says = r"weights of core.convnet are random.*plugins show.*retrieval train.*--random-weights"
    with pytest.raises(BundleError, match=says):
        export_backbone("core.convnet", tmp_path / "b", **small)
    assert not list(tmp_path.iterdir())
    before = torch.random.get_rng_state()
    made = [
        export_backbone("core.convnet", tmp_path / n, random_weights=True, **small) for n in "ab"
    ]
    assert torch.equal(before, torch.random.get_rng_state())
    files = [bundle.manifest.files["encoder.onnx"].sha256 for bundle in made]
    assert files[0] == files[1]


def test_a_backbone_without_weights_has_none_that_are_random(tmp_path, folder):
    bundle = export_backbone("core.pixels", tmp_path / "b", **SMALL)
    pixels = pixels_of(bundle, folder)
    assert np.allclose(bundle.encode(pixels).vector, pixels.reshape(160, -1) / 255, atol=1e-6)


def test_the_bundle_of_a_backbone_is_kept_while_it_is_right(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("RETRIEVAL_CACHE", str(tmp_path))
    encoder = BackboneEncoder("core.pixels", {"size": 4})

    def written() -> tuple[Path, int]:
        bundle = encoder.kept([folder], progress=False)
        return bundle, (bundle / "manifest.json").stat().st_mtime_ns

    bundle, first = written()
    assert bundle.parent == tmp_path / "backbones" and written() == (bundle, first)
    with encoder.exported() as exported:  # what `Index.create(model=encoder)` uses
        assert exported == bundle and written() == (bundle, first)
    other = BackboneEncoder("core.pixels", {"size": 5})
    assert other.kept(progress=False) != bundle and written() == (bundle, first)

    # Altered files, another version, other outputs: it is exported again.
    content = (bundle / "encoder.onnx").read_bytes()
    (bundle / "encoder.onnx").write_bytes(content[:-1] + b"x")
    second = written()[1]
    assert second != first and (bundle / "encoder.onnx").read_bytes() == content
    (bundle / "manifest.json").unlink()
    third = written()[1]
    newer = {**export_model.library_versions(), "torch": "99.0"}
    monkeypatch.setattr(exporting, "library_versions", lambda: newer)
    fourth = written()[1]
    monkeypatch.undo()
    monkeypatch.setenv("RETRIEVAL_CACHE", str(tmp_path))
    fifth = written()
    assert len({first, second, third, fourth}) == 4 and fifth == (bundle, fourth)
    features = encoder.model.backbone.forward
    monkeypatch.setattr(encoder.model.backbone, "forward", lambda x: 1 - features(x))
    assert written()[1] != fourth


def test_the_command_whitens_and_sets_parameters(tmp_path, folder):
    changes = ["--set", "size=5", "--set", "backbone.channels=3"]
    options = ["--whiten", folder, "--dimensions", 8, "--variant", "int8", "--allow-drift"]
    done = command("--model", "core.pixels", *changes, *options, "--output", tmp_path / "b")
    assert done.exit_code == 0, done.output
    assert "on 80 photos (tolerance 0.0001)" in done.output and "int8: " in done.output
    manifest = read_manifest(tmp_path / "b")
    assert manifest.vector == 8 and manifest.input.shape == (3, 5, 5)
    bundle = Bundle.open(tmp_path / "b", variant="int8")
    assert bundle.encode(np.zeros((2, 3, 5, 5), np.uint8)).vector.shape == (2, 8)


def test_an_index_of_a_backbone_takes_its_parameters(tmp_path, folder, cli):
    words = [tmp_path / "photos.index", folder, "--set", "backbone.size=5", "--set"]
    done = cli("index", "create", *words, "backbone.channels=3", "--model", "core.pixels")
    assert done.code == 0, done.err
    with Index.open(tmp_path / "photos.index") as index:
        assert index.bundle.manifest.input.shape == (3, 5, 5)
    done = cli("index", "create", *words, "backbone.channels=3", "--bundle", tmp_path, "--replace")
    assert done.code == 2 and "Leave --set backbone.size=5 out" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Name either a run or"),
        (["runs/a", "--model", "core.pixels"], "Name either a run or"),
        (["--model", "core.pixels"], "needs --output"),
        (["runs/a", "--whiten", "photos"], "Leave --whiten out without --model"),
        (["runs/a", "--random-weights"], "Leave --random-weights out without"),
        (["runs/a", "--set", "size=3"], "Leave --set out without --model"),
    ],
)
def test_options_that_do_not_fit_are_refused(words, said):
    done = command(*words)
    assert done.exit_code == 2 and said in " ".join(done.output.split())


def test_mistakes_are_sentences_and_leave_nothing(tmp_path, folder):
    out = tmp_path / "b"
    cases = [
        (PluginError, "core.pixel.*core.pixels", "pixel", {}),
        (RecipeError, "core.pixels has 1 problem.*siez", "pixels", {"parameters": {"siez": 3}}),
        (RecipeError, "already named", "pixels", {"parameters": {"name": "core.convnet"}}),
        (RecipeError, "1 problem.*no timm model", "timm", {"parameters": {"model": "resnet81"}}),
        (BundleError, "takes vectors, not images", "features", {}),
        (BundleError, "name photos for the whitening", "pixels", {"dimensions": 4}),
        (BundleError, "calibrated on photos: name some", "pixels", {"variants": "int8"}),
        (DataError, "does not exist", "pixels", {"whiten": tmp_path / "nowhere"}),
    ]
    for width, said in (
        (785, "785 dimensions are not available.*784"),
        (160, "160 photos are too few to whiten 160"),
    ):
        cases.append((DataError, said, "pixels", {"whiten": folder, "dimensions": width}))
    for kind, said, name, options in cases:
        with pytest.raises(kind, match=f"(?s){said}"):
            export_backbone(f"core.{name}", out, progress=False, **options)
    assert not list(tmp_path.iterdir())


def test_photos_that_are_all_alike_are_refused(tmp_path):
    for number in range(20):
        Image.new("RGB", (9, 9), (90, 30, 60)).save(tmp_path / f"{number}.png")
    with pytest.raises(DataError, match="vary in only 0 directions"):
        export_backbone("core.pixels", tmp_path / "b", whiten=tmp_path, dimensions=3, **SMALL)
    for number in range(6):
        Image.new("RGB", (9, 9), (number * 40,) * 3).save(tmp_path / f"{number}.png")
    with pytest.raises(DataError, match="vary in only 1 directions, fewer than the 3 dimensions"):
        export_backbone("core.pixels", tmp_path / "b", whiten=tmp_path, dimensions=3, **SMALL)
    assert not (tmp_path / "b").exists()


def test_photos_that_cannot_be_read_are_left_out_and_named(tmp_path, folder, caplog):
    some = tmp_path / "some"
    some.mkdir()
    for file in sorted(folder.iterdir())[:30]:
        (some / file.name).write_bytes(file.read_bytes())
    (some / "cut.png").write_bytes((some / "003.png").read_bytes()[:200])
    (some / "notes.txt").write_text("not a photo")
    with caplog.at_level(logging.WARNING):
        bundle = export_backbone("core.pixels", tmp_path / "b", whiten=some, dimensions=3, **SMALL)
    assert "1 of 31 photos cannot be read" in caplog.text and "cut.png" in caplog.text
    assert bundle.manifest.verified.items == 30
    for file in some.glob("*.png"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match="None of the 31 photos can be read"):
        export_backbone("core.pixels", tmp_path / "c", whiten=some, dimensions=3, **SMALL)


def test_no_photo_both_calibrates_int8_and_measures_it(tmp_path, folder, monkeypatch):
    given = {}
    real = exporting.export_model

    def noting(model, items, output, **options):
        given.update(items=items, **options)
        return real(model, items, output, **options)

    monkeypatch.setattr(exporting, "export_model", noting)
    options = {"whiten": folder, "dimensions": 4, "variants": "int8", "allow_drift": True}
    export_backbone(
        "core.pixels", tmp_path / "b", **options, **SMALL | {"parameters": {"size": 12}}
    )
    sides = [{image.tobytes() for image in given[name]} for name in ("items", "calibration")]
    assert [len(side) for side in sides] == [80, 80] and not sides[0] & sides[1]
    one = tmp_path / "one"
    one.mkdir()
    (one / "a.png").write_bytes((folder / "001.png").read_bytes())
    with pytest.raises(BundleError, match="at least 2 photos"):
        export_backbone("core.pixels", tmp_path / "c", photos=one, variants="int8", **SMALL)
