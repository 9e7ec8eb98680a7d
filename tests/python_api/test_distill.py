"""Distillation: the loss by plain loops, a student that learns its teacher, and refusals."""

import math
import os
import shutil
import sys

import numpy as np
import pytest
import retrieval
import torch
from PIL import Image
from retrieval.bundle.encoder import BundleEncoder
from sklearn.datasets import load_digits
from torch import Tensor, nn

from retrieval_core.distillation_loss import Distillation
from retrieval_lab.distill import _divided

SMALL = ["--set", "backbone.size=16", "--set", "backbone.channels=1", "--set", "backbone.width=8"]
SMALL += ["--set", "backbone.depth=2", "--set", "augmentation.crop_scale=[0.9, 1.0]"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """300 digits in a folder per class."""
    folder = tmp_path_factory.mktemp("digits")
    images, labels = load_digits(return_X_y=True)
    for i in range(300):
        (folder / str(labels[i])).mkdir(exist_ok=True)
        pixels = (images[i].reshape(8, 8) * 15).astype(np.uint8)
        Image.fromarray(pixels).save(folder / str(labels[i]) / f"{i:03}.png")
    return folder


def by_loops(x: Tensor, teacher: Tensor, cosine: float, relational: float) -> float:
    """Park et al., CVPR 2019, equations 4 to 6, and the mean of 1 − cos."""

    def distances(rows):
        pairs = [(i, j) for i in range(len(rows)) for j in range(i + 1, len(rows))]
        lengths = [math.dist(rows[i], rows[j]) for i, j in pairs]
        mean = sum(lengths) / len(lengths)
        return [length / mean for length in lengths]

    rows, targets = x.tolist(), teacher.tolist()
    total = 0.0
    for a, b in zip(distances(rows), distances(targets), strict=True):
        total += (a - b) ** 2 / 2 if abs(a - b) <= 1 else abs(a - b) - 0.5
    relation = total / (len(rows) * (len(rows) - 1) / 2)
    angles = [
        1 - sum(p * q for p, q in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)
        for a, b in zip(rows, targets, strict=True)
    ]
    return cosine * sum(angles) / len(angles) + relational * relation


def test_the_loss_equals_plain_loops():
    random = torch.Generator().manual_seed(0)
    cubes = torch.randn(9, 5, generator=random, dtype=torch.float64) ** 3
    teacher = nn.functional.normalize(cubes, dim=1)
    x = torch.randn(6, 5, generator=random, dtype=torch.float64, requires_grad=True)
    items = torch.tensor([4, 0, 8, 2, 7, 1])
    loss = Distillation(teacher, torch.arange(9) % 3, cosine=0.7, relational=2.0)
    expected = by_loops(x.detach(), teacher[items], 0.7, 2.0)
    assert loss(x, items).item() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.gradcheck(lambda rows: loss(rows, items), [x])

    class OfClasses(nn.Module):
        def forward(self, embeddings, labels):
            return (embeddings.sum(1) * labels).sum()

    with_classes = Distillation(teacher, torch.arange(9) % 3, 0.7, 2.0, OfClasses(), 0.5)
    further = 0.5 * (x.sum(1) * (items % 3)).sum()
    torch.testing.assert_close(with_classes(x, items), loss(x, items) + further)


def test_a_student_learns_its_teacher_and_resumes(bundle, digits, tmp_path, cli, monkeypatch):
    call = ["distill", bundle.path, digits, "--run", tmp_path / "work", "--dimensions", "16"]
    call += [*SMALL, "--output", tmp_path / "small.bundle"]
    short = cli(*call, "--set", "train.epochs=1")
    assert short.code == 0, short.err
    assert "trained on 285 photos" in short.out
    assert cli(*call).code == 2  # bundle and folder exist
    longer = ["--set", "train.epochs=12", "--resume", "--output", tmp_path / "again.bundle"]
    again = cli(*call, *longer)
    assert again.code == 0, again.err

    student, files = retrieval.load(tmp_path / "again.bundle"), sorted(digits.rglob("*.png"))[::7]
    own, target = (encoder.encode(files, progress=False) for encoder in (student, bundle))
    assert own.shape[1] == 16

    def correlation(a, b):
        pairs = np.triu_indices(len(files), 1)
        return float(np.corrcoef((a @ a.T)[pairs], (b @ b.T)[pairs])[0, 1])

    first = retrieval.load(tmp_path / "small.bundle").encode(files, progress=False)
    assert correlation(own, target) > max(0.7, correlation(first, target))

    elsewhere = ["--output", tmp_path / "none.bundle", "--run", tmp_path / "none"]
    wrong = cli(*call[:3], "--student", "core.convne", *elsewhere)
    assert wrong.code == 2 and "'core.convnet'" in wrong.err and not (tmp_path / "none").exists()
    encode = BundleEncoder.encode

    def embeds_again(encoder, images, **options):
        assert not isinstance(images, list), "the teacher's embeddings exist already"
        return encode(encoder, images, **options)

    monkeypatch.setattr(BundleEncoder, "encode", embeds_again)
    Image.new("L", (8, 8)).save(digits / "0" / "new.png")
    other = cli(*call, "--resume", "--output", tmp_path / "other.bundle")
    (digits / "0" / "new.png").unlink()
    assert other.code == 2 and "different photos" in other.err


def test_the_printed_command_resumes_only_what_began(bundle, digits, tmp_path, cli, monkeypatch):
    call = ["distill", bundle.path, digits, "--run", tmp_path / "work", "--replace"]
    call += ["--output", tmp_path / "small.bundle"]
    monkeypatch.setattr(sys, "argv", ["retrieval", *map(str, call)])

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    steps = ("_photos", "_embeddings", "_embeddings", "_photos")
    for step, resumes in zip(steps, (False, True, True, False), strict=True):
        with monkeypatch.context() as patched:
            patched.setattr(f"retrieval_lab.distill.{step}", interrupt)
            stopped = cli(*call)
        assert stopped.code == 130 and "--replace" in stopped.err, stopped.err
        assert ("--resume" in stopped.err) == resumes


def test_a_student_learns_labels_too(bundle, digits, tmp_path, cli):
    call = ["distill", bundle.path, digits, "--output", tmp_path / "small.bundle", "--labels"]
    call += ["--run", tmp_path / "work", "--set", "train.epochs=1", "--dimensions", "8"]
    done = cli(*call, *SMALL)
    assert done.code == 0, done.err
    run = retrieval.load(tmp_path / "work" / "run")
    assert run.recipe.loss.parameters["loss"] == "pml.multi_similarity"
    assert set(run.labels("test")) <= set(map(str, range(10)))
    with np.load(tmp_path / "work" / "teacher.npz") as file:
        classes = np.asarray(run.splits.classes)[file["classes"]]
    assert list(classes) == list(run.labels("train"))


def test_labels_need_no_pair_among_the_held_out_photos(bundle, tmp_path, cli):
    for number in range(130):
        folder = tmp_path / "photos" / str(number // 2)
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(folder / f"{number}.png")
    held_out = _divided(130)[1] // 2
    assert len(set(held_out)) == len(held_out), "no two of one folder"
    call = ["distill", bundle.path, tmp_path / "photos", "--output", tmp_path / "small.bundle"]
    call += ["--labels", "--set", "train.epochs=1", "--dimensions", "8", *SMALL]
    done = cli(*call, "--run", tmp_path / "work")
    assert done.code == 0, done.err
    with np.load(tmp_path / "work" / "teacher.npz") as file:
        assert len(np.unique(file["classes"])) == 65


def test_too_few_photos_and_broken_embeddings_are_refused(bundle, tmp_path, cli):
    (tmp_path / "few").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "few" / "a.png")
    few = cli("distill", bundle.path, tmp_path / "few", "-o", tmp_path / "small.bundle")
    assert few.code == 2 and "too few" in few.err
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    sizes = {"teacher": str(tmp_path / "broken.npz"), "embedding_size": 8, "classes": 4}
    with pytest.raises(retrieval.errors.DataError, match="not a file of teacher embeddings"):
        retrieval.create("loss", "core.distillation", **sizes)


def not_utf8(path):
    """Give a file or folder a name that is not UTF-8, and return its path."""
    return path.rename(path.with_name(os.fsdecode(b"caf\xe9") + path.suffix))


def test_photos_and_folders_whose_names_are_not_utf8(bundle, digits, tmp_path, cli, caplog):
    photos = shutil.copytree(digits, tmp_path / "photos")
    not_utf8(min((photos / "3").iterdir()))
    left_out = 1 + len(list(not_utf8(photos / "5").iterdir()))
    teacher = not_utf8(shutil.copytree(bundle.path, tmp_path / "teacher.bundle"))
    student = teacher.with_name(f"small-{teacher.name}")
    call = ["distill", teacher, photos, "--dimensions", "8", "--set", "train.epochs=1", *SMALL]
    done = cli(*call, "--labels", "--run", tmp_path / "work", "--output", student)
    assert done.code == 0, done.err
    assert f"the paths of {left_out} photos are not UTF-8; they are left out" in caplog.text
    run = retrieval.load(tmp_path / "work" / "run")
    assert len(run.dataset) == 300 - left_out and "5" not in run.splits.classes
    assert retrieval.load(student).encode(digits / "0", progress=False).shape[1] == 8

    elsewhere = ["--output", tmp_path / "none.bundle"]
    wrong = cli(*call, *elsewhere, "--run", teacher.with_name(f"work-{teacher.name}"))
    assert wrong.code == 2 and "not valid Unicode" in wrong.err
    call[2] = not_utf8(photos)
    empty = cli(*call, *elsewhere, "--run", tmp_path / "none")
    assert empty.code == 2 and "holds 0 photos, which are too few" in empty.err
    assert "the paths of 300 photos are not UTF-8" in caplog.text
    assert not list(tmp_path.glob("none*")) and not list(tmp_path.glob("work-*"))
