# SPDX-License-Identifier: Apache-2.0
"""Takes per-example losses from an ordinary loop: those of torch's loss functions, on which it calls ``backward``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from ..support.validate import Refused
from .losses import LOSSES, NATIVE, Loss, not_known

ELSEWHERE = (
    "PrivacyEngine: backward reached a loss of the loop in another way than by loss.backward(), or after its step was "
    "made. Call loss.backward() once, and optimizer.step() after it, for each batch of the loader."
)
# What a plain number does to the factor of a loss, by the name of torch's function.
SCALINGS: dict[str, Callable[[float, float], float]] = {
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "mul_", "__imul__"), lambda factor, number: factor * number),
    **dict.fromkeys(("div", "__div__", "__truediv__", "div_", "__itruediv__"), lambda factor, number: factor / number),
    **dict.fromkeys(("add", "__add__", "__radd__", "add_", "__iadd__"), lambda factor, number: factor),
    **dict.fromkeys(("sub", "__sub__", "sub_", "__isub__"), lambda factor, number: factor),
}


class _Scalar(torch.autograd.Function):
    """Gives the loop a loss to log and to call backward on; its graph leads nowhere."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise Refused(ELSEWHERE)


class LossCatcher(TorchFunctionMode):
    """Keeps the losses of one batch of the loop per example, and the one on which the loop calls ``backward``.

    Only what is computed with gradients is looked at: an evaluation under ``no_grad`` is left alone.

    Args:
        reduction: ``loss_reduction`` of `PrivacyEngine.make_private`: "mean" or "sum".
    """

    def __init__(self, reduction: str):
        super().__init__()
        self._reduction = reduction
        self._losses: dict[int, tuple[Tensor, Loss]] = {}  # by id of the tensor that the loop has
        self._reasons: dict[int, tuple[Tensor, str]] = {}  # why a tensor of the loop is no known loss
        self.backward_loss: Loss | None = None

    def open(self) -> None:
        """Forgets the last batch, and looks at torch's functions from now on."""
        self.close()
        self.forget()
        _push_mode(self)

    def forget(self) -> None:
        """Lets go of the losses."""
        self._losses, self._reasons, self.backward_loss = {}, {}, None

    def close(self) -> bool:
        """Stops looking at torch's functions, and returns whether it did; modes that were entered since stay."""
        if not any(mode is self for mode in _get_current_function_mode_stack()):
            return False
        above: list[Any] = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
        return True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LOSSES:
            return self._loss(func, args, kwargs)
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            return self._backward(args, kwargs)
        if func is torch.autograd.grad:
            outputs = [args[0]] if isinstance(args[0], Tensor) else args[0]
            if any(self._known(tensor) for tensor in outputs):
                raise Refused(ELSEWHERE)
        elif self._losses and args:
            for tensor in args[:2]:
                if (known := self._known(tensor)) is not None:
                    return self._used(known, func, args, kwargs)
        return func(*args, **kwargs)

    def _known(self, tensor: Any) -> Loss | None:
        kept, loss = self._losses.get(id(tensor), (None, None))
        return loss if kept is tensor else None

    def _loss(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Computes a loss function without its mean or sum, keeps the result, and returns what the loop expects."""
        given = [*args, *kwargs.values()]
        if not torch.is_grad_enabled() or not any(isinstance(t, Tensor) and t.requires_grad for t in given):
            return func(*args, **kwargs)
        name, reduction = func.__name__, kwargs.get("reduction")
        if reason := not_known(func, kwargs):
            result = func(*args, **kwargs)
            self._reasons[id(result)] = result, reason
            return result
        elements = func(*args, **kwargs | {"reduction": "none"})
        counts = None
        if reduction == "mean" and "ignore_index" in kwargs and not args[1].is_floating_point():
            counts = args[1] != kwargs["ignore_index"]
        if reduction == "mean" and func is F.ctc_loss:
            elements = elements / torch.as_tensor(args[3], device=elements.device).clamp(min=1)
        return self._keep(Loss(elements, name, str(reduction), counts))

    def _keep(self, loss: Loss) -> Tensor:
        """Remembers a loss, and returns the tensor that the loop gets for it."""
        shown = loss.elements
        if loss.reduction != "none":
            leaf = torch.zeros((), device=shown.device, requires_grad=True)
            shown = _Scalar.apply(leaf, loss.value())
        self._losses[id(shown)] = shown, loss
        return shown

    def _used(self, loss: Loss, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Follows a known loss through its mean or sum, and through products with numbers."""
        name, others = func.__name__, [value for value in args if value is not args[0]]
        if loss.reduction == "none" and name in ("mean", "sum") and len(args) == 1 and not kwargs:
            return self._keep(replace(loss, reduction=name))
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not result.requires_grad:
            return result
        number = others[0] if len(others) == 1 and not kwargs else None
        if name in SCALINGS and isinstance(number, int | float) and loss.reduction != "none":
            self._losses[id(result)] = result, replace(loss, factor=SCALINGS[name](loss.factor, number))
            return result
        self._losses.pop(id(result), None)
        self._reasons[id(result)] = result, f"the loss of {loss.name} was changed by {name!r}"
        return result

    def _backward(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Takes the loss of the batch; the gradient is computed later, by ``optimizer.step()``."""
        tensors = [args[0]] if isinstance(args[0], Tensor) else list(args[0])
        further = [*args[1:], *(value for key, value in kwargs.items() if key != "retain_graph")]
        if len(tensors) != 1 or any(value is not None and value is not False for value in further):
            raise Refused(
                "PrivacyEngine: backward was called with gradients, inputs, create_graph or several losses. Call "
                "loss.backward() on the one loss of the batch."
            )
        loss = self._known(tensors[0])
        if loss is None or loss.reduction == "none":
            raise Refused(f"PrivacyEngine: {self._reason(tensors[0], loss)}")
        reduction = "sum" if loss.reduction == "sum" else "mean"
        if reduction != self._reduction:
            raise Refused(
                f"PrivacyEngine: the loss is a {reduction} over the batch, but make_private was given loss_reduction="
                f"{self._reduction!r}. Make the two equal: with a sum, the update is not divided by the batch size."
            )
        if self.backward_loss is not None:
            raise Refused(
                "PrivacyEngine: loss.backward() was called twice for one batch (two losses, retain_graph=True or "
                f"gradient accumulation). Add the losses per example: {NATIVE}. For larger batches raise the loader's "
                "batch_size, and use BatchMemoryManager."
            )
        self.backward_loss = loss

    def _reason(self, tensor: Tensor, loss: Loss | None) -> str:
        if loss is not None:
            return f"{loss.name} gave one loss per element. Take its mean() before loss.backward()."
        kept, reason = self._reasons.get(id(tensor), (None, ""))
        if kept is not tensor:
            return (
                "loss.backward() was called on a loss that none of torch's loss functions returned, or on one that "
                "was computed from several, so that its per-example losses (Opacus: grad_sample) are not known. Use a "
                f"criterion of torch.nn such as nn.CrossEntropyLoss() alone, or {NATIVE}."
            )
        return (
            f"{reason}, so that its per-example losses (Opacus: grad_sample) are not known. Two losses that are added, "
            "a penalty on the weights (use the optimizer's weight_decay), GradScaler and weights of classes are not "
            f"taken. To use them, {NATIVE}."
        )


class CatcherHooks:
    """Keeps a `LossCatcher` above the recorder on torch's stack of modes while a model's forward runs.

    Below it, the recorder's own bookkeeping would pass through the catcher, too. Copied or pickled hooks do nothing.
    """

    def __init__(self, catcher: LossCatcher | None = None):
        self._catcher, self._was_open, self._handles = catcher, False, []

    def __deepcopy__(self, memo: dict) -> CatcherHooks:
        return CatcherHooks()

    def __reduce__(self) -> tuple:
        return CatcherHooks, ()

    def register(self, model: nn.Module) -> None:
        """Registers the hooks anew: inside of those that the recorder has registered so far."""
        for handle in self._handles:
            handle.remove()
        self._handles = [
            model.register_forward_pre_hook(self.to_top),
            model.register_forward_hook(self.leave, prepend=True, always_call=True),
            model.register_forward_hook(self.come_back, always_call=True),
        ]

    def to_top(self, *_: Any) -> None:
        if self._catcher is not None and self._catcher.close():
            _push_mode(self._catcher)

    def leave(self, *_: Any) -> None:
        self._was_open = self._catcher is not None and self._catcher.close()

    def come_back(self, *_: Any) -> None:
        if self._was_open and self._catcher is not None:
            self._was_open = False
            _push_mode(self._catcher)
