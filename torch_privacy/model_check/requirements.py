# SPDX-License-Identifier: Apache-2.0
"""Checks that a model and its optimizer can be trained privately, and finds the tensors that are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import LBFGS, Optimizer, SparseAdam

from ..support.model_state import ModelTensors, ModelTree, Versions
from ..support.normalization import advice
from ..support.validate import Refused, quoted


class TensorsOf:
    """Finds the present tensors of a model and its optimizer; returns the same object while they are the same.

    Args:
        model: the model.
        optimizer: holds the parameters that are trained, if they require a gradient.
        attributes: tensors in the model's plain attributes that count as constants while nothing is written into them.
        of_optimizer: returns the optimizer's parameters by name, if the model has others in their places at present.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        attributes: Versions | None = None,
        of_optimizer: Callable[[], Mapping[str, Tensor] | None] = lambda: None,
    ):
        self._model, self._optimizer, self._attributes = model, optimizer, attributes
        self._of_optimizer = of_optimizer
        self.tree = ModelTree(model)  # as of the latest call
        self._state: Any = None
        self._found: ModelTensors | None = None

    def __call__(self) -> ModelTensors:
        """Returns the tensors.

        Raises:
            Refused: the optimizer holds parameters of another model, or none that requires a gradient.
        """
        if not self.tree.is_current():
            self.tree = ModelTree(self._model)
        held = [*chain.from_iterable(map(itemgetter("params"), self._optimizer.param_groups))]
        held, needed = [*map(id, held)], [*map(attrgetter("requires_grad"), self.tree.parameters.values())]
        unchanged = [] if self._attributes is None else self._attributes.unchanged()
        state = self.tree, held, needed, [*map(id, unchanged)]
        if self._found is None or state != self._state:
            self._found = _found(self.tree, set(held), unchanged, self._of_optimizer() or self.tree.parameters)
            self._state = state
        return self._found


def _found(
    tree: ModelTree, held: set[int], unchanged: Sequence[Tensor], of_optimizer: Mapping[str, Tensor]
) -> ModelTensors:
    named = tree.parameters
    foreign = held - {id(p) for p in of_optimizer.values()}
    if foreign:
        raise Refused(
            f"PrivateTraining: the optimizer holds {len(foreign)} parameter(s) that are not the model's. Make it "
            "over model.parameters(), after fully_shard if you use that, or pass one model that has all of them."
        )
    trained = {name: p for name, p in named.items() if id(of_optimizer[name]) in held and p.requires_grad}
    if not trained:
        raise Refused("PrivateTraining: no parameter of the optimizer requires a gradient; there is nothing to train.")
    frozen = {name: p for name, p in named.items() if not p.requires_grad}
    return ModelTensors(trained, {**frozen, **tree.buffers}, unchanged)


def check_no_gradient_hooks(trained: Mapping[str, Tensor]) -> None:
    """Refuses gradient hooks on parameters: they would see, and change, only gradients that are not private."""
    for name, p in trained.items():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise Refused(
                f"PrivateTraining: parameter {name!r} has a hook for its gradient (register_hook or "
                "register_post_accumulate_grad_hook). It would not see the private gradient, and could log one that is "
                "not private. Remove it; optimizer.register_step_pre_hook sees the private gradients in p.grad."
            )


def check_model(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuses unsupported optimizers, and batch normalization in training mode, which mixes examples."""
    _check_plain(model, optimizer)
    check_initialized(model)
    _check_recorded(model)
    if isinstance(optimizer, LBFGS):
        raise Refused("PrivateTraining: LBFGS needs several gradients per step; use a first-order optimizer.")
    if isinstance(optimizer, SparseAdam):
        raise Refused("PrivateTraining: SparseAdam takes sparse gradients only, and noise is dense; use Adam.")
    batch_norms = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if batch_norms:
        listed = ", ".join(f"{name!r} ({advice(m)})" for name, m in batch_norms)
        raise Refused(
            f"PrivateTraining: batch normalization in training mode mixes examples, in module {listed}. Replace it, or "
            "put it in eval mode and freeze it."
        )


def _check_plain(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuses models and optimizers of other types, and those that another library has wrapped."""
    if not isinstance(model, nn.Module):
        raise Refused(f"PrivateTraining: model of type {type(model).__name__} must be a torch.nn.Module.")
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise Refused(
            f"PrivateTraining: optimizer of type {type(optimizer).__name__} is not a torch.optim.Optimizer. Pass the "
            "optimizer itself, not a wrapper that accumulates gradients or skips steps."
        )
    wrapped = [type(part).__name__ for part in (*model.modules(), optimizer) if _is_opacus_wrapper(part)]
    if wrapped:
        raise Refused(
            f"PrivateTraining: {wrapped[0]} comes from Opacus. Pass model and optimizer as they were before "
            "make_private: PrivateTraining computes per-example gradients, clips and adds noise itself."
        )


def check_initialized(model: nn.Module) -> None:
    """Refuses modules that learn their sizes from a first forward, such as `nn.LazyLinear`, before that forward."""
    lazy = [name for name, t in chain(model.named_parameters(), model.named_buffers()) if nn.parameter.is_lazy(t)]
    if lazy:
        raise Refused(
            f"model: {quoted(lazy)} is not initialized yet. Run the model once, on made-up inputs of the right shape."
        )


def _check_recorded(model: nn.Module) -> None:
    """Refuses tensors that count no changes: what the model writes into them could not be seen."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_inference():
            raise Refused(
                f"PrivateTraining: {name!r} was made under torch.inference_mode(), which counts no changes of a "
                "tensor. Build or load the model outside of it; torch.no_grad() does the same for a training."
            )


def _is_opacus_wrapper(part: object) -> bool:
    """True if Opacus wraps a model or an optimizer in it; Opacus's layers are ordinary modules."""
    return type(part).__module__.startswith(("opacus.grad_sample", "opacus.optimizers"))
