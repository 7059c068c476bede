# SPDX-License-Identifier: Apache-2.0
"""What is asked of the user's model before anything else: whose parameters are trained, and no learning from data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.utils._pytree import tree_leaves

from ._model_state import slots
from ._validate import Refused


@dataclass(frozen=True)
class Census:
    """The tensors of a model, by the part they play in one step."""

    trained: Mapping[str, Tensor]  # held by the optimizer and requiring a gradient, by dotted name
    others: Mapping[str, Tensor]  # frozen parameters and buffers, which hold no data of the batch
    attributes: Sequence[Tensor] = ()  # that are no buffers, as they were before the first batch

    @property
    def constants(self) -> list[Tensor]:
        """All that hold no data of the batch."""
        return [*self.others.values(), *self.attributes]


class Attributes:
    """The tensors that a model keeps as plain attributes, or in containers there, such as the numbers of positions.

    What is put there later, or written into, may be a batch's.
    """

    def __init__(self, model: nn.Module):
        leaves = (leaf for _, _, _, value in slots([*model.named_modules()]) for leaf in tree_leaves(value))
        kept = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        self._kept = [(t, t._version) for t in kept if not t.requires_grad and not t.is_inference()]

    def unchanged(self) -> list[Tensor]:
        """Those into which nothing was written since."""
        return [t for t, version in self._kept if t._version == version]


class Seal:
    """Shows whether a tensor of the model was replaced, or written into other than through ``.data``, since."""

    def __init__(self, model: nn.Module):
        slots = ((name, module) for name, module in model.named_modules())
        self._kept = [
            (f"{prefix}.{key}" if prefix else key, place, key, t, t._version)
            for prefix, module in slots
            for place in (module._parameters, module._buffers)
            for key, t in place.items()
            if t is not None and not t.is_inference()
        ]

    def changed(self) -> tuple[list[str], list[str]]:
        """Names of the parameters that changed, and of the buffers."""
        names = [
            (name, isinstance(t, nn.Parameter))
            for name, place, key, t, version in self._kept
            if place.get(key) is not t or t._version != version
        ]
        return [name for name, is_one in names if is_one], [name for name, is_one in names if not is_one]


def take_census(model: nn.Module, optimizer: Optimizer, attributes: Attributes | None = None) -> Census:
    """Who is who in the model just now; refuses parameters of the optimizer that are not the model's."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    strangers = held - {id(p) for p in named.values()}
    if strangers:
        raise Refused(
            f"PrivateTraining: the optimizer holds {len(strangers)} parameter(s) that are not the model's. Make it "
            "over model.parameters(), or pass one model that has all of them."
        )
    trained = {name: p for name, p in named.items() if id(p) in held and p.requires_grad}
    if not trained:
        raise Refused("PrivateTraining: no parameter of the optimizer requires a gradient; there is nothing to train.")
    frozen = {name: p for name, p in named.items() if not p.requires_grad}
    return Census(trained, {**frozen, **buffers}, attributes.unchanged() if attributes else ())


def padding_rows(model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, int]:
    """Names of the trained tables of embeddings, with the row that stands for padding; none that modules share."""
    places = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    tables = {
        id(m.weight): m.padding_idx
        for m in model.modules()
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.padding_idx is not None
    }
    return {name: tables[id(p)] for name, p in trained.items() if id(p) in tables and places.count(id(p)) == 1}


def check_no_hooks(trained: Mapping[str, Tensor]) -> None:
    """Refuse parameters with hooks for gradients: these would see, and change, only gradients that are not private."""
    for name, p in trained.items():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise Refused(
                f"PrivateTraining: parameter {name!r} has a hook for its gradient (register_hook or "
                "register_post_accumulate_grad_hook). It would not see the private gradient, and could log one that is "
                "not private. Remove it; optimizer.register_step_pre_hook sees the private gradients in p.grad."
            )


def check_model(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse optimizers that do not fit, and batch normalization in training mode, which mixes a batch's examples."""
    _check_plain(model, optimizer)
    if isinstance(optimizer, LBFGS):
        raise Refused("PrivateTraining: LBFGS asks for gradients several times a step; use a first-order optimizer.")
    if isinstance(optimizer, SparseAdam):
        raise Refused("PrivateTraining: SparseAdam takes sparse gradients only, and noise is dense; use Adam.")
    offenders = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if offenders:
        listed = ", ".join(
            f"{name!r} (use nn.GroupNorm({math.gcd(32, m.num_features)}, {m.num_features}))" for name, m in offenders
        )
        raise Refused(
            f"PrivateTraining: batch normalization in training mode mixes examples, in module {listed}. Replace it, or "
            "put it in eval mode and freeze it."
        )


def _check_plain(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse what other libraries wrapped."""
    if not isinstance(model, nn.Module):
        raise Refused(f"PrivateTraining: model of type {type(model).__name__} must be a torch.nn.Module.")
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise Refused(
            f"PrivateTraining: optimizer of type {type(optimizer).__name__} is not one of torch.optim's kind. Pass the "
            "optimizer itself, not a wrapper that accumulates gradients or skips steps."
        )
    wrapped = [type(thing).__name__ for thing in (*model.modules(), optimizer) if _is_of_opacus(thing)]
    if wrapped:
        raise Refused(
            f"PrivateTraining: {wrapped[0]} is Opacus's. Pass model and optimizer as they were before make_private: "
            "per-example gradients, clipping and noise are made here."
        )


def _is_of_opacus(thing: object) -> bool:
    """Whether it wraps a model or an optimizer; Opacus's layers are ordinary modules."""
    return type(thing).__module__.startswith(("opacus.grad_sample", "opacus.optimizers"))
