"""Losses of items against class weights, of one matrix of their products, whose gradient is written
down with the value.

pytorch-metric-learning makes some ten such matrices: a mask of the targets, copies with a margin,
and what autograd keeps of each. Here only the targets' numbers (N,) go through the formula of a
margin; the matrix becomes its own gradient in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pytorch_metric_learning import distances
from torch import Tensor
from torch.nn import functional

from retrieval_pml.blocks import blocks, derivatives
from retrieval_pml.fused import LEAST, exp_
from retrieval_pml.matrices import unit

Target = Callable[..., Tensor]


def is_product(distance: Any) -> bool:
    """Return whether a distance is a plain product of vectors or of unit vectors, as these losses
    are written for.
    """
    if type(distance) not in (distances.CosineSimilarity, distances.DotProductSimilarity):
        return False
    return (distance.p, distance.power) == (2, 1) and not distance.collect_stats


def at_length(distance: Any, vectors: Tensor, dim: int, scale: float = 1.0) -> Tensor:
    """Return vectors times a factor, at one length where the distance normalises; see `unit`."""
    if distance.normalize_embeddings:
        return unit(vectors, dim, scale)
    return vectors if scale == 1 else vectors * scale


class Pool:
    """Makes one number of an item's products with a class's several centres."""

    def plain(self, products: Tensor) -> Tensor:
        """Return (N, K) of products (N, centres, K), differentiable."""
        raise NotImplementedError(f"{type(self).__name__} must define plain(products)")

    def derived_(self, products: Tensor) -> Tensor:
        """Return (N, K) of products (N, centres, K), and overwrite each of these by the derivative
        of its class's number.
        """
        raise NotImplementedError(f"{type(self).__name__} must define derived_(products)")


class Nearest(Pool):
    """The largest product; of equal ones the first counts."""

    def plain(self, products: Tensor) -> Tensor:
        """Return (N, K) of products (N, centres, K), differentiable."""
        return products.max(1)[0]

    def derived_(self, products: Tensor) -> Tensor:
        """Return (N, K) of products (N, centres, K), and overwrite each of these by the derivative
        of its class's number.
        """
        best = products.amax(1)
        free = torch.ones_like(best, dtype=torch.bool)
        for each in products.unbind(1):
            mine = (each == best).logical_and_(free)
            free ^= mine
            each.copy_(mine)
        return best


class Softly(Pool):
    """The mean of the products, each weighing by its exponential."""

    def plain(self, products: Tensor) -> Tensor:
        """Return (N, K) of products (N, centres, K), differentiable."""
        return (torch.softmax(products, 1) * products).sum(1)

    def derived_(self, products: Tensor) -> Tensor:
        """Return (N, K) of products (N, centres, K), and overwrite each of these by the derivative
        of its class's number.
        """
        weights = exp_(products - products.amax(1, keepdim=True))
        share = weights.sum(1, keepdim=True).reciprocal_()
        mean = (weights * products).sum(1, keepdim=True).mul_(share)
        products.sub_(mean - 1).mul_(weights.mul_(share))
        return mean.squeeze(1)


def cross_entropy(
    items: Tensor,
    weights: Tensor,
    labels: Tensor,
    target: Target,
    *others: Tensor,
    bias: Tensor | None = None,
    pool: Pool | None = None,
    centres: int = 1,
    rate: float = 1.0,
) -> Tensor:
    """Return each item's −log softmax of its products with class weights, at its label, where the
    label's logit is another (N,).

    Args:
        items: (N, C).
        weights: (C, centres × K), all classes' first centres first.
        labels: (N,) int64.
        target: of the labels' logits (N,) and `others`: what stands in their place, each of its own
            item's numbers.
        others: what `target` needs besides, each (N,).
        bias: (K,) added to each item's products, where there is one centre; or None.
        pool: what makes one number of a class's centres; None where there is one.
        centres: how many each class has.
        rate: logits are a class's number times this.
    """
    found: Tensor = _CrossEntropy.apply(
        items, weights, bias, labels, target, (pool, centres, rate), *others
    )
    return found


class _CrossEntropy(torch.autograd.Function):
    """See `cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        items: Tensor,
        weights: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        target: Target,
        pooled: tuple[Pool | None, int, float],
        *others: Tensor,
    ) -> Tensor:
        pool, centres, rate = pooled
        slopes = items @ weights if bias is None else torch.addmm(bias, items, weights)
        by_class = slopes.view(len(items), centres, weights.shape[1] // centres)
        row = torch.arange(len(items), device=items.device)
        own = by_class[row, :, labels]
        near = own.squeeze(1) if pool is None else pool.plain(own.unsqueeze(2)).squeeze(1)
        with torch.enable_grad():
            leaves = [
                (x * f).detach().requires_grad_()
                for x, f in ((near, rate), *((x, 1) for x in others))
            ]
            at_label = target(*leaves)
            derived = torch.autograd.grad(at_label.sum(), leaves, materialize_grads=True)
        at_label = at_label.detach()
        excess = torch.empty_like(at_label)  # the derivative of the loss by the label's logit
        losses = torch.empty_like(at_label)
        whole = [slice(0, len(items))]
        for part in blocks(*slopes.shape) if items.device.type == "cpu" else whole:
            logits = by_class[part].squeeze(1) if pool is None else pool.derived_(by_class[part])
            if rate != 1:
                logits.mul_(rate)
            place, mine = (row[: len(logits)], labels[part]), at_label[part]
            logits[place] = mine
            shares = torch.softmax(logits, 1)
            # log Σ exp: the largest logit, and the logarithm of its share
            losses[part] = logits.amax(1) - shares.amax(1).log_() - mine
            excess[part] = shares[place] - 1
            shares[place] = excess[part] * derived[0][part]
            if rate != 1:
                shares.mul_(rate)
            torch.hardshrink(shares, LEAST, out=logits)
            if pool is not None:
                by_class[part].mul_(logits.unsqueeze(1))
        ctx.save_for_backward(
            items, weights, bias, labels, slopes, *others, *(excess * x for x in derived[1:])
        )
        ctx.made = target, pooled
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        items, weights, bias, labels, slopes, *rest = ctx.saved_tensors
        target, pooled = ctx.made
        others, of_others = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        if torch.is_grad_enabled():  # the gradient will be differentiated
            inputs = items, weights, bias, *others
            x, w, b, *o = derivatives(
                lambda x, w, b, *o: _plain(x, w, b, labels, target, pooled, *o), inputs, gradient
            )
            return x, w, b, None, None, None, *o
        each = gradient.unsqueeze(1)
        x = (slopes @ weights.T).mul_(each) if ctx.needs_input_grad[0] else None
        w = None
        if ctx.needs_input_grad[1]:
            weighed = items * each
            # in the order that the weights lie in
            w = (slopes.T @ weighed).T if weights.stride(0) == 1 else weighed.T @ slopes
        b = gradient @ slopes if ctx.needs_input_grad[2] else None
        return x, w, b, None, None, None, *(gradient * x for x in of_others)


def _plain(
    items: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    target: Target,
    pooled: tuple[Pool | None, int, float],
    *others: Tensor,
) -> Tensor:
    """Return what `cross_entropy` returns, as a formula."""
    pool, centres, rate = pooled
    logits = items @ weights if bias is None else torch.addmm(bias, items, weights)
    if pool is not None:
        logits = pool.plain(logits.view(len(items), centres, weights.shape[1] // centres))
    logits = logits * rate
    at = labels.unsqueeze(1)
    mine = target(logits.gather(1, at).squeeze(1), *others)
    return functional.cross_entropy(
        logits.scatter(1, at, mine.unsqueeze(1)), labels, reduction="none"
    )


def squared_errors(items: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
    """Return the mean square of what products of items (N, C) with class weights (C, K) differ from
    1 at the label and from 0 elsewhere.
    """
    found: Tensor = _SquaredErrors.apply(items, weights, labels)
    return found


class _SquaredErrors(torch.autograd.Function):
    """See `squared_errors`."""

    @staticmethod
    def forward(ctx: Any, items: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
        errors = items @ weights
        errors[torch.arange(len(items), device=items.device), labels] -= 1
        ctx.save_for_backward(items, weights, labels, errors)
        total = torch.stack([errors[part].square().sum() for part in blocks(*errors.shape)]).sum()
        return total / errors.numel()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        items, weights, labels, errors = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated
            errors = items @ weights - functional.one_hot(labels, weights.shape[1])
        share = gradient * (2 / errors.numel())
        x = (errors @ weights.T) * share if ctx.needs_input_grad[0] else None
        w = (items * share).T @ errors if ctx.needs_input_grad[1] else None
        return x, w, None


def proxy_anchor(
    proxies: Tensor, items: Tensor, labels: Tensor, margin: float, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return each proxy's log(1 + Σ exp) of its own items' exponents and of all others' (K,) each,
    of exponents as products.

    Args:
        proxies: (K, C) of length α.
        items: (N, C) of length 1.
        labels: (N,) int64.
        margin: α δ.
        weights: (N,) added to the exponents of each item; None for 0.
    """
    if weights is None:
        weights = items.new_zeros(())
    pull, push = _ProxyAnchor.apply(proxies, items, labels, margin, weights)
    return pull, push


class _ProxyAnchor(torch.autograd.Function):
    """See `proxy_anchor`."""

    @staticmethod
    def forward(
        ctx: Any, proxies: Tensor, items: Tensor, labels: Tensor, margin: float, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        slopes = proxies @ items.T
        own = labels, torch.arange(len(items), device=items.device)
        pull = weights + margin - slopes[own]
        slopes[own] = -torch.inf
        push = torch.empty_like(slopes[:, 0])
        for part in blocks(*slopes.shape):
            exponents = slopes[part].add_(weights + margin)
            top = exponents.amax(1, keepdim=True).clamp_(min=0)  # with the 1 of log(1 + Σ exp)
            exp_(exponents.sub_(top))
            sums = exponents.sum(1, keepdim=True) + torch.exp(-top)
            push[part] = (top + sums.log()).squeeze(1)
            exponents.div_(sums)
        highest = torch.zeros_like(push).scatter_reduce_(0, labels, pull, "amax")
        pull.sub_(highest[labels]).exp_()
        total = torch.exp(-highest).index_add_(0, labels, pull)
        ctx.save_for_backward(proxies, items, labels, weights, slopes, pull.div_(total[labels]))
        ctx.margin = margin
        return highest + total.log(), push

    @staticmethod
    def backward(ctx: Any, of_pull: Tensor, of_push: Tensor) -> tuple[Tensor | None, ...]:
        proxies, items, labels, weights, slopes, pull = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated
            p, x = derivatives(
                lambda p, x: _plain_proxy_anchor(p, x, labels, ctx.margin, weights),
                (proxies, items),
                (of_pull, of_push),
            )
            return p, x, None, None, None
        pulled = (pull * of_pull[labels]).unsqueeze(1)
        p = x = None
        if ctx.needs_input_grad[0]:
            p = (
                (slopes @ items)
                .mul_(of_push.unsqueeze(1))
                .index_add_(0, labels, items * pulled, alpha=-1)
            )
        if ctx.needs_input_grad[1]:
            x = slopes.T @ (proxies * of_push.unsqueeze(1)) - proxies[labels] * pulled
        return p, x, None, None, None


def _plain_proxy_anchor(
    proxies: Tensor, items: Tensor, labels: Tensor, margin: float, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what `proxy_anchor` returns, as a formula."""
    near = proxies @ items.T
    own = functional.one_hot(labels, len(proxies)).T.bool()
    both = []
    for exponents, mask in ((margin - near, own), (near + margin, ~own)):
        kept = (exponents + weights).masked_fill(~mask, -torch.inf)
        both.append(torch.logsumexp(functional.pad(kept, (0, 1)), 1))
    return both[0], both[1]
