# SPDX-License-Identifier: Apache-2.0
"""Knows torch's loss functions: what they average over a batch, and so the loss of each example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..support.validate import Refused

NATIVE = "write the loop with torch_privacy.PrivateTraining, which takes one loss per example"
LOSSES: set[Callable[..., Any]] = {
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.cosine_embedding_loss,
    F.cross_entropy,
    F.ctc_loss,
    F.gaussian_nll_loss,
    F.hinge_embedding_loss,
    F.huber_loss,
    F.kl_div,
    F.l1_loss,
    F.margin_ranking_loss,
    F.mse_loss,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss,
    F.nll_loss,
    F.poisson_nll_loss,
    F.smooth_l1_loss,
    F.soft_margin_loss,
    F.triplet_margin_loss,
    F.triplet_margin_with_distance_loss,
}
# Those that divide a mean by the weights of the whole batch.
DIVIDE_BY_WEIGHTS = {F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.huber_loss}


@dataclass(frozen=True)
class Loss:
    """Holds what a loss function computed in the loop, before its mean or sum over the batch.

    Args:
        elements: the losses with ``reduction="none"``.
        name: name of the function.
        reduction: "mean", "sum" or "batchmean"; "none" until the loop takes a mean or a sum.
        counts: true where an element counts for the mean; None if all do.
        factor: number by which the loop multiplied the loss.
    """

    elements: Tensor
    name: str
    reduction: str
    counts: Tensor | None = None
    factor: float = 1.0

    def value(self) -> Tensor:
        """Returns the loss of the batch, as the loop's own loss function does."""
        losses = self.elements.detach()
        if self.reduction == "mean":
            return losses.mean() if self.counts is None else losses.sum() / self.counts.sum()
        return losses.sum() / (len(losses) if self.reduction == "batchmean" else 1)

    def of_examples(self, n: int, *, batch_first: bool, verified: bool) -> Tensor:
        """Returns the losses (n,) of n examples: means, or sums, over each example's own elements.

        Args:
            n: number of examples in the batch.
            batch_first: True if an example's elements lie together, as after ``view(-1)`` of the shape (n, t).
            verified: True if rehearsals compare the losses, so that a wrong order is noticed.
        """
        by_example = self._by_example(self.elements, n, batch_first)
        if not (verified or n == 1 or self.elements.shape[0] == n):
            raise Refused(
                f"PrivacyEngine: {self.name} gave losses of shape {tuple(self.elements.shape)} for {n} examples, and "
                "assume_independent leaves out the rehearsals that show which of them belong to which example. Give "
                "the criterion tensors with the batch in the first dimension, or leave assume_independent out."
            )
        if by_example.shape[1] == 1:
            losses = self.elements if self.elements.shape == (n,) else by_example.view(n)
        elif self.reduction != "mean":
            losses = by_example.sum(1)
        elif self.counts is None:
            losses = by_example.mean(1)
        else:
            losses = by_example.sum(1) / self._by_example(self.counts, n, batch_first).sum(1).clamp(min=1)
        return losses if self.factor == 1.0 else losses * self.factor

    def _by_example(self, elements: Tensor, n: int, batch_first: bool) -> Tensor:
        """Returns the elements as (n, k), in each row those of one example."""
        shape = tuple(elements.shape)
        if elements.numel() == n:
            return elements.reshape(n, 1)
        if not batch_first and len(shape) > 1 and shape[1] == n:
            return elements.movedim(1, 0).reshape(n, -1)
        if shape and shape[0] % n == 0:
            if batch_first or shape[0] == n:
                return elements.reshape(n, -1)
            return elements.reshape(shape[0] // n, n, -1).movedim(1, 0).reshape(n, -1)
        raise Refused(
            f"PrivacyEngine: {self.name} gave losses of shape {shape} for a batch of {n} examples. The first dimension "
            "must be the batch, or the batch times positions (with batch_first=False of make_private: positions times "
            f"the batch). Rearrange what the criterion gets, or {NATIVE}."
        )


def not_known(func: Any, kwargs: dict[str, Any]) -> str:
    """Returns why a call of a loss function has no known losses per example; "" if it has."""
    name, reduction = func.__name__, kwargs.get("reduction")
    if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        return f"{name} was called with size_average or reduce, which torch has replaced by reduction"
    if reduction not in ("mean", "sum", "none", "batchmean"):
        return f"{name} was called with reduction={reduction!r}"
    if reduction == "mean" and kwargs.get("weight") is not None and func in DIVIDE_BY_WEIGHTS:
        return (
            f'{name}(weight=..., reduction="mean") divides by the weights of all examples in the batch, which makes '
            "one example's gradient depend on the others"
        )
    return ""
