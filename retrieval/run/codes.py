"""The codes of a run's items, in bulk: what evaluation, verification and export ask for."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrieval.data.encode import encode, evaluating
from retrieval.data.features import backbone_features
from retrieval.data.kept import KeptInputs
from retrieval.model.contracts import Dataset
from retrieval.model.model import Model
from retrieval.run.open import Run


class ItemCodes:
    """Encodes items of a run by their numbers.

    With a frozen backbone or a learner it starts from the features, which are on disk since
    training.

    Args:
        run: a loaded run.
        device: where to encode.

    Attributes:
        source: where the items are: the backbone's features, or the run's dataset.
        from_features: which of the two.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device, self.batch = run, device, run.recipe.evaluate.batch
        computed_once = run.recipe.backbone.frozen or run.recipe.learner is not None
        # the few inputs that a run keeps are not the items whose features are on disk
        self.from_features = computed_once and not isinstance(run.dataset, KeptInputs)
        self.source: Dataset = run.dataset
        if self.from_features:
            self.source = backbone_features(run.model, run.dataset, device, self.batch)

    def __call__(self, indices: NDArray[np.int64], model: Model | None = None) -> Tensor:
        """Return codes (N, C), float32, on the CPU.

        Args:
            indices: which items (N,).
            model: by default the run's own; another one must have the same backbone where features
                are kept.
        """
        model = (model or self.run.model).to(self.device)
        if isinstance(self.source, KeptInputs):  # few, and already as the encoder takes them
            with evaluating(model):
                kept = torch.from_numpy(self.source.inputs[indices]).to(self.device)
                codes: Tensor = model(kept)[1].float().cpu()
            return codes
        return encode(
            model,
            self.source,
            indices,
            batch=self.batch,
            device=self.device,
            progress="encoding",
            from_features=self.from_features,
        )
