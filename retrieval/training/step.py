"""One batch: the loss on real or synthetic samples, and the generator's own objective.

The metric (backbone, head, combiner, loss) and the generator are two sides with an optimiser each. With
`coupling = "separate"` each side's objective reaches its own parameters only, wherever else its gradient passes: the
loss trains the backbone through the synthetic samples too, with the generator's weights held, and the generator's
objective passes through the metric as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from retrieval.errors import DataError
from retrieval.host.plugin_calls import calling
from retrieval.model.contracts import TripletIndices, count_indices
from retrieval.model.guard import checked_indices, checked_objective, checked_rows, checked_scalar
from retrieval.model.model import Model
from retrieval.recipe.tables import Phase, Recipe, Trainable
from retrieval.run.build import Objective
from retrieval.training.synthetic import choose_triplets, extend, mine


@dataclass
class Losses:
    """What one batch gives: a scalar for each side that trains, and figures for the log."""

    metric: Tensor | None
    generator: Tensor | None
    figures: dict[str, Tensor | int] = field(default_factory=dict)


class Step:
    """Computes a batch's losses.

    Args:
        model: the model being trained.
        objective: its loss, miner and generator.
        recipe: weights and coupling.
        accelerator: Hugging Face Accelerate's, for autocast and for batches shared by several processes.
        from_features: whether inputs are a frozen backbone's features.
    """

    def __init__(
        self, model: Model, objective: Objective, recipe: Recipe, accelerator: Any, from_features: bool
    ) -> None:
        self.model = model
        self.objective = objective
        self.loss_weight = recipe.train.loss_weight
        self.real_weight = recipe.train.real_weight
        self.joint = recipe.train.coupling == "joint"
        self.mines_after = recipe.train.mine == "after"
        self.accelerator = accelerator
        self.from_features = from_features
        self.loss, self.miner, self.generator, self.combiner = (
            f"The {part} {(getattr(recipe, part) or {}).get('name')}"
            for part in ("loss", "miner", "generator", "combiner")
        )
        self.backbone = f"The backbone {recipe.backbone['name']}"

    def __call__(self, inputs: Tensor, labels: Tensor, phase: Phase) -> Losses:
        """Return the losses of one batch.

        Args:
            inputs: this process's share of the batch.
            labels: likewise, int64.
            phase: what trains now.
        """
        features, codes = self._codes(inputs)
        # losses take differences of near-equal numbers: always in float32 (a no-op without mixed precision)
        features, codes = self._share(features.float()), self._share(codes.float())
        labels = self._share(labels)
        mines = self.objective.miner is not None
        indices: TripletIndices | None = self._mine(codes, labels) if mines else None
        losses = Losses(None, None)
        if mines:
            losses.figures["mined"] = count_indices(indices)
        own: Tensor | None = None
        if self.model.combiner is not None:
            with calling(self.combiner):
                given = self.model.combiner.objective(codes, labels, indices)
            own, figures = checked_objective(given, self.combiner, codes)
            losses.figures.update(figures)
        self._sides(losses, features, codes, labels, indices, phase)
        if losses.metric is not None:
            losses.metric = self.loss_weight * losses.metric
        if own is not None and losses.metric is not None and "combiner" in phase.train:
            losses.figures["combiner_loss"] = own.detach()
            losses.metric = losses.metric + own
        return losses

    def _sides(
        self,
        losses: Losses,
        features: Tensor,
        codes: Tensor,
        labels: Tensor,
        indices: TripletIndices | None,
        phase: Phase,
    ) -> None:
        """Fill in the loss, on real or synthetic negatives, and the generator's objective."""
        generator = self.objective.generator
        trains_metric = any(part != "generator" for part in phase.train)
        if generator is None or not (phase.synthetic or "generator" in phase.train):
            losses.metric = self._loss(codes, labels, indices)
            return

        miner, after = self.objective.miner, self.mines_after
        a, p, n = choose_triplets(None if after else indices, labels)
        losses.figures["triplets"] = int(a.numel())
        real_weight = self.real_weight if phase.synthetic else 1.0
        if a.numel() == 0:  # a batch without triplets trains no synthetic sample, but every graph must exist
            if trains_metric:
                losses.metric = codes.sum() * 0.0
                if real_weight:
                    losses.metric = losses.metric + real_weight * self._loss(codes, labels, indices)
            return
        fa, fp, fn = (features[i] for i in (a, p, n))
        with calling(self.generator):
            synthetic = generator(fa, fp, fn)
        checked_rows(
            synthetic, self.generator, (len(fn), fn.shape[1]), fn.device, "a synthetic feature a triplet"
        )
        if not torch.isfinite(synthetic).all():
            raise DataError(f"the generator's output became NaN or infinite ({self.generator[4:]})")
        replaced = fn if generator.replaces == "negative" else fp
        losses.figures["synthetic_shift"] = (synthetic - replaced).detach().norm(dim=1).mean()
        if trains_metric and not phase.synthetic:
            losses.metric = self._loss(codes, labels, indices)
        elif trains_metric:
            made = self.model.head(synthetic).float()
            extended = extend(codes, labels, made, (a, p, n), generator.replaces)
            chosen: TripletIndices = extended.triplets
            if after and miner is not None:
                chosen = mine(self._mine, codes, labels, extended)
                losses.figures["mined"] = count_indices(chosen)
            metric = self._loss(codes, labels, chosen, ref_emb=extended.codes, ref_labels=extended.labels)
            if real_weight:
                metric = metric + real_weight * self._loss(codes, labels, indices)
            losses.metric = metric
        if "generator" in phase.train and any(True for _ in generator.parameters()):
            with calling(self.generator):
                given = generator.objective(fa, fp, fn, synthetic, self.model.feature_distance)
            losses.generator = checked_scalar(given, f"{self.generator}'s objective", synthetic, generator)

    def backward(
        self, losses: Losses, parts: Mapping[Trainable, Sequence[Parameter]], clip_norm: float | None
    ) -> None:
        """Give every parameter its gradient: each side's comes from its own objective; `joint` adds them up.

        Args:
            losses: what a batch gave.
            parts: the parameters by part.
            clip_norm: largest norm of each side's gradient; None: no clipping.
        """
        metric, generator = losses.metric, losses.generator
        own = [p for p in parts["generator"] if p.requires_grad]
        rest = [p for name, group in parts.items() if name != "generator" for p in group if p.requires_grad]
        if self.joint and metric is not None and generator is not None:
            metric, generator = metric + generator, None
            rest += own
        if generator is not None:
            keep = metric is not None and metric.requires_grad
            with calling(f"The gradient of {self.generator[4:]}"):
                gradients = torch.autograd.grad(generator, own, retain_graph=keep, allow_unused=True)
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient
        if metric is not None and metric.requires_grad:
            with calling(f"The gradient of {self.loss[4:]}"):
                self.accelerator.backward(metric, inputs=rest)
        metric_side = [
            p for name, group in parts.items() if name != "generator" for p in group if p.grad is not None
        ]
        generator_side = [p for p in own if p.grad is not None]
        if self.accelerator.num_processes > 1:
            for parameter in metric_side + generator_side:
                parameter.grad = self.accelerator.reduce(parameter.grad, reduction="mean")
        if clip_norm:
            self.accelerator.clip_grad_norm_(metric_side, clip_norm)
            nn.utils.clip_grad_norm_(generator_side, clip_norm)

    def real_loss(self, codes: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of codes (B, C) and labels (B,), with the miner's pairs and without a generator."""
        return self._loss(
            codes, labels, self._mine(codes, labels) if self.objective.miner is not None else None
        )

    def _codes(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (B, F), as wide as the backbone says, and codes (B, C)."""
        model, size = self.model, len(inputs)
        with self.accelerator.autocast():
            with calling(self.backbone):
                features = inputs.float() if self.from_features else model.features(inputs)
            like = (size, model.backbone.features)
            checked_rows(features, self.backbone, like, inputs.device, "features, as wide as it says")
            with calling("The head"):
                codes = model.head(features)
        return features, checked_rows(codes, "The head", (size, -1), inputs.device, "codes")

    def _mine(self, codes: Tensor, labels: Tensor, **reference: Tensor) -> TripletIndices:
        """Return what the miner picks, in the batch or against a reference set (`ref_emb`, `ref_labels`)."""
        assert self.objective.miner is not None
        with calling(self.miner):
            found = self.objective.miner(codes, labels, **reference)
        others = reference.get("ref_emb", codes)
        return checked_indices(found, self.miner, (len(codes), len(others)), codes.device)

    def _loss(
        self, codes: Tensor, labels: Tensor, indices: TripletIndices | None, **reference: Tensor
    ) -> Tensor:
        """Return the loss; one without a miner's indices is called without them."""
        with calling(self.loss):
            picked = () if indices is None else (indices,)
            value = self.objective.loss(codes, labels, *picked, **reference)
        return checked_scalar(value, self.loss, codes, self.objective.loss)

    def _share(self, x: Tensor) -> Tensor:
        """All processes' rows, in the batch's order; gradients reach this process's own rows.

        Every process computes the same loss of the whole batch, and gradients are averaged over processes: so the
        own rows' gradient counts once for each process.
        """
        world = int(self.accelerator.num_processes)
        if world == 1:
            return x
        rows = list(self.accelerator.gather(x.detach()).chunk(world))
        if x.is_floating_point():
            rows[self.accelerator.process_index] = x.detach() + world * (x - x.detach())
        return torch.cat(rows)
