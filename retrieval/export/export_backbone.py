"""Use a pretrained backbone as an encoder, and export it, without training or labels."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from retrieval.base.arrays import Floats, Floats32, Pixels
from retrieval.base.files import cache_folder
from retrieval.base.folder_kinds import StrPath
from retrieval.base.machine import ahead, cores
from retrieval.base.photo_files import address_of, exists, is_folder
from retrieval.base.progress import Meter, Progress, shows_progress
from retrieval.bundle.bundle import Bundle
from retrieval.bundle.encoder import BundleEncoder, Embeddings, Encoder
from retrieval.bundle.manifest import FILE as MANIFEST
from retrieval.data.encode import encode_images, evaluating
from retrieval.data.stored_inputs import ITEMS
from retrieval.errors import BundleError, DataError
from retrieval.export.export_model import (
    ExportOptions,
    export_model,
    library_versions,
    refuse_existing,
)
from retrieval.host.factory import calling
from retrieval.host.plugins import load_plugins
from retrieval.images.decoding import decode
from retrieval.images.image_files import find_images
from retrieval.images.preprocessing import Preprocessing, from_array
from retrieval.model.model import Model, Normalise, check_width, linear_head
from retrieval.run.encoders import named_backbone

log = logging.getLogger(__name__)


_CROPS = 64
_COMPARED = 8
"""Number of photos on which a bundle from the cache is compared with torch."""


def _real_path(file: Path) -> Path:
    if address_of(file):
        return file
    return Path(os.path.realpath(file))


class Photos:
    """The files of the user's photos, in an order that is random but the same on each call.

    Raises:
        DataError: a place does not exist, or the places hold no image.
    """

    def __init__(self, places: Sequence[StrPath]) -> None:
        files: list[Path] = []
        for path in map(Path, places):
            if not exists(path):
                raise DataError(f"{address_of(path) or path} does not exist.")
            if not is_folder(path):
                files.append(path)
                continue
            below = find_images(path)
            files += below.images
            if dangling := below.dangling(path):
                log.warning("%s", dangling)
        files = list(dict.fromkeys(_real_path(file) for file in files))
        if not files:
            raise DataError("There are no photos: name files or folders of them.")
        self.files = [files[i] for i in np.random.default_rng(0).permutation(len(files))]

    def batches(self, preprocessing: Preprocessing, most: int, size: int = 32) -> Iterator[Pixels]:
        """Yield the first `most` photos as uint8 (B, channels, H, W), decoded ahead in threads.

        Photos that cannot be read are skipped and logged. If none can be read, a `DataError` is
        raised.
        """
        faults: list[str] = []
        files = self.files[:most]

        def read(file: Path) -> Pixels | DataError:
            try:
                return preprocessing(decode(file))
            except DataError as fault:
                return fault

        batch: list[Pixels] = []
        with Meter("reading photos", len(files), "photos") as meter:
            for photo in ahead(read, files, workers=cores(), most=2 * size):
                meter.update()
                if isinstance(photo, DataError):
                    faults.append(str(photo))
                    continue
                batch.append(photo)
                if len(batch) == size:
                    yield np.stack(batch)
                    batch = []
        if batch:
            yield np.stack(batch)
        if len(faults) == len(files):
            raise DataError(f"None of the {len(faults):,} photos can be read. {faults[0]}")
        if faults:
            note = "%d of %d photos cannot be read and are skipped. The first: %s"
            log.warning(note, len(faults), len(files), faults[0])


def example_photos(preprocessing: Preprocessing, count: int = _CROPS) -> Pixels:
    """Return crops of scikit-learn's two photographs, uint8 (count, channels, H, W).

    They verify a bundle if the user names no photos.
    """
    from sklearn.datasets import load_sample_images

    images = load_sample_images().images
    # a fixed seed, so that each export, and each check of a bundle in the cache, has the same crops
    rng = np.random.default_rng(0)
    crops = []
    for number in range(count):
        image = images[number % len(images)]
        height, width = image.shape[:2]
        side = int(rng.integers(height // 4, height))
        y = rng.integers(0, height - side)
        x = rng.integers(0, width - side)
        crop = np.ascontiguousarray(image[y : y + side, x : x + side])
        crops.append(preprocessing(from_array(crop)))
    return np.stack(crops)


DIMENSIONS = 128
"""Default dimension of whitened vectors."""

_FEATURE_BYTES = 1 << 28
"""Largest size of the float32 features that whitening is fitted on."""
_NOISE_SHARE = 1e-9
"""A direction whose variance is below this share of the largest is float32 noise."""
_SMALL = 1e-6
"""Share of the largest variance that is added to each variance.

No direction is therefore scaled more than 1,000 times as much as the first.
"""


def whitening_head(features: Floats, dimensions: int | None = None) -> nn.Sequential:
    """Return a module that whitens features (B, F) to unit vectors (B, C).

    x ↦ u / ‖u‖, u = D^(−1/2) Vᵀ (x − mean).

    V holds the C directions of largest variance, and D their variances plus a millionth of the
    largest. Jégou & Chum, "Negative Evidences and Co-occurrences in Image Retrieval: the Benefit of
    PCA and Whitening" (ECCV 2012).

    Args:
        features: (N, F), the features to fit.
        dimensions: C, by default the smaller of 128 and F.

    Raises:
        DataError: C is out of range, the features have no more than C rows, or they vary in fewer
            than C directions.
    """
    from sklearn.decomposition import PCA

    photos, width = features.shape
    if dimensions is None:
        outputs = min(DIMENSIONS, width)
    else:
        outputs = dimensions
    if not 1 <= outputs <= width:
        raise DataError(
            f"{outputs:,} dimensions are not available: the backbone has {width:,} features. Choose"
            f" 1 to {width:,}."
        )
    if photos <= outputs:
        raise DataError(
            f"{photos:,} photos are too few to whiten {outputs:,} dimensions: whitening needs more"
            " photos than dimensions. Name more photos, or choose fewer dimensions."
        )
    # The covariance of more photos than features is several times faster to decompose.
    pca = PCA(svd_solver="covariance_eigh" if photos > width else "full")
    with np.errstate(invalid="ignore"):  # no variance at all
        variance = pca.fit(features.astype(np.float64)).explained_variance_
    # Rounding to float32 can make equal features of this size differ by `noise`.
    noise = float(np.finfo(np.float32).eps * np.abs(features).max())
    varied = int((variance > max(_NOISE_SHARE * variance[0], noise**2)).sum())
    if varied < outputs:
        raise DataError(
            f"The features of the {photos:,} photos vary in only {varied:,} directions, fewer than"
            f" the {outputs:,} dimensions. Name more photos that differ, or choose fewer"
            " dimensions."
        )
    scale = np.sqrt(variance[:outputs] + _SMALL * variance[0])
    components = pca.components_[:outputs] / scale[:, None]
    return nn.Sequential(*linear_head(components, pca.mean_), Normalise())


Places = StrPath | Sequence[StrPath]

MAX_PHOTOS = 20_000
"""Largest number of photos that whitening is fitted on."""


class BackboneEncoder(Encoder):
    """A pretrained backbone whose features are the embeddings.

    Args:
        name: the backbone's name, as `PLUGIN.name`.
        parameters: the backbone's parameters.
        plugins: further plugin files or modules.
        random_weights: allow a backbone with random weights, for use as a baseline.

    Raises:
        PluginError: the backbone does not exist.
        RecipeError: the parameters do not fit the backbone.
        BundleError: the backbone takes vectors, or its weights are random.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, Any] | None = None,
        plugins: Sequence[str] = (),
        random_weights: bool = False,
    ) -> None:
        self.name = name
        self._parameters = dict(parameters or {})
        backbone = named_backbone(load_plugins(plugins), name, parameters or {}, random_weights)
        self.model = Model(backbone, nn.Identity())

    def __repr__(self) -> str:
        assert self.model.preprocessing is not None
        shape = " × ".join(map(str, self.model.preprocessing.shape))
        width = self.model.backbone.features
        return f"Encoder {self.name}: images of {shape} to vectors of {width}, Euclidean distance"

    def encode(self, images: Any, *, batch_size: int = 32, progress: Progress = True) -> Embeddings:
        """Return the embeddings (N, D) of N images; see `Encoder.encode`."""
        return encode_images(self.model, images, batch_size, progress)

    @shows_progress
    def export(
        self,
        output: StrPath,
        *,
        whiten: Places = (),
        dimensions: int | None = None,
        photos: Places = (),
        progress: Progress = True,
        **options: Unpack[ExportOptions],
    ) -> BundleEncoder:
        """Write the bundle of the backbone, with optional whitening, and open it.

        torch and ONNX Runtime are compared on up to 512 photos or, without photos, on crops of the
        two photographs in scikit-learn. Photos that cannot be read are skipped and logged.

        Args:
            output: the folder to create.
            whiten: files and folders of photos to fit PCA whitening on. Without them the vectors
                are the features.
            dimensions: dimension of whitened vectors, by default 128 or the backbone's number of
                features if that is smaller.
            photos: files and folders of photos that verify the bundle, by default those of
                `whiten`. With the int8 variant, half of them calibrate that variant, and only the
                other half verify the bundle.
            progress, options: see `Run.export`, whose variants, split, allow_drift, tolerance and
                replace these are.

        Returns:
            The encoder of the bundle, on the CPU.

        Raises:
            DataError: photos are missing, cannot be read, are too few for the dimensions, or are
                all alike.
            BundleError: the arguments do not fit together, or `export_model` raises it.
        """
        # before the photos are read, which may take minutes
        refuse_existing(Path(output), options.get("replace", False))
        quantised = "int8" in options.get("variants", ())
        photos_to_fit = _photos(whiten)
        photos_to_check = _photos(photos) or photos_to_fit
        if dimensions is not None and photos_to_fit is None:
            raise BundleError(
                "Dimensions apply only to whitened vectors: name photos for the whitening too."
            )
        if quantised and photos_to_check is None:
            raise BundleError(
                "The int8 variant is calibrated on photos: name some with photos or whiten."
            )
        built = Model(self.model.backbone, nn.Identity())
        if photos_to_fit is not None:
            built.head = _whitening(built, photos_to_fit, dimensions)
        items, calibration = _items(built, photos_to_check, quantised)
        export_model(built, items, Path(output), name=self.name, calibration=calibration, **options)
        return BundleEncoder(Bundle.open(output, device="cpu"))

    @contextmanager
    def exported(self) -> Iterator[Path]:
        """Context manager that yields the folder of the bundle in the cache; see `kept`."""
        yield self.kept(progress=False)

    def kept(self, photos: Places = (), *, progress: Progress = True) -> Path:
        """Return the folder of the backbone's bundle in the cache, which is exported if need be.

        The bundle of an earlier call is used if its checksums match, the same versions of the
        libraries wrote it, and it agrees with torch on a few photos.

        Args:
            photos, progress: see `export`.
        """
        settings = json.dumps(self._parameters, sort_keys=True, default=repr)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:16]
        folder = cache_folder() / "backbones" / f"{self.name}.{digest}"
        if not self._is_kept(folder):
            if not (folder / MANIFEST).is_file():  # `export` replaces nothing but bundles
                shutil.rmtree(folder, ignore_errors=True)
            self.export(folder, photos=photos, replace=True, progress=progress)
        return folder

    def _is_kept(self, folder: Path) -> bool:
        """Return whether a folder holds this backbone's bundle, unaltered and up to date."""
        model = self.model
        assert model.preprocessing is not None
        try:
            bundle = Bundle.open(folder, device="cpu")
        except BundleError:
            return False
        manifest = bundle.manifest
        if manifest.versions != library_versions():
            return False
        if manifest.input.preprocessing != model.preprocessing:
            return False
        pixels = example_photos(model.preprocessing, _COMPARED)
        with evaluating(model):
            expected = model.features(torch.from_numpy(pixels)).float().numpy()
        scale = float(np.linalg.norm(expected, axis=1).mean()) or 1.0
        gap = np.abs(bundle.encode(pixels).vector - expected).max() / scale
        return bool(gap <= manifest.verified.tolerance)


def _photos(places: Places) -> Photos | None:
    """Return the photos in `places`, or `None` if there are no places."""
    if isinstance(places, str | os.PathLike):
        listed = [places]
    else:
        listed = list(places)
    if listed:
        return Photos(listed)
    return None


def _whitening(model: Model, photos: Photos, dimensions: int | None) -> nn.Module:
    """Return a head that whitens the backbone's features, fitted on the features of photos."""
    assert model.preprocessing is not None
    subject = f"The backbone {type(model.backbone).__name__}"
    width = model.backbone.features
    most = max(1, min(MAX_PHOTOS, _FEATURE_BYTES // (4 * width)))
    parts: list[Tensor] = []
    with evaluating(model):
        for batch in photos.batches(model.preprocessing, most):
            with calling(subject):
                parts.append(model.features(torch.from_numpy(batch)).float())
    features: Floats32 = torch.cat(parts).numpy()
    check_width(features, subject, width)
    if not np.isfinite(features).all():
        raise DataError(f"{subject} gives NaN or infinite features for these photos.")
    return whitening_head(features, dimensions)


def _items(model: Model, photos: Photos | None, calibrated: bool) -> tuple[Pixels, Pixels | None]:
    """Return the photos that verify the bundle, and the other photos that calibrate int8."""
    assert model.preprocessing is not None
    if photos is None:
        return example_photos(model.preprocessing), None
    pixels = np.concatenate(list(photos.batches(model.preprocessing, (1 + calibrated) * ITEMS)))
    if not calibrated:
        return pixels, None
    if len(pixels) < 2:
        raise BundleError(
            "The int8 variant needs at least 2 photos: one to calibrate it, one to measure it."
        )
    return pixels[::2], pixels[1::2]
