"""Generators of synthetic samples that are hard for the metric being learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from pydantic import NonNegativeFloat
from retrieval.plugin import Generator
from torch import Tensor, nn

PairDistance = Callable[[Tensor, Tensor], Tensor]
PRESETS: dict[str, tuple[float, float]] = {"default": (50.0, 50.0), "paper": (1.0, 50.0)}
"""λ₁ and λ₂ of a generator's objective, by name."""


class TripletGenerator(Generator):
    """Base class of generators of one synthetic sample x̃ per triplet, by a network 3F → F → F.

    Args:
        features: F, the number of features.
        preset: name of default values for λ₁ and λ₂.
        lambda_reg: λ₁, weight of keeping the synthetic sample near the original.
        lambda_adv: λ₂, weight of fooling the metric.
        margin: α, a squared distance.
        residual: whether to add the network's output to the sample that is changed.
        normalise: whether to scale the result to the length of that sample.
    """

    def __init__(
        self,
        features: int,
        preset: str,
        lambda_reg: float | None,
        lambda_adv: float | None,
        margin: float,
        residual: bool,
        normalise: bool,
    ) -> None:
        super().__init__()
        reg, adv = PRESETS[preset]
        self.lambda_reg = reg if lambda_reg is None else lambda_reg
        self.lambda_adv = adv if lambda_adv is None else lambda_adv
        for name, value in (("lambda_reg", self.lambda_reg), ("lambda_adv", self.lambda_adv)):
            if not 0 <= value < float("inf"):
                raise ValueError(
                    f"{name} is {value:g} and must be finite and at least 0: below 0 it would"
                    " reward what the term penalises"
                )
        if not abs(margin) < float("inf"):
            raise ValueError(f"margin is {margin:g} and must be a finite squared distance")
        self.margin = margin
        self.residual = residual
        self.normalise = normalise
        last = nn.Linear(features, features)
        # The output is 0 at the start.
        if residual:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        self.network = nn.Sequential(nn.Linear(3 * features, features), nn.ReLU(), last)

    def change(self, sample: Tensor, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return synthetic samples (T, F) that replace `sample` (T, F) in T triplets."""
        changed: Tensor = self.network(torch.cat([anchor, positive, negative], 1))
        if self.residual:
            changed = sample + changed
        if self.normalise:
            changed = nn.functional.normalize(changed) * sample.norm(dim=1, keepdim=True)
        return changed


class HardNegativeGenerator(TripletGenerator):
    """Turns easy negatives into hard ones that fool the metric.

    Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning", equations 5 and 6: x̃ = g(a, p, n)
    replaces the negative. The generator g is trained on the mean over triplets of

        ‖x̃ − a‖² + λ₁ ‖x̃ − n‖² + λ₂ [ D(x̃, a)² − D(p, a)² − α ]₊

    where D is the distance that the model learns (Euclidean or a combiner's), even if the loss uses
    another distance. With `form = "contrastive"`, for losses of pairs, the network sees the anchor
    instead of the positive, and the last term is [D(x̃, a)² − α]₊. The first two terms alone have
    their minimum at x̃ = (a + λ₁ n)/(1 + λ₁). With the paper's λ₁ = 1, this point is half-way
    between anchor and negative, where neither label is right. The network is 3F → F → F with a
    ReLU.

    Args:
        preset: values of λ₁ and λ₂, "default" (50, 50) or "paper" (1, 50).
        lambda_reg: λ₁, weight of keeping x̃ near the original negative; overrides the preset.
        lambda_adv: λ₂, weight of fooling the metric; overrides the preset.
        margin: α, a squared distance. Use the margin of the loss.
        form: "triplet", or "contrastive" for losses of pairs.
        residual: whether to add the network's output to the negative, so that training starts with
            real negatives.
        normalise: whether to scale x̃ to the length of its negative, which preserves unit length.
    """

    def __init__(
        self,
        features: int,
        preset: Literal["default", "paper"] = "default",
        lambda_reg: NonNegativeFloat | None = None,
        lambda_adv: NonNegativeFloat | None = None,
        margin: float = 1.0,
        form: Literal["triplet", "contrastive"] = "triplet",
        residual: bool = True,
        normalise: bool = True,
    ) -> None:
        super().__init__(features, preset, lambda_reg, lambda_adv, margin, residual, normalise)
        if form not in ("triplet", "contrastive"):
            raise ValueError(f'form is {form!r} and must be "triplet" or "contrastive"')
        self.form = form

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return synthetic negatives (T, F)."""
        return self.change(
            negative, anchor, anchor if self.form == "contrastive" else positive, negative
        )

    def objective(
        self,
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor,
        synthetic: Tensor,
        distance: PairDistance,
    ) -> Tensor:
        """Return J_gen = J_hard + λ₁ J_reg + λ₂ J_adv; see `retrieval.plugin.Generator`."""
        gap = distance(synthetic, anchor).square() - self.margin
        # Losses of pairs have no positive to compare with.
        if self.form == "triplet":
            gap = gap - distance(positive, anchor).square()
        hard = _squared(synthetic, anchor)
        reg = _squared(synthetic, negative)
        return hard + self.lambda_reg * reg + self.lambda_adv * gap.relu().mean()


class HardPositiveGenerator(TripletGenerator):
    """Turns easy positives into hard ones that fool the metric.

    Duan, Lu, Zheng & Zhou, "Deep Adversarial Metric Learning", equation 19: x̃ = g(a, p, n)
    replaces the positive. The generator g is trained on the mean over triplets of

        −‖x̃ − a‖² + λ₁ ‖x̃ − p‖² + λ₂ [ D(n, a)² − D(x̃, a)² − α ]₊

    The first two terms are bounded below only for λ₁ > 1 or for outputs of bounded length, so
    `normalise = false` with λ₁ ≤ 1 is an error. The paper finds little gain from hard positives
    (Table XIV).

    Args:
        preset: values of λ₁ and λ₂, "default" (50, 50) or "paper" (1, 50).
        lambda_reg: λ₁, weight of keeping x̃ near the original positive; overrides the preset.
        lambda_adv: λ₂, weight of fooling the metric; overrides the preset.
        margin: α, a squared distance. Use the margin of the loss.
        residual: whether to add the network's output to the positive, so that training starts with
            real positives.
        normalise: whether to scale x̃ to the length of its positive, which preserves unit length.
    """

    replaces: ClassVar[Literal["positive", "negative"]] = "positive"

    def __init__(
        self,
        features: int,
        preset: Literal["default", "paper"] = "default",
        lambda_reg: NonNegativeFloat | None = None,
        lambda_adv: NonNegativeFloat | None = None,
        margin: float = 1.0,
        residual: bool = True,
        normalise: bool = True,
    ) -> None:
        super().__init__(features, preset, lambda_reg, lambda_adv, margin, residual, normalise)
        # −‖x̃ − a‖² outweighs λ₁ ‖x̃ − p‖² far from both unless λ₁ > 1.
        if not normalise and self.lambda_reg <= 1:
            raise ValueError(
                f"lambda_reg is {self.lambda_reg:g}, and without normalise it must be above 1:"
                " otherwise the objective has no minimum, and the positives move away forever"
            )

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Return synthetic positives (T, F)."""
        return self.change(positive, anchor, positive, negative)

    def objective(
        self,
        anchor: Tensor,
        positive: Tensor,
        negative: Tensor,
        synthetic: Tensor,
        distance: PairDistance,
    ) -> Tensor:
        """Return J_gen = J_hard + λ₁ J_reg + λ₂ J_adv; see `retrieval.plugin.Generator`."""
        negative_distance = distance(negative, anchor)
        moved = distance(synthetic, anchor)
        gap = negative_distance.square() - moved.square() - self.margin
        hard = -_squared(synthetic, anchor)
        reg = _squared(synthetic, positive)
        return hard + self.lambda_reg * reg + self.lambda_adv * gap.relu().mean()


def _squared(x: Tensor, y: Tensor) -> Tensor:
    """Return the mean over rows of the squared Euclidean distance."""
    return (x - y).square().sum(1).mean()
