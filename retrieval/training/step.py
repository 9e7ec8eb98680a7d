"""One training step: the losses of real and synthetic samples, their gradients, the update, and
the schedules of its learning rates.

A generator makes synthetic samples from triplets of real samples. Training has two sides, the
metric (backbone, head, combiner and loss) and the generator. Each side has an optimiser and an
objective. With `coupling = "separate"`, an objective changes only its own side's parameters: the
gradient of the loss passes through synthetic samples to the backbone without changing the
generator, and the gradient of the generator's objective passes through the metric without changing
it.

Large batches in little memory (`[train] chunk`): a loss that compares pairs needs all embeddings of
a batch at once, but not the activations from which they were computed. Gao et al., "Scaling Deep
Contrastive Learning Batch Size under Memory Limited Setup" (RepL4NLP 2021), therefore embed each
chunk twice: first without a graph, to compute the gradient of the loss with respect to the
embeddings, then to propagate this gradient to the weights. Here, torch's activation checkpointing
embeds each chunk again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer as TorchOptimizer, lr_scheduler
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from retrieval.data.augment import Labels, MixedLabels
from retrieval.data.texts import TextLabels, codes_of
from retrieval.errors import DataError, RecipeError, RetrievalError
from retrieval.host.factory import calling
from retrieval.model.contracts import TripletIndices
from retrieval.model.loss import (
    checked_indices,
    checked_objective,
    checked_scalar,
    count_indices,
    reads_at_once,
)
from retrieval.model.loss_division import Rows, compares_with_classes, rows_of_loss, shards_of
from retrieval.model.model import Model, checked_rows
from retrieval.recipe.read import Recipe
from retrieval.recipe.rules import SHAPES
from retrieval.recipe.tables import Phase, Schedule, Trainable
from retrieval.run.build import Objective, loss_sizes
from retrieval.training.build_optimizers import Groups, build_optimizers, names_of, parts_of
from retrieval.training.distributed import Devices, WholeBatch, divided_loss
from retrieval.training.process import Monitor
from retrieval.training.synthetic import (
    Metrics,
    Synthetic,
    choose_triplets,
    classmates_of,
    extend,
    mine,
)

OWN_STATISTICS = (
    "[train] chunk: batch norm computes its mean and variance over each chunk of {chunk} rows, so"
    " the result differs from training on the whole batch. Layer norm, group norm and frozen batch"
    " norm are not affected."
)
"""Warning about a run that trains batch norm in chunks."""


@dataclass(frozen=True)
class Batch:
    """A batch of B items after its forward pass, with the rows of all processes.

    Attributes:
        features: (B, F), the backbone's outputs; only this process's rows if the recipe has no
            generator.
        codes: (B, C), the head's outputs.
        labels: (B,).
        indices: the pairs or triplets that the miner picked; `None` without a miner.
        combiner_loss: the combiner's own objective, if it has one and trains.
        metrics: metrics for the log.
    """

    features: Tensor
    codes: Tensor
    labels: Tensor
    indices: TripletIndices | None
    combiner_loss: Tensor | None
    metrics: Metrics


@dataclass(frozen=True)
class Losses:
    """The losses of both sides on one batch, and metrics for the log.

    Attributes:
        metric: the loss of the metric side, if it trains.
        generator: the generator's objective, if it trains.
        metrics: metrics for the log.
        watched: numbers that must be finite, each with an error message in which `{}` stands for
            the number.
    """

    metric: Tensor | None
    generator: Tensor | None
    metrics: Metrics
    watched: Sequence[tuple[Tensor, str]] = ()

    def all_metrics(self) -> dict[str, Tensor | int]:
        """Return the metrics, "loss" and "generator_loss"; does not wait for the device."""
        metrics = {**self.metrics}
        for name, loss in (("loss", self.metric), ("generator_loss", self.generator)):
            if loss is not None:
                metrics[name] = loss.detach()
        return metrics

    def refuse(self) -> None:
        """Check that the watched numbers are finite; waits for the device.

        Raises:
            DataError: a loss or a synthetic feature is NaN or infinite.
        """
        for number, sentence in self.watched:
            refuse_not_finite(float(number), sentence)


def refuse_not_finite(number: float, sentence: str) -> None:
    """Raise a `DataError` with `sentence` if `number` is NaN or infinite."""
    if not math.isfinite(number):
        raise DataError(sentence.replace("{}", str(number)))


class Step:
    """Trains the parts of a phase, one batch at a time, with fresh optimisers.

    The constructor sets `requires_grad` of all the model's and the objective's parameters.

    Args:
        model: the model to train.
        objective: the loss, miner and generator.
        recipe: the recipe; its loss weights, coupling, optimisers and schedule are used.
        phase: the phase, which lists the parts that train.
        steps: number of steps in an epoch.
        accelerator: Accelerate's `Accelerator`, for autocast and for several processes.
        from_features: whether inputs are features of a frozen backbone.
        tried: whether batches are only tried. Weights are then never updated, so the accelerator
            does not prepare the optimisers.

    Attributes:
        parts: the parameters of each part, without duplicates.
        trains: the parts that train.
        optimizers: the optimisers of the sides that train, "metric" and "generator".
        schedules: the schedule of each optimiser.
        devices: the processes that share each batch; `None` if there is only this one.
        statistics: makes the context of forward and backward passes, which synchronises batch norm.
        who: the parts' names in messages.
        rows: how several processes divide the loss; `None` if each computes the whole loss.
        divided: the ids of parameters whose rows are divided over the processes.

    Raises:
        RecipeError: none of the phase's parts has parameters, or images are mixed and the loss
            compares items with one another.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective,
        recipe: Recipe,
        phase: Phase,
        steps: int,
        accelerator: Any,
        *,
        from_features: bool = False,
        tried: bool = False,
    ) -> None:
        self.model = model
        self.objective = objective
        self.phase = phase
        self.accelerator = accelerator
        self.train_table = recipe.train
        self.from_features = from_features
        self.devices: Devices | None = None
        self.statistics: Callable[[], AbstractContextManager[Any]] = nullcontext
        if accelerator.num_processes > 1:
            self.devices = Devices(accelerator)
            if recipe.train.sync_batch_norm:
                self.statistics = WholeBatch
        self.who = names_of(recipe)
        self.trains: set[Trainable] = set(phase.train)
        if recipe.backbone.frozen:
            self.trains.discard("backbone")
        self.parts = parts_of(model, objective, recipe.backbone.frozen)
        groups = Groups(recipe, model, objective, self.parts)
        frozen = groups.frozen(phase)
        for name, parameters in self.parts.items():
            for parameter in parameters:
                trains = name in phase.train and id(parameter) not in frozen
                parameter.requires_grad_(trains)
        # `parts` lists no parameters of a frozen backbone
        if "backbone" not in self.trains:
            model.backbone.requires_grad_(False)
        self.divided = frozenset(id(objective.get_parameter(name)) for name in shards_of(objective))
        self.rows = self._rows()
        if recipe.augmentation.mix is not None and not compares_with_classes(objective.loss):
            raise RecipeError(
                f'[augmentation] mix = "{recipe.augmentation.mix}" gives an item two classes, but'
                f" the {self.who['loss']} compares items with one another and needs one class per"
                " item. Use a loss that compares items with classes, such as pml.arc_face, or"
                " remove mix."
            )
        self.optimizers = build_optimizers(recipe, phase, groups, frozen)
        self.schedules = schedules_of(recipe, phase, self.optimizers, steps)
        # Without a scaler of gradients (fp16), accelerate's optimiser does what torch's does, but
        # looks for a package in every folder of Python's path at each step.
        if "metric" in self.optimizers and accelerator.scaler is not None and not tried:
            self.optimizers["metric"] = accelerator.prepare_optimizer(self.optimizers["metric"])

    def _the(self, part: str) -> str:
        """Return a part's name for the beginning of a sentence."""
        return f"The {self.who[part]}"

    def _rows(self) -> Rows | None:
        """Return how several processes divide the loss, or `None` if each computes all of it.

        Raises:
            RecipeError: weights are divided over processes, but the loss or the precision is not
                made for that.
        """
        if self.devices is None or self.objective.generator is not None or not self.trains_metric:
            return None
        rows = rows_of_loss(self.objective.loss, self.objective.miner is not None)
        if self.divided and rows != "classes":
            raise RecipeError(
                "[loss]: a part inside the loss divides its weights over processes. Only the"
                " recipe's loss itself can do that."
            )
        if self.divided and self.accelerator.scaler is not None:
            raise RecipeError(
                f'[train] precision: "fp16" does not work with the {self.who["loss"]} on'
                ' several processes. Use "bf16".'
            )
        return rows

    # --- a batch

    def __call__(self, inputs: Tensor, labels: Labels) -> Losses:
        """Train on one batch and return its losses; see `losses`."""
        self.zero_grad()
        losses = self.losses(inputs, labels)
        try:
            self.backward(losses)
        except RetrievalError:
            losses.refuse()  # if NaN is the cause, this error is clearer
            raise
        self.update()
        return losses

    def losses(self, inputs: Tensor, labels: Labels) -> Losses:
        """Return the losses of one batch.

        Args:
            inputs: this process's share of the batch.
            labels: one int64 label per item; if images are mixed, two labels and a weight; if they
                have texts, these and which of them are right.

        Raises:
            PluginError: a part breaks its contract. For NaN, call `Losses.refuse` on the result.
        """
        self._watched: list[tuple[Tensor, str]] = []
        features, codes = self._in_chunks(self._forward, inputs)
        # losses subtract nearly equal numbers, so they are always computed in float32
        if isinstance(labels, MixedLabels):
            return self._mixed(codes.float(), labels)
        if isinstance(labels, TextLabels):
            return self._with_texts(codes.float(), labels)
        if self.rows is not None:
            return self._divided(self.rows, codes.float(), labels)
        batch = self._shared(features.float(), codes.float(), labels)
        synthetic = self._synthesize(batch)
        metric = self._metric_loss(batch, synthetic)
        generator = self._generator_loss(synthetic)
        metrics = {**batch.metrics}
        if synthetic is not None:
            metrics |= synthetic.metrics
        return Losses(metric, generator, metrics, self._watched)

    def zero_grad(self) -> None:
        """Clear the gradients of the parts that train."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def backward(self, losses: Losses) -> None:
        """Compute the gradients of each side's own objective, or of their sum if `joint`."""
        metric = losses.metric
        generator = losses.generator
        metric_side, generator_side = self._sides()
        metric_inputs = metric_side
        if self.train_table.coupling == "joint" and metric is not None and generator is not None:
            # one backward pass of the sum; each side still has its own optimiser
            metric = metric + generator
            generator = None
            metric_inputs = metric_side + generator_side
        if generator is not None:
            # `grad` with inputs, unlike `backward`, leaves the metric's gradients alone
            keep = metric is not None and metric.requires_grad
            with calling(f"The gradient of {self.who['generator']}"):
                gradients = torch.autograd.grad(
                    generator, generator_side, retain_graph=keep, allow_unused=True
                )
            for parameter, gradient in zip(generator_side, gradients, strict=True):
                parameter.grad = gradient
        # a loss is a constant zero for a batch without pairs
        if metric is not None and metric.requires_grad:
            # `statistics` is needed because gradient checkpointing recomputes batch norm here
            with calling(f"The gradient of {self.who['loss']}"), self.statistics():
                self.accelerator.backward(metric, inputs=metric_inputs)
        if self.devices is not None:
            self.devices.reduce_gradients(metric_side + generator_side, self.divided)

    def update(self) -> None:
        """Clip the gradients, then step the optimisers and their schedules."""
        if clip_norm := self.train_table.clip_norm:
            # clipped apart, so that a large gradient of one side does not slow the other
            metric_side, generator_side = self._sides()
            metric_side = [p for p in metric_side if p.grad is not None]
            generator_side = [p for p in generator_side if p.grad is not None]
            if self.divided and self.devices is not None:
                self.devices.clip(metric_side, self.divided, clip_norm)
            else:
                self.accelerator.clip_grad_norm_(metric_side, clip_norm)
            nn.utils.clip_grad_norm_(generator_side, clip_norm)
        for name, optimizer in self.optimizers.items():
            optimizer.step()
            self.schedules[name].step()

    # --- the losses of a batch

    def _shared(self, features: Tensor, codes: Tensor, labels: Tensor) -> Batch:
        """Return a batch: all processes' rows, the miner's indices and the combiner's objective.

        Only a generator uses `features`. Without one they stay this process's rows.
        """
        if self.devices is not None:
            codes = self.devices.share(codes)
            labels = self.devices.share(labels)
            if self.objective.generator is not None:
                features = self.devices.share(features)
        indices = None
        if self.objective.miner is not None:
            indices = self._mine(codes, labels)
        metrics: dict[str, Tensor | int] = {}
        if indices is not None:
            metrics["mined"] = count_indices(indices)
        combiner_loss: Tensor | None = None
        if self.model.combiner is not None:
            with calling(self._the("combiner")):
                objective = self.model.combiner.objective(codes, labels, indices)
            combiner_loss, combiner_metrics = checked_objective(
                objective, self._the("combiner"), codes
            )
            metrics.update(combiner_metrics)
            # a combiner that does not train still gives its metrics
            if "combiner" not in self.phase.train:
                combiner_loss = None
            if combiner_loss is not None:
                metrics["combiner_loss"] = combiner_loss.detach()
        return Batch(features, codes, labels, indices, combiner_loss, metrics)

    def _divided(self, rows: Rows, codes: Tensor, labels: Tensor) -> Losses:
        """Return the losses of a batch whose loss the processes compute in parts."""
        indices = None
        combiner_loss = None
        metrics: dict[str, Tensor | int] = {}
        # a miner and a combiner need the codes of all processes; the loss gathers what it needs
        if self.objective.miner is not None or self.model.combiner is not None:
            batch = self._shared(codes, codes, labels)
            indices = batch.indices
            combiner_loss = batch.combiner_loss
            metrics = {**batch.metrics}
        assert self.devices is not None
        with calling(self._the("loss")):
            value = divided_loss(self.objective.loss, rows, codes, labels, indices, self.devices)
        return Losses(self._weighted(value, combiner_loss), None, metrics, self._watched)

    def _weighted(self, value: Tensor, combiner_loss: Tensor | None) -> Tensor:
        """Return the metric side's loss from the loss's value and the combiner's objective."""
        value = self.train_table.loss_weight * value
        if combiner_loss is not None:
            value = value + combiner_loss
        return self._watch("loss", value)

    def _mixed(self, codes: Tensor, labels: MixedLabels) -> Losses:
        """Return the losses of mixed images, the weighted mean of the losses with each label."""

        def loss(classes: Tensor) -> Tensor | None:
            if self.rows is not None:
                return self._divided(self.rows, codes, classes).metric
            return self._metric_loss(self._shared(codes, codes, classes), None)

        loss_of_own = loss(labels.own)
        loss_of_other = loss(labels.other)
        if loss_of_own is None or loss_of_other is None:
            return Losses(None, None, {})
        value = labels.weight * loss_of_own + (1 - labels.weight) * loss_of_other
        return Losses(self._watch("loss", value), None, {}, self._watched)

    def _with_texts(self, codes: Tensor, labels: TextLabels) -> Losses:
        """Return the losses of images and their texts; `labels` are those of the whole batch."""
        metrics: dict[str, Tensor | int] = {}
        if self.devices is not None:
            codes = self.devices.share(codes)
        value = codes.sum() * 0.0
        # no image of the batch may have a text
        if len(labels.texts):
            reference = {"ref_emb": self._text_codes(labels.texts), "ref_labels": labels.of_texts}
            indices: Any = labels.pairs
            if self.objective.miner is not None:
                indices = labels.right_among(self._mine(codes, labels.own, **reference))
                metrics["mined"] = count_indices(indices)
            value = self._loss(codes, labels.own, indices, **reference)
        if real_weight := self.train_table.real_weight:
            indices = None
            if self.objective.miner is not None:
                indices = self._mine(codes, labels.classes)
            value = value + real_weight * self._loss(codes, labels.classes, indices)
        return Losses(self._weighted(value, None), None, metrics, self._watched)

    def _text_codes(self, texts: Tensor) -> Tensor:
        """Return the codes (T, C) of the batch's texts, of which each process computes a part."""
        count = len(texts)
        if self.devices is not None:
            part = -(-count // self.devices.world)
            rows = torch.arange(part, device=texts.device) + part * self.devices.rank
            # the last processes may have fewer, and repeat one
            texts = texts[rows.clamp(max=count - 1)]
        _, codes = self._in_chunks(self._text_forward, texts)
        codes = codes.float()
        if self.devices is not None:
            codes = self.devices.share(codes)[:count]
        return codes

    def _synthesize(self, batch: Batch) -> Synthetic | None:
        """Return the generator's samples for a batch; `None` if the phase does not use them."""
        generator = self.objective.generator
        who = self._the("generator")
        if generator is None or not (self.phase.synthetic or "generator" in self.phase.train):
            return None
        a, p, n = choose_triplets(None if self._mines_after else batch.indices, batch.labels)
        metrics: dict[str, Tensor | int] = {"triplets": int(a.numel())}
        in_features = generator.space == "features"
        if in_features:
            rows = batch.features
        else:
            rows = batch.codes
        triplets = rows[a], rows[p], rows[n]
        if a.numel() == 0:
            return Synthetic(rows[:0], triplets, None, None, metrics)
        arguments = [*triplets]
        if generator.classmates:
            arguments.append(rows[classmates_of(n, batch.labels)])
        with calling(who):
            synthetic = generator(*arguments)
        if in_features:
            kind = "feature"
        else:
            kind = "embedding"
        shape = len(a), rows.shape[1]
        checked_rows(synthetic, who, shape, rows.device, f"a synthetic {kind} a triplet")
        wrong = (synthetic.detach() * 0).sum()  # 0 if all numbers are finite, else NaN
        sentence = f"the generator's output became NaN or infinite ({self.who['generator']})"
        if reads_at_once(rows.device):  # before the loss raises an error that blames the loss
            refuse_not_finite(float(wrong), sentence)
        self._watched.append((wrong, sentence))
        replaced = triplets[2 if generator.replaces == "negative" else 1]
        metrics["synthetic_shift"] = (synthetic - replaced).detach().norm(dim=1).mean()
        if not (self.trains_metric and self.phase.synthetic):
            return Synthetic(synthetic, triplets, None, None, metrics)
        codes = synthetic
        if in_features:
            codes = self.model.head(synthetic).float()
        extended = extend(batch.codes, batch.labels, codes, (a, p, n), generator.replaces)
        chosen: TripletIndices = extended.triplets
        if self._mines_after and self.objective.miner is not None:
            chosen = mine(self._mine, batch.codes, batch.labels, extended)
            metrics["mined"] = count_indices(chosen)
        return Synthetic(synthetic, triplets, extended, chosen, metrics)

    def _metric_loss(self, batch: Batch, synthetic: Synthetic | None) -> Tensor | None:
        """Return the loss of real and synthetic samples; `None` if only the generator trains."""
        if not self.trains_metric:
            return None
        real_weight = self.train_table.real_weight
        if synthetic is None or not self.phase.synthetic:
            value = self._loss(batch.codes, batch.labels, batch.indices)
        else:
            if synthetic.extended is None:
                # no triplets, so no synthetic samples; backward still needs a graph
                value = batch.codes.sum() * 0.0
            else:
                value = self._loss(
                    batch.codes,
                    batch.labels,
                    synthetic.indices,
                    ref_emb=synthetic.extended.codes,
                    ref_labels=synthetic.extended.labels,
                )
            if real_weight:
                value = value + real_weight * self._loss(batch.codes, batch.labels, batch.indices)
        return self._weighted(value, batch.combiner_loss)

    def _generator_loss(self, synthetic: Synthetic | None) -> Tensor | None:
        """Return the generator's objective; `None` if it does not train or had no triplets."""
        generator = self.objective.generator
        who = self._the("generator")
        if synthetic is None or generator is None or not len(synthetic.rows):
            return None
        if "generator" not in self.phase.train or not any(True for _ in generator.parameters()):
            return None
        distance = self.model.code_distance
        if generator.space == "features":
            distance = self.model.feature_distance
        with calling(who):
            objective = generator.objective(*synthetic.triplets, synthetic.rows, distance)
        value = checked_scalar(objective, f"{who}'s objective", synthetic.rows, generator)
        return self._watch("generator loss", value, "generator")

    # --- calls to the parts

    @property
    def trains_metric(self) -> bool:
        """Whether the phase trains the metric side."""
        return any(part != "generator" for part in self.phase.train)

    @property
    def _mines_after(self) -> bool:
        return self.train_table.mine == "after"

    def _watch(self, name: str, value: Tensor, part: str = "loss") -> Tensor:
        """Return a loss, and add it to the numbers that must be finite."""
        self._watched.append((value.detach(), f"{name} is {{}} ({self.who[part]})"))
        return value

    def _sides(self) -> tuple[list[Parameter], list[Parameter]]:
        """Return the metric's and the generator's parameters that require gradients."""
        metric_side: list[Parameter] = []
        generator_side: list[Parameter] = []
        for name, parameters in self.parts.items():
            if name == "generator":
                side = generator_side
            else:
                side = metric_side
            side += [p for p in parameters if p.requires_grad]
        return metric_side, generator_side

    def _in_chunks(
        self, forward: Callable[[Tensor], tuple[Tensor, Tensor]], inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return features (B, F) and codes (B, C), in chunks of `[train] chunk` rows if set."""
        chunk = self.train_table.chunk
        if chunk is None or chunk >= len(inputs):
            return forward(inputs)
        parts = [
            in_little_memory(forward, self.model, inputs[start : start + chunk])
            for start in range(0, len(inputs), chunk)
        ]
        features, codes = zip(*parts, strict=True)
        return torch.cat(features), torch.cat(codes)

    def _forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return checked features (B, F) and codes (B, C)."""
        model = self.model
        size = len(inputs)
        who = self._the("backbone")
        with self.accelerator.autocast(), self.statistics():
            with calling(who):
                if self.from_features:
                    features = inputs.float()
                else:
                    features = model.features(inputs)
            shape = size, model.backbone.features
            checked_rows(features, who, shape, inputs.device, "features, as wide as it says")
            with calling("The head"):
                codes = model.head(features)
        checked_rows(codes, "The head", (size, -1), inputs.device, "codes")
        return features, codes

    def _text_forward(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs as they are, and checked codes (T, C), of tokens or features."""
        assert self.model.text is not None
        with self.accelerator.autocast(), calling(self._the("text")):
            codes = codes_of(self.model.text, texts)
        checked_rows(codes, self._the("text"), (len(texts), -1), texts.device, "codes")
        return texts, codes

    def _mine(self, codes: Tensor, labels: Tensor, **reference: Tensor) -> TripletIndices:
        """Return the miner's indices in the batch, or against `ref_emb` and `ref_labels`."""
        assert self.objective.miner is not None
        who = self._the("miner")
        with calling(who):
            indices = self.objective.miner(codes, labels, **reference)
        sizes = len(codes), len(reference.get("ref_emb", codes))
        return checked_indices(indices, who, sizes, codes.device)

    def _loss(
        self, codes: Tensor, labels: Tensor, indices: TripletIndices | None, **reference: Tensor
    ) -> Tensor:
        """Return the loss; without a miner it is called without indices."""
        who = self._the("loss")
        arguments: list[Any] = [codes, labels]
        if indices is not None:
            arguments.append(indices)
        with calling(who, hint=lambda: loss_sizes(self.objective, codes.shape[1])):
            value = self.objective.loss(*arguments, **reference)
        return checked_scalar(value, who, codes, self.objective.loss)

    def set_modes(self) -> None:
        """Put the parts that train into training mode, the others into evaluation mode."""
        model = self.model
        objective = self.objective
        trains = self.trains
        model.train()
        model.backbone.train("backbone" in trains)
        model.head.train("head" in trains)
        objective.train()
        if model.text is not None:
            model.text.train("text" in trains)
        # after head, loss and miner, which may contain the combiner or one of its layers
        if model.combiner is not None:
            model.combiner.train("combiner" in trains)
        if objective.generator is not None:
            objective.generator.train("generator" in trains)
        for module in (*model.backbone.modules(), *model.head.modules()):
            parameters = [*module.parameters()]
            if parameters and not any(p.requires_grad for p in parameters):
                module.eval()  # frozen weights keep their batch statistics too

    def end_epoch(self, monitored: float | None) -> None:
        """Advance the schedules that change once an epoch; some use the monitored metric."""
        for schedule in self.schedules.values():
            schedule.epoch_end(monitored)

    def rates(self) -> dict[str, float]:
        """Return the largest learning rate of each part that trains."""
        rates = {}
        for optimizer in self.optimizers.values():
            # a part's groups are sorted by rate, so the last is the largest
            for group in optimizer.param_groups:
                rates[group["name"]] = group["lr"]
        return rates

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of optimisers and schedules."""
        return {
            "optimizers": {
                name: optimizer.state_dict() for name, optimizer in self.optimizers.items()
            },
            "schedules": {name: schedule.state_dict() for name, schedule in self.schedules.items()},
        }

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Resume from `state_dict()` of the same phase.

        Raises:
            KeyError, ValueError: the state belongs to another phase or recipe.
        """
        for name, values in state["optimizers"].items():
            self.optimizers[name].load_state_dict(values)
        for name, values in state["schedules"].items():
            self.schedules[name].load_state_dict(values)


def in_little_memory(
    forward: Callable[[Tensor], tuple[Tensor, Tensor]], model: nn.Module, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `forward(rows)` without keeping activations; the backward pass recomputes them.

    The second computation uses the random numbers (of dropout) and the buffers (batch norm's
    running statistics) of the first one. Then it restores the generators and the buffers.
    """
    buffers = [
        buffer
        for module in model.modules()
        if module.training
        for buffer in module.buffers(recurse=False)
    ]
    before = [buffer.clone() for buffer in buffers]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _holding(buffers, before)

    # torch stops a recomputation early by an exception. If it passed through a plugin's part,
    # `calling` would report it as the part's error.
    with set_checkpoint_early_stop(False):
        parts: tuple[Tensor, Tensor] = checkpoint(
            forward, rows, use_reentrant=False, context_fn=contexts
        )
    return parts


@contextmanager
def _holding(buffers: list[Tensor], values: list[Tensor]) -> Iterator[None]:
    """Context manager that sets buffers to `values` and, at the end, to their own contents."""
    own = [buffer.clone() for buffer in buffers]
    _fill(buffers, values)
    try:
        yield
    finally:
        _fill(buffers, own)


def _fill(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)


def schedules_of(
    recipe: Recipe, phase: Phase, optimizers: Mapping[str, TorchOptimizer], steps: int
) -> dict[str, StepSchedule]:
    """Return a schedule for each optimiser of a phase with `steps` steps per epoch.

    Raises:
        RecipeError: the warm-up is longer than the phase.
    """
    section = recipe.schedule
    whole = phase.epochs * steps
    warmup = section.warmup_steps(phase.epochs, steps)
    if warmup > whole:
        raise RecipeError(
            f"[schedule] warmup: {section.warmup} takes {warmup:,} steps, but the phase"
            f" '{phase.name}' has only {whole:,}. Set a share of the phase, such as 0.1."
        )
    larger = Monitor(recipe).larger
    return {
        name: StepSchedule(section, optimizer, whole, warmup, larger)
        for name, optimizer in optimizers.items()
    }


class StepSchedule:
    """A learning-rate schedule that changes the rates after each step, epoch or validation.

    The phase has `steps` steps; in the first `warmup` steps the rates rise. `larger` says whether
    larger values of the monitored metric are better.
    """

    def __init__(
        self,
        section: Schedule,
        optimizer: TorchOptimizer,
        steps: int,
        warmup: int,
        larger: bool = True,
    ) -> None:
        self.per_epoch = section.name not in SHAPES
        self.by_metric = section.name == "ReduceLROnPlateau"
        if self.per_epoch:
            options = dict(section.options)
            if self.by_metric:
                options["mode"] = "max" if larger else "min"
            factory = getattr(lr_scheduler, section.name)
            self.scheduler: Any = factory(optimizer, **options)
        else:

            def factor(step: int) -> float:
                # not 0 at step 0, which would waste the first batch
                if step < warmup:
                    return (step + 1) / (warmup + 1)
                done = min(1.0, (step - warmup) / max(1, steps - warmup))
                if section.name == "cosine":
                    return 0.5 * (1.0 + math.cos(math.pi * done))
                if section.name == "linear":
                    return 1.0 - done
                return 1.0

            self.scheduler = lr_scheduler.LambdaLR(optimizer, factor)

    def step(self) -> None:
        """Advance after an optimiser step."""
        if not self.per_epoch:
            self.scheduler.step()

    def epoch_end(self, monitored: float | None) -> None:
        """Advance after an epoch, with the monitored metric if the epoch was validated."""
        if self.by_metric:
            if monitored is not None:
                self.scheduler.step(monitored)
        elif self.per_epoch:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from: numbers, and lists of numbers."""
        state = {}
        for name, value in self.scheduler.state_dict().items():
            # functions cannot be saved, and the recipe makes them anew
            if isinstance(value, int | float | bool | list) and name != "lr_lambdas":
                state[name] = value
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state_dict()`.

        If the phase's number of steps has changed since, the rates follow the new curve.
        """
        self.scheduler.__dict__.update(state)
        if self.per_epoch:
            return
        # the state has the rates of the old curve
        groups = self.scheduler.optimizer.param_groups
        curves = zip(groups, self.scheduler.base_lrs, self.scheduler.lr_lambdas, strict=True)
        for group, base, factor in curves:
            group["lr"] = base * factor(self.scheduler.last_epoch)
