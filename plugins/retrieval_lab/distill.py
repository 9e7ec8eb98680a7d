"""Train a small model, the student, to embed photos as a large teacher does, and export it."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from retrieval.base.arrays import Ints, unit_rows
from retrieval.base.csv_table import csv_text
from retrieval.base.files import make_folder, whole_file, write_json, write_text
from retrieval.base.folder_kinds import StrPath, kind_of
from retrieval.bundle.addresses import bundle_folder
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.encoder import BundleEncoder, Embeddings, Encoder
from retrieval.data.cache import files_identity
from retrieval.data.unreadable_images import skip_unreadable
from retrieval.errors import DataError, valid_text
from retrieval.export.export_backbone import BackboneEncoder
from retrieval.export.export_model import refuse_existing
from retrieval.export.export_run import export
from retrieval.images.image_files import find_images
from retrieval.recipe.read import read_recipe
from retrieval.run.folder import is_run
from retrieval.training.train import Run
from retrieval.training.trainer import train_run

log = logging.getLogger(__name__)

_EPOCHS = 20
_HELD_OUT = 0.05
_MAX_HELD_OUT = 1000
"""Share and largest number of the photos that are held out to measure the agreement."""
_FEWEST_PHOTOS = 128
_TIMED = 64
"""Number of photos that the teacher embeds to measure its speed."""
_BLOCK = 4096
"""Number of photos that the teacher embeds between two saves."""
_NEIGHBOURS = 10
_STUDENT = {"core.convnet": {"size": 64, "channels": 3, "width": 32, "depth": 4, "pool": "grid"}}
"""Parameters of a backbone whose defaults are too small for a student."""


@dataclass(frozen=True)
class Student:
    """The model to train.

    Attributes:
        backbone: the name of its backbone.
        dimensions: dimension of its embeddings; the teacher's dimension if that is less.
        labels: whether it also learns from labels, which are the names of the photos' folders.
        overrides: changes to its recipe, such as `"backbone.size=96"`.
        plugins: further plugin files or modules.
    """

    backbone: str
    dimensions: int
    labels: bool
    overrides: Sequence[str]
    plugins: Sequence[str]


@dataclass(frozen=True)
class Distillation:
    """A student and its agreement with the teacher on held-out photos.

    Attributes:
        bundle: the student's bundle.
        run: the student's run.
        trained: number of photos that the student was trained on.
        held_out: number of held-out photos, on which the following values were measured.
        cosine: mean cosine between the student's embeddings and the teacher's reduced embeddings.
        neighbours: mean share of a photo's ten nearest photos by the teacher's embeddings that are
            also among its ten nearest by the student's.
        images_per_second: photos per second that the student and the teacher embed.
    """

    bundle: Path
    run: Path
    trained: int
    held_out: int
    cosine: float
    neighbours: float
    images_per_second: tuple[float, float]

    def __str__(self) -> str:
        student, teacher = self.images_per_second
        return (
            f"{self.bundle}: trained on {self.trained:,} photos. On {self.held_out:,} others the"
            f" mean cosine to the teacher's embeddings is {self.cosine:.3f}, and the student finds"
            f" {self.neighbours:.0%} of the teacher's {_NEIGHBOURS} nearest photos. The student"
            f" embeds {student:,.0f} photos a second, the teacher {teacher:,.0f}."
        )


def distill(
    teacher: StrPath,
    photos: Path,
    output: Path,
    student: Student,
    *,
    run: Path,
    resume: bool,
    replace: bool,
    report: Callable[[str], None],
) -> Distillation:
    """Train a student on photos that the teacher has embedded, and write its bundle.

    A projection reduces the teacher's embeddings to the student's dimension and changes their inner
    products as little as possible. The student learns these embeddings and their relations
    (`core.distillation`), so it needs no labels. 5 % of the photos, at most 1,000, are held out to
    measure the agreement.

    Args:
        teacher: the large model: a bundle, a run, or the name of a backbone.
        photos: a folder of photos; photos that cannot be read are skipped and logged.
        output: folder of the student's bundle.
        student: the model to train.
        run: working folder for `photos.csv`, the teacher's embeddings and the training run.
        resume: whether to continue in `run` and reuse the teacher's embeddings in it.
        replace: whether to replace an existing run and bundle.
        report: called with one line per epoch.

    Raises:
        DataError: there are too few photos, or `run` belongs to other photos or another teacher.
        RecipeError: an override does not fit the recipe.
        BundleError: `output` exists, or torch and ONNX Runtime disagree.
    """
    refuse_existing(output, replace)
    encoder = _encoder(teacher, student.plugins)
    files, classes = _photos(photos, student.labels)
    if isinstance(encoder, BundleEncoder):
        name = encoder.bundle.sha256
    else:
        name = repr(encoder)
    training, held_out = _divided(len(files))
    width = min(student.dimensions, encoder.encode(files[0], progress=False).shape[1])
    # an override may be wrong, so check the recipe before the teacher works for hours
    recipe = read_recipe(
        _recipe(run, student, width, len(training)), student.overrides, student.plugins
    )
    plan = {"photos": files_identity(files), "teacher": name}
    _begin(run, plan, resume=resume, replace=replace)
    vectors = _embeddings(run / "embeddings", encoder, files)
    # fitted on the training photos alone, so that the agreement on the others is honest
    reduced = unit_rows(vectors @ _basis(vectors[training], width))
    ids = np.unique(classes, return_inverse=True)[1].astype(np.int64)
    with whole_file(run / "teacher.npz", DataError) as path, path.open("wb") as file:
        np.savez(file, vectors=reduced[training], classes=ids[training])
    sides = np.full(len(files), "train")
    sides[held_out] = "test"
    if len(np.unique(ids[held_out])) in (1, len(held_out)):
        # Evaluation needs a pair of a class, and another class.
        classes = _no_classes(len(files))
    rows = zip(map(str, files), classes, sides.tolist(), strict=True)
    table = csv_text([("path", "label", "split"), *rows])
    write_text(run / "photos.csv", table, DataError)
    folder = run / "run"
    trained = train_run(folder, recipe, resume=resume and is_run(folder), report=report)
    bundle = export(trained, output, replace=replace)
    test_files = [files[i] for i in held_out]
    student_vectors, student_speed = _timed(bundle, test_files)
    _, teacher_speed = _timed(encoder, test_files[:_TIMED])
    student_vectors = unit_rows(student_vectors)
    return Distillation(
        bundle=output,
        run=folder,
        trained=len(training),
        held_out=len(held_out),
        cosine=float((student_vectors * reduced[held_out]).sum(1).mean()),
        neighbours=_overlap(student_vectors, unit_rows(vectors[held_out])),
        images_per_second=(student_speed, teacher_speed),
    )


def _encoder(teacher: StrPath, plugins: Sequence[str]) -> Encoder:
    kind = kind_of(bundle_folder(teacher))
    if kind == "bundle":
        return BundleEncoder(Bundle.open(teacher))
    if kind == "run":
        encoder: Encoder = Run.open(teacher)
        return encoder
    return BackboneEncoder(str(teacher), {}, plugins)


def _photos(folder: Path, labels: bool) -> tuple[list[Path], list[str]]:
    """Return the readable photos of a folder, and their classes.

    With `labels`, a photo's class is the name of its folder; otherwise the classes mean nothing.
    """
    images = [file.absolute() for file in find_images(folder).images]
    # photos.csv is UTF-8, which other names do not survive
    texts = [file for file in images if valid_text(str(file)) == str(file)]
    if skipped := len(images) - len(texts):
        log.warning("%s: the paths of %d photos are not UTF-8; they are left out.", folder, skipped)
    files = [texts[i] for i in skip_unreadable(texts, str(folder))[0]]
    if len(files) < _FEWEST_PHOTOS:
        raise DataError(
            f"{folder} holds {len(files):,} photos, which are too few to learn a model's"
            f" embeddings. Name a folder with at least {_FEWEST_PHOTOS} photos, better with"
            " thousands; they need no labels."
        )
    if labels:
        classes = [file.parent.name for file in files]
    else:
        classes = _no_classes(len(files))
    return files, classes


def _no_classes(count: int) -> list[str]:
    """Return two classes, which the split needs; the loss reads its classes elsewhere."""
    return [f"{i % 2}" for i in range(count)]


def _divided(count: int) -> tuple[Ints, Ints]:
    """Return the indices of the training photos and of the held-out photos, in ascending order."""
    order = np.random.default_rng(0).permutation(count)
    held_out = min(_MAX_HELD_OUT, max(_NEIGHBOURS + 2, round(_HELD_OUT * count)))
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def _begin(work: Path, plan: Mapping[str, str], *, resume: bool, replace: bool) -> None:
    """Create the working folder, or check that it belongs to the same photos and teacher.

    Raises:
        DataError: the folder exists, belongs to something else, or cannot be written.
    """
    file = work / "distill.json"
    begun = None
    with suppress(OSError, ValueError):
        begun = json.loads(file.read_text(encoding="utf-8"))
    if work.exists() and not resume:
        if not replace:
            raise DataError(
                f"{work} exists already. Continue it with --resume, start over with --replace, or"
                " name another folder (--run)."
            )
        if begun is None:
            raise DataError(f"{work} was not written by distillation. Name another folder (--run).")
        aside = work.with_name(f".{work.name}.old")
        shutil.rmtree(aside, ignore_errors=True)
        work.rename(aside)  # so that a folder that is half deleted is never resumed
        shutil.rmtree(aside)
    elif begun is not None and begun != plan:
        changed = " and ".join(name for name in plan if begun.get(name) != plan[name])
        raise DataError(
            f"{work} was started with different {changed}. Start over with --replace, or name"
            " another folder (--run)."
        )
    make_folder(work / "embeddings")
    write_json(file, plan, DataError)


def _embeddings(folder: Path, teacher: Encoder, files: Sequence[Path]) -> Embeddings:
    """Return the teacher's embeddings (N, D); blocks in `folder` are reused."""
    blocks = []
    for start in range(0, len(files), _BLOCK):
        block = folder / f"{start:09}.npy"
        if not block.is_file():
            vectors = teacher.encode(list(files[start : start + _BLOCK]))
            with whole_file(block, DataError) as temporary, temporary.open("wb") as file:
                np.save(file, vectors)
        blocks.append(np.load(block, allow_pickle=False))
    return np.concatenate(blocks)


def _basis(vectors: Embeddings, dimensions: int) -> Embeddings:
    """Return the projection (D, `dimensions`) that changes inner products least.

    Its columns are the leading eigenvectors of the second-moment matrix (Eckart & Young, 1936).
    """
    _, directions = np.linalg.eigh(vectors.T.astype(np.float64) @ vectors)
    basis: Embeddings = directions[:, ::-1][:, :dimensions].astype(np.float32)
    return basis


def _recipe(work: Path, student: Student, dimensions: int, photos: int) -> Mapping[str, Any]:
    loss: dict[str, Any] = {"name": "core.distillation", "teacher": str(work / "teacher.npz")}
    if student.labels:
        loss["loss"] = "pml.multi_similarity"
    return {
        "name": work.name,
        "data": {"name": "core.csv", "manifest": str(work / "photos.csv")},
        "split": {"validation": 0.0},
        "backbone": {"name": student.backbone, **_STUDENT.get(student.backbone, {})},
        "head": {"embedding_size": dimensions},
        # both views of a photo have the same target, the teacher's embedding of the whole photo
        "augmentation": {"crop_scale": [0.7, 1.0], "views": 2, "positives": "item"},
        "sampler": {"classes": min(64, photos), "items": 1},
        "loss": loss,
        "optimizer": {"lr": 2e-3},
        "schedule": {"name": "cosine", "warmup": 0.05},
        "train": {"epochs": _EPOCHS},
    }


def _timed(encoder: Encoder, files: Sequence[Path]) -> tuple[Embeddings, float]:
    """Return the embeddings of photos, and the number of photos per second."""
    # the first call starts threads
    encoder.encode(list(files[:2]), progress=False)
    began = time.perf_counter()
    vectors = encoder.encode(list(files), progress=False)
    return vectors, len(files) / (time.perf_counter() - began)


def _overlap(student: Embeddings, teacher: Embeddings) -> float:
    """Return the mean share of the teacher's nearest neighbours that the student finds too."""

    def nearest(vectors: Embeddings) -> Ints:
        similarities = vectors @ vectors.T
        np.fill_diagonal(similarities, -np.inf)
        return np.argsort(-similarities, axis=1)[:, :_NEIGHBOURS]

    shared = nearest(student)[:, :, None] == nearest(teacher)[:, None, :]
    return float(shared.any(2).mean())
